"""`hog.graph`: what is in a picture of a gradient's graph, which faults it marks, and how it is saved."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib.cli.main import main
from hoglib.errors import DrawingError, HoglibError, MissingDependencyError
from tests.functions import (
    BackwardWithoutGrad,
    ClassicCube,
    Cube,
    Detached,
    KeepsIntermediate,
    OnceDifferentiable,
)

ROOT = Path(__file__).parents[2]
has_graphviz = pytest.mark.skipif(not shutil.which("dot"), reason="graphviz is not installed")


class Scaled(ClassicCube):
    """Right; it is linear, so that its gradient depends on the incoming one alone."""

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, g):
        return 3 * g


class Masked(ClassicCube):
    """Right: what it saves without a graph is an input."""

    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(x, mask)
        return mask * x**3

    @staticmethod
    def backward(ctx, g):
        x, mask = ctx.saved_tensors
        return 3 * mask * x**2 * g, None


class Exp(ClassicCube):
    """Right: it saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * g


class Slope(Function):
    """3 x^2 by NumPy, and how it is differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.as_tensor(3 * x.detach().cpu().numpy() ** 2).to(x.device)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 6 * x * g


class Nested(ClassicCube):
    """Right: its backward applies a Function that is differentiable."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return Slope.apply(x) * g


class NumPy(ClassicCube):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.as_tensor(3 * x.detach().numpy() ** 2) * g


class Saves(ClassicCube):
    @staticmethod
    def forward(ctx, x):
        slope = 3 * x**2
        ctx.save_for_backward(x, slope)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[1] * g


class Partly(ClassicCube):
    """One of two factors x is detached, and half of the second derivative with it."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x * x.detach() * g


class Breaks(ClassicCube):
    @staticmethod
    def backward(ctx, g):
        raise ValueError('not "today" \\ <b>')


def x3():
    return torch.tensor([0.5, 1.0, 2.0])


def labels(picture):
    """The text of each node, by its name in DOT."""
    found = re.findall(r'^ *(n\d+) \[label="((?:[^"\\]|\\.)*)"', str(picture), re.M)
    return {key: label.replace("\\n", "\n") for key, label in found}


def arrows(picture, kind=""):
    """Pairs of the first lines of labels."""
    names = {key: label.partition("\n")[0] for key, label in labels(picture).items()}
    lines = re.findall(r"^ *(n\d+) -> (n\d+) \[(.*)\];$", str(picture), re.M)
    return {(names[a], names[b]) for a, b, how in lines if kind in how}


def reaches(picture, start, end):
    """Whether a path of arrows that carry values leads from start to end."""
    names = labels(picture)
    pairs = re.findall(r'^ *(n\d+) -> (n\d+) \[color="#444444"', str(picture), re.M)
    at = {key for key, label in names.items() if label.startswith(start)}
    while True:
        more = at | {b for a, b in pairs if a in at}
        if more == at:
            return any(names[key].startswith(end) for key in at)
        at = more


# What is drawn.


def test_a_function_its_gradient_and_the_way_between_them():
    picture = hog.graph(Cube, x3())
    found = set(labels(picture).values())
    assert {
        "x\n(3,)",
        "Cube\n(3,)",
        "output\n(3,)",
        "grad of output\n(3,)",
        "grad of x\n(3,)",
    } <= found
    assert "Pow\n(3,)" in found
    assert 'label="made in Cube.backward"' in str(picture)
    assert {("x", "Cube"), ("Cube", "output"), ("x", "Pow"), ("Mul", "grad of x")} <= arrows(
        picture
    )
    assert reaches(picture, "x", "grad of x")
    assert "AccumulateGrad" not in str(picture)
    assert picture.faults == ()


def test_each_node_is_drawn_once():
    picture = hog.graph(lambda x: (x * x + x).sum(), x3())
    names = list(labels(picture).values())
    assert names.count("x\n(3,)") == 1
    lines = re.findall(r"n\d+ -> n\d+", str(picture))
    assert len(lines) == len(set(lines))


def test_fn_may_be_a_class_its_apply_a_function_or_a_module():
    for fn in (Cube, Cube.apply, lambda x: Cube.apply(x)):
        assert "Cube\n(3,)" in labels(hog.graph(fn, (x3(),))).values()
    assert "weight\n(2, 3)" in labels(hog.graph(nn.Linear(3, 2), x3())).values()


def test_orders():
    first, second, third = (str(hog.graph(Cube, x3(), order=k)) for k in (1, 2, 3))
    assert "grad of" not in first
    assert "cluster_order2" in second
    assert "cluster_order3" not in second
    assert "second derivative by x" in third
    assert reaches(third, "x", "second derivative by x")


def test_custom_functions_are_counted():
    picture = hog.graph(lambda x: Cube.apply(Cube.apply(x)), x3())
    assert {"Cube\n(3,)", "Cube #2\n(3,)"} <= set(labels(picture).values())
    assert ("Cube", "Cube #2") in arrows(picture)
    assert "made in Cube #2.backward" in str(picture)


def test_modules_have_boxes_with_their_qualified_names():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 1)))
    loss = hog.functional_loss(model, F.mse_loss)
    batch = torch.randn(2, 3), torch.randn(2, 1)
    for text in (
        str(hog.graph(model, batch[0])),
        str(hog.graph(loss, (hog.trainable_params(model), batch))),
    ):
        for name in ("0 (Linear)", "1.0 (Tanh)", "1.1 (Linear)", "backward of 1.1 (Linear)"):
            assert f'label="{name}"' in text
    assert "params.1.1.weight\n(1, 4)" in labels(text).values()
    assert "batch[1]\n(2, 1)" in labels(text).values()
    closed = str(hog.graph(lambda x: model(x), batch[0]))
    assert 'label="model.1.0 (Tanh)"' in closed
    assert "model.0.weight\n(4, 3)" in labels(closed).values()


def test_a_module_that_runs_twice_has_two_boxes():
    layer = nn.Linear(3, 3)
    text = str(hog.graph(lambda x: layer(layer(x).tanh()), x3()))
    assert 'label="layer (Linear)"' in text
    assert 'label="layer (Linear), call 2"' in text


def test_modules_after_one_that_raised():
    class Refuses(nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    refuses, layer = Refuses(), nn.BatchNorm1d(3)

    def fn(x):
        try:
            return refuses(x)
        except ValueError:
            return layer(x).sin()

    text = str(hog.graph(fn, torch.randn(4, 3)))
    assert "Refuses" not in text
    assert torch.equal(layer.running_mean, torch.zeros(3))
    before, _, inside = text.partition('label="layer (BatchNorm1d)"')
    assert "Sin" in before
    assert "Sin" not in inside.partition("}")[0]


def test_only_by_what_requires_grad_if_anything_does():
    a = x3().requires_grad_()
    found = labels(hog.graph(lambda a, b: (a * b).sum(), (a, x3()))).values()
    assert "grad of a\n(3,)" in found
    assert "grad of b\n(3,)" not in found
    assert "b\n(3,)" in found  # kept for backward, as a constant


def test_what_is_not_used_says_so():
    found = labels(hog.graph(lambda a, b: a.sum(), (x3(), x3()))).values()
    assert "b (unused)\n(3,)" in found
    assert "a\n(3,)" in found


def test_kept_tensors_are_left_out_on_demand():
    fn = lambda a: (a.sin() * torch.ones(3)).sum()  # noqa: E731
    assert "saved_tensors[0]" in str(hog.graph(Cube, x3()))
    assert "saved_tensors[0]" not in str(hog.graph(Cube, x3(), saved=False))
    assert arrows(hog.graph(fn, x3(), saved=False), "dashed") == set()


def test_complex_tensors_lists_and_dicts():
    def fn(z, rest):
        return {"a": (z * rest[0]).abs().sum(), "b": rest[1]["w"] ** 2, "n": 3}

    inputs = (torch.randn(2, dtype=torch.complex64), [x3()[:2], {"w": x3()}])
    found = labels(hog.graph(fn, inputs)).values()
    assert {"z\n(2,)", "rest[0]\n(2,)", "rest[1].w\n(3,)", "output 1\n(3,)"} <= set(found)


def test_the_text_is_the_same_twice_and_names_no_address():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    for fn in (Saves, NumPy, model, lambda x: Cube.apply(x)):
        texts = {str(hog.graph(fn, torch.ones(2, 3))) for _ in range(3)}
        assert len(texts) == 1
        assert "0x" not in texts.pop()


# What is wrong.


@pytest.mark.parametrize("function", [Cube, Scaled, Exp, Nested], ids=lambda f: f.__name__)
def test_right_functions_have_no_fault(function):
    assert hog.graph(function, x3()).faults == ()
    assert hog.graph(lambda x: function.apply(x.sin()).sum(), x3(), order=3).faults == ()


@pytest.mark.gpu
def test_on_a_gpu():
    for function in (Cube, Nested, Saves, BackwardWithoutGrad, Breaks):
        expected, found = (hog.graph(function, x3().to(at)) for at in ("cpu", "cuda"))
        assert str(found) == str(expected)
        assert found.faults == expected.faults


def test_a_function_that_a_backward_applies_is_in_its_box():
    text = str(hog.graph(Nested, x3()))
    inside = text.partition('label="made in Nested.backward"')[2].partition("}")[0]
    assert 'label="Slope\\n(3,)"' in inside
    assert reaches(text, "x", "Slope")


def test_an_input_without_a_gradient_is_no_fault():
    picture = hog.graph(Masked, (x3().requires_grad_(), torch.ones(3)))
    assert picture.faults == ()
    assert "mask\n(3,)" in labels(picture).values()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (BackwardWithoutGrad, "under torch.no_grad"),
        (Detached, ".detach() at"),
        (NumPy, ".detach(), then .numpy() at"),
        (OnceDifferentiable, "@once_differentiable"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "within a function"])
def test_a_detached_gradient_is_marked_and_reported(function, said, alone):
    fn = function if alone else lambda x: (function.apply(x.sin()) * 2).sum()
    picture = hog.graph(fn, x3())
    (fault,) = picture.faults
    assert fault.startswith(f"{function.__name__}.backward")
    assert said in fault
    assert "silently zero" in fault
    red = [text for text in labels(picture).values() if text.startswith("DETACHED in")]
    assert red
    assert 'fillcolor="#F7DFCC"' in str(picture)
    assert arrows(picture, "arrowhead=tee") == {(function.__name__, red[0].partition("\n")[0])}
    if alone:
        assert not reaches(picture, "x", "grad of x")


def test_the_graph_goes_on_behind_a_detached_gradient():
    picture = hog.graph(lambda x: BackwardWithoutGrad.apply(x.sin()), x3())
    assert reaches(picture, "DETACHED in BackwardWithoutGrad.backward", "grad of x")
    assert reaches(picture, "x", "grad of x")  # by the sine


@pytest.mark.parametrize(
    ("function", "slot"), [(Saves, "ctx.saved_tensors[1]"), (KeepsIntermediate, "ctx.square")]
)
def test_a_saved_intermediate_is_marked_and_reported(function, slot):
    picture = hog.graph(function, x3())
    (fault,) = picture.faults
    assert f"saves {slot}, made in forward" in fault
    assert "silently zero" in fault
    assert f"{slot}\n(3,)\nno graph: made in forward" in labels(picture).values()
    assert (slot, function.__name__) in arrows(picture)
    assert (slot, "Mul") in arrows(picture)  # where backward uses it
    assert slot in str(hog.graph(function, x3(), saved=False))


def test_a_partly_detached_gradient_is_marked():
    picture = hog.graph(Partly, x3())
    (fault,) = picture.faults
    assert "may be incomplete" in fault
    assert any(text.startswith("partly detached in Partly") for text in labels(picture).values())
    assert "#F7DFCC" not in str(picture)


def test_an_operation_without_a_second_derivative_is_marked():
    picture = hog.graph(
        lambda a, b: torch.cdist(a, b).sum(), (torch.randn(4, 3), torch.randn(5, 3))
    )
    (fault,) = picture.faults
    assert fault.startswith("CdistBackward raises in the second derivative: ")
    (marked,) = (text for text in labels(picture).values() if "raises in" in text)
    assert marked.startswith("CdistBackward")


def test_an_operation_whose_derivative_torch_has_not_is_named():
    q = torch.randn(1, 2, 4, 8)
    picture = hog.graph(lambda q: F.scaled_dot_product_attention(q, q, q).sum(), q)
    assert "AttentionForCpuBackward raises in the second derivative" in picture.faults[0]


def test_a_backward_that_raises_leaves_the_forward():
    picture = hog.graph(Breaks, x3())
    (fault,) = picture.faults
    assert fault.startswith("Breaks raises in the gradient with a graph: ValueError: not")
    assert ("Breaks", "output") in arrows(picture)
    assert "grad of x" not in str(picture)
    assert '\\"today\\" \\\\ <b>' in str(picture)
    assert "&lt;lambda&gt; and its gradient" in str(hog.graph(lambda x: x * 2, x3()))


def test_an_output_without_a_graph_is_reported():
    picture = hog.graph(lambda x: x.detach() * 2, x3())
    assert "no output has a graph" in picture.faults[0]
    assert "output\n(3,)\nno graph" in labels(picture).values()


def test_through_a_checkpoint():
    def fn(x):
        return checkpoint(lambda y: Cube.apply(y.sin()), x, use_reentrant=False).sum()

    picture = hog.graph(fn, x3())
    assert picture.faults == ()
    assert reaches(picture, "x", "grad of x")


# Large graphs.


def test_a_large_graph_is_joined_by_module():
    block = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(30)]
    model = nn.Sequential(*block)
    picture = hog.graph(model, torch.randn(2, 4))
    assert "nodes, joined by module" in str(picture)
    assert len(labels(picture)) <= 150
    assert any(text.startswith("7 (Sequential)\n") for text in labels(picture).values())
    assert reaches(picture, "input", "output")
    whole = hog.graph(model, torch.randn(2, 4), max_nodes=10_000)
    assert "joined" not in str(whole)
    assert len(labels(whole)) > 800


def test_without_modules_it_is_joined_by_name():
    def fn(x):
        for _ in range(100):
            x = (x * 1.01).sin()
        return x.sum()

    picture = hog.graph(fn, x3())
    assert "joined by name" in str(picture)
    assert "Sin, 100 times" in labels(picture).values()
    assert reaches(picture, "x", "output")


def test_what_is_wrong_is_not_joined():
    def fn(x):
        for _ in range(100):
            x = (x * 1.01).sin()
        return Saves.apply(BackwardWithoutGrad.apply(x)).sum()

    found = labels(hog.graph(fn, x3())).values()
    assert any(text.startswith("DETACHED in BackwardWithoutGrad") for text in found)
    assert any(text.startswith("ctx.saved_tensors[1]") for text in found)
    assert "Saves\n(3,)" in found


class Layer(nn.Module):
    """A linear layer, and what is wrong after it."""

    def __init__(self, wrong=None):
        super().__init__()
        self.linear, self.wrong = nn.Linear(4, 4), wrong

    def forward(self, x):
        x = self.linear(x).tanh()
        return x if self.wrong is None else self.wrong(x)


@pytest.mark.parametrize(
    ("limit", "how"), [(200, "call of a module"), (130, "module"), (60, "name")]
)
def test_what_is_wrong_in_a_module_is_not_joined(limit, how):
    def distance(x):
        return torch.cdist(x, x.detach() + 1)

    layers = [Layer(BackwardWithoutGrad.apply), Layer(Saves.apply), *(Layer() for _ in range(20))]
    for wrong, kept in (
        (None, "BackwardWithoutGrad"),
        (None, "Saves"),
        (distance, "CdistBackward"),
    ):
        model = nn.Sequential(*layers, Layer(wrong))
        picture = hog.graph(model, torch.randn(4, 4), max_nodes=limit)
        assert f"joined by {how})" in str(picture)
        assert any(text.startswith(f"{kept}\n") for text in labels(picture).values())
        assert not re.search(r"(n\d+) -> \1 ", str(picture))


# What was passed stays.


def test_nothing_that_was_passed_changes():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    model[0].weight.grad = torch.ones(4, 3)
    x = torch.randn(5, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for fn in (model, lambda x: model(x).sum()):
        hog.graph(fn, x)
    hog.graph(
        hog.functional_loss(model, F.mse_loss),
        (hog.trainable_params(model), (x, torch.randn(5, 4, generator=torch.Generator()))),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))
    assert model[0].bias.grad is None
    assert model.training
    assert not x.requires_grad
    assert x.grad is None
    assert not torch.is_anomaly_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_after_an_error_nothing_is_left_behind():
    hooks = torch.nn.modules.module._global_forward_hooks

    def fn(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hog.graph(fn, x3())
    hog.graph(Breaks, x3())
    assert not torch.is_anomaly_enabled()
    assert not hooks
    assert not torch.overrides._get_current_function_mode_stack()


def test_an_input_that_is_changed_in_place():
    x = x3()
    assert "Mul\n(3,)" in labels(hog.graph(lambda x: x.mul_(2).sum(), x)).values()
    assert torch.equal(x, x3())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_where_gradients_are_off(mode):
    expected = str(hog.graph(Cube, x3()))
    with mode():
        assert str(hog.graph(Cube, x3())) == expected


# Wrong arguments.


@pytest.mark.parametrize(
    ("fn", "inputs", "options", "said"),
    [
        (3, torch.ones(2), {}, "fn: expected a function"),
        (Cube, torch.arange(3), {}, "floating-point or complex tensor, got none"),
        (Cube, torch.ones(2), {"order": 4}, "order: expected 1, 2 or 3"),
        (Cube, torch.ones(2), {"order": 0}, "order: expected"),
        (Cube, torch.ones(2), {"saved": "yes"}, "saved: expected True or False"),
        (Cube, torch.ones(2), {"max_nodes": 0}, "max_nodes: expected"),
    ],
)
def test_wrong_arguments_are_explained(fn, inputs, options, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)) as caught:
        hog.graph(fn, inputs, **options)
    assert isinstance(caught.value, HoglibError)


# Saving.


@pytest.fixture
def picture():
    return hog.graph(Cube, torch.tensor([0.5, 1.0, 2.0]))


@pytest.fixture
def fake_dot(tmp_path, monkeypatch):
    """Puts a `dot` of this text on an otherwise empty PATH."""

    def put(text):
        folder = tmp_path / "bin"
        folder.mkdir()
        script = folder / "dot"
        script.write_text(f"#!{sys.executable}\nimport sys, time\n{text}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder))

    return put


ECHO = "print('<svg>', sys.argv[1], len(sys.stdin.read()))"


@pytest.mark.parametrize("name", ["a.dot", "a.gv", "a.DOT"])
def test_text_is_saved_without_graphviz(picture, tmp_path, monkeypatch, name):
    monkeypatch.setenv("PATH", "")
    path = picture.save(tmp_path / name)
    assert path == tmp_path / name
    assert path.read_text() == str(picture)
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("form", ["svg", "png", "pdf"])
def test_a_picture_is_drawn_by_dot(picture, tmp_path, fake_dot, form):
    fake_dot(ECHO)
    path = picture.save(str(tmp_path / f"a.{form}"))
    assert path.read_text() == f"<svg> -T{form} {len(str(picture))}\n"
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_without_graphviz_it_says_what_to_install(picture, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependencyError, match=r"apt install graphviz.*save as \.dot"):
        picture.save(tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())
    assert picture._repr_svg_() is None
    assert picture._repr_mimebundle_() == {"text/plain": str(picture)}


def test_a_notebook_shows_the_picture(picture, fake_dot):
    fake_dot(ECHO)
    assert picture._repr_svg_().startswith("<svg>")
    bundle = picture._repr_mimebundle_()
    assert bundle["image/svg+xml"].startswith("<svg>")
    assert (
        bundle["text/plain"]
        == repr(picture)
        == "<Graph of Cube: 0 faults; draw it with .save('graph.svg')>"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sys.exit('no such font')", "ended with status 1 and said: no such font"),
        ("pass", "ended with status 0 and said: nothing"),
        ("time.sleep(30)", "longer than 0.2 s"),
    ],
    ids=["fails", "draws nothing", "takes long"],
)
def test_errors_of_graphviz_are_reported(picture, tmp_path, fake_dot, text, said):
    fake_dot(text)
    (tmp_path / "a.svg").write_text("old")
    with pytest.raises(DrawingError, match=said):
        picture.save(tmp_path / "a.svg", timeout=0.2 if "sleep" in text else 60)
    assert (tmp_path / "a.svg").read_text() == "old"


def test_a_folder_that_is_missing_and_a_suffix_that_is_unknown(picture, tmp_path):
    with pytest.raises(OSError, match=r"expected an existing folder.*make it first"):
        picture.save(tmp_path / "none" / "a.dot")
    for name in ("a.jpg", "a"):
        with pytest.raises(ValueError, match=r"expected one of \.dot, \.gv, \.svg"):
            picture.save(tmp_path / name)
    with pytest.raises(TypeError, match="path: expected a path"):
        picture.save(3)


def test_a_full_disk_leaves_what_was_there(picture, tmp_path, monkeypatch):
    path = tmp_path / "a.dot"
    path.write_text("old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="could not be written: No space left on device") as caught:
        picture.save(path)
    assert isinstance(caught.value, HoglibError)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.dot"]


@has_graphviz
@pytest.mark.parametrize(
    "function", [Cube, Saves, NumPy, OnceDifferentiable, Breaks], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_graphviz_reads_every_text(function, order, tmp_path):
    picture = hog.graph(lambda x: function.apply(x.sin()).sum(), x3(), order=order)
    for form, starts in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        path = picture.save(tmp_path / f"a.{form}")
        assert path.read_bytes().startswith(starts)
    done = subprocess.run(["dot", "-Tsvg"], input=str(picture).encode(), capture_output=True)
    assert done.stderr == b""


# The command and the page.

SOURCE = """
import torch


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        print("noise")
        ctx.slope = 3 * x**2
        return x**3

    @staticmethod
    def backward(ctx, g):
        return ctx.slope * g

    @staticmethod
    def sample_inputs():
        return [(torch.randn(3),), (torch.randn(4),)]


class Other(Saves):
    pass
"""


def test_the_command_prints_dot_and_reports_faults(tmp_path, capsys):
    (tmp_path / "f.py").write_text(SOURCE)
    assert main(["graph", f"{tmp_path}/f.py:Saves"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith('digraph "Saves" {')
    assert out.endswith("}\n")
    assert "(3,)" in out
    assert "fault: Saves saves ctx.slope, made in forward" in err


def test_the_command_saves(tmp_path, capsys):
    (tmp_path / "f.py").write_text(SOURCE)
    target, output = f"{tmp_path}/f.py:Saves", tmp_path / "a.dot"
    options = ["--input", "randn(5)", "-o", str(output), "--order", "1", "--no-saved"]
    assert main(["graph", target, *options]) == 0
    assert "(5,)" in output.read_text()
    assert "grad of" not in output.read_text()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["f.py"], "expected one Function, got Saves, Other"),
        (["f.py:Nothing"], "expected a name in"),
        (["f.py:Saves", "--input", "nonsense("], "expected an expression"),
        (["f.py:Saves", "-o", "missing/a.dot"], "expected an existing folder"),
        (["f.py:Saves", "--order", "7"], "order: expected 1, 2 or 3"),
    ],
)
def test_the_command_explains_what_could_not_be_drawn(args, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("f.py").write_text(SOURCE)
    assert main(["graph", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
    assert said in err
    assert "Traceback" not in err


def test_the_pictures_of_the_page_are_those_of_its_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "graph.md").read_text()
    namespace: dict = {}
    for code, name in zip(
        re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M), ("cube", "detached"), strict=False
    ):
        exec(code, namespace)
        drawn = (ROOT / "docs" / "images" / f"graph-{name}.svg").read_text()
        lines = [
            line for text in labels(namespace["picture"]).values() for line in text.split("\n")
        ]
        for line in lines:
            assert f">{line}</text>" in drawn or ".py:" in line or "<string>" in line, line
        assert len(re.findall('class="node"', drawn)) == len(labels(namespace["picture"]))
        assert len(re.findall('class="edge"', drawn)) == str(namespace["picture"]).count("->")
