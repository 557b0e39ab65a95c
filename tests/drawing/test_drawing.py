"""`hog.graph`: what is in a picture of a gradient's graph, which faults it marks, and how it is saved."""

import re
import shutil
import stat
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib.cli.main import main
from hoglib.errors import DrawingError, HoglibError, MissingDependencyError, OutputError
from tests.functions import (
    BackwardWithoutGrad,
    ClassicCube,
    Cube,
    Detached,
    KeepsIntermediate,
    OnceDifferentiable,
    ThroughNumpy,
)

ROOT = Path(__file__).parents[2]


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


class Square(ClassicCube):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Nested(ClassicCube):
    """Right: its backward applies a Function."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * Square.apply(x) * g


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
    ends = {"x\n(3,)", "output\n(3,)", "grad of output\n(3,)", "grad of x\n(3,)"}
    assert ends | {"Cube\n(3,)", "Pow\n(3,)"} <= found
    assert 'label="made in Cube.backward"' in str(picture)
    assert {("x", "Cube"), ("Cube", "output"), ("Mul", "grad of x")} <= arrows(picture)
    assert reaches(picture, "x", "grad of x")
    assert picture.faults == ()


def test_orders():
    first, second, third = (str(hog.graph(Cube, x3(), order=k)) for k in (1, 2, 3))
    assert "grad of" not in first
    assert "cluster_order2" in second
    assert "cluster_order3" not in second
    assert reaches(third, "x", "second derivative by x")


def test_custom_functions_are_counted():
    picture = hog.graph(lambda x: Cube.apply(Cube.apply(x)), x3())
    assert ("Cube", "Cube #2") in arrows(picture)
    assert "made in Cube #2.backward" in str(picture)


def test_modules_have_boxes_with_their_qualified_names():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 1)))
    loss = hog.functional_loss(model, F.mse_loss)
    batch = torch.randn(2, 3), torch.randn(2, 1)
    for picture, parameter in (
        (hog.graph(model, batch[0]), "1.1.weight"),
        (hog.graph(loss, (hog.trainable_params(model), batch)), "params.1.1.weight"),
    ):
        for name in ("0 (Linear)", "1.0 (Tanh)", "1.1 (Linear)", "backward of 1.1 (Linear)"):
            assert f'label="{name}"' in str(picture)
        assert f"{parameter}\n(1, 4)" in labels(picture).values()
    closed = hog.graph(lambda x: model(x), batch[0])
    assert 'label="model.1.0 (Tanh)"' in str(closed)
    assert "model.0.weight\n(4, 3)" in labels(closed).values()


def test_modules_after_one_that_raised():
    class Refuses(nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.refuses, self.layer = Refuses(), nn.Linear(3, 3)

        def forward(self, x):
            try:
                return self.refuses(x)
            except ValueError:
                return self.layer(x).cos()

    model = Catches()
    text = str(hog.graph(lambda x: model(x).sin(), torch.randn(4, 3)))
    assert "Refuses" not in text
    outside, _, inside = text.partition('label="model (Catches)"')
    assert "Sin" in outside
    assert "Cos" in inside.partition("}")[0]


def test_what_functions_save_is_left_out_on_demand():
    inputs = (x3().requires_grad_(), torch.ones(3))
    picture, without = (hog.graph(Masked, inputs, saved=saved) for saved in (True, False))
    assert "saved_tensors[0]" in str(picture)
    assert arrows(picture, "dashed") == {("saved_tensors[1]", "Masked")}
    assert "saved_tensors" not in str(without)


def test_complex_tensors_lists_and_dicts():
    def fn(z, rest):
        return {"a": (z * rest[0]).abs().sum(), "b": rest[1]["w"] ** 2, "n": 3}

    inputs = (torch.randn(2, dtype=torch.complex64), [x3()[:2], {"w": x3()}])
    found = labels(hog.graph(fn, inputs)).values()
    assert {"z\n(2,)", "rest[0]\n(2,)", "rest[1].w\n(3,)", "output 1\n(3,)"} <= set(found)


def test_the_text_is_the_same_twice_and_names_no_address():
    for fn in (KeepsIntermediate, ThroughNumpy, nn.Sequential(nn.Linear(3, 4), nn.Tanh())):
        first, second = (str(hog.graph(fn, torch.ones(2, 3))) for _ in range(2))
        assert first == second
        assert "0x" not in first


# What is wrong.


@pytest.mark.parametrize(
    ("function", "others"),
    [(Cube, ()), (Scaled, ()), (Nested, ()), (Masked, (torch.ones(3),))],
    ids=["Cube", "linear", "applies a Function", "saves an input without a gradient"],
)
def test_right_functions_have_no_fault(function, others):
    inputs = (x3().requires_grad_(), *others)
    picture = hog.graph(lambda x, *rest: function.apply(x.sin(), *rest).sum(), inputs, order=3)
    assert picture.faults == ()


@pytest.mark.gpu
def test_on_a_gpu():
    for function in (Cube, Nested, KeepsIntermediate, BackwardWithoutGrad, Breaks):
        expected, found = (hog.graph(function, x3().to(at)) for at in ("cpu", "cuda"))
        assert str(found) == str(expected)
        assert found.faults == expected.faults


def test_a_function_that_a_backward_applies_is_in_its_box():
    text = str(hog.graph(Nested, x3()))
    inside = text.partition('label="made in Nested.backward"')[2].partition("}")[0]
    assert 'label="Square\\n(3,)"' in inside
    assert reaches(text, "x", "Square")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (BackwardWithoutGrad, "under torch.no_grad"),
        (Detached, ".detach() at"),
        (ThroughNumpy, ".detach(), then NumPy at"),
        (OnceDifferentiable, "@once_differentiable"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_detached_gradient_is_marked_and_reported(function, said):
    picture = hog.graph(function, x3())
    (fault,) = picture.faults
    assert fault.startswith(f"{function.__name__}.backward")
    assert said in fault
    assert "silently zero" in fault
    red = f"DETACHED in {function.__name__}.backward"
    assert 'color="#D55E00", style="filled,bold", shape=octagon' in str(picture)
    assert arrows(picture, "arrowhead=tee") == {(function.__name__, red)}
    assert not reaches(picture, "x", "grad of x")


def test_the_graph_goes_on_behind_a_detached_gradient():
    picture = hog.graph(
        lambda x: Scaled.apply(BackwardWithoutGrad.apply(Scaled.apply(x.sin()))), x3()
    )
    assert len(picture.faults) == 1  # not those of the Functions before it, which are right
    assert reaches(picture, "DETACHED in BackwardWithoutGrad.backward", "grad of x")
    assert reaches(picture, "x", "grad of x")  # by the sine


@pytest.mark.parametrize("saved", [True, False])
def test_a_saved_intermediate_is_marked_and_reported(saved):
    picture = hog.graph(KeepsIntermediate, x3(), saved=saved)
    (fault,) = picture.faults
    assert "saves ctx.square, made in forward" in fault
    assert "silently zero" in fault
    assert "ctx.square\n(3,)\nno graph: made in forward" in labels(picture).values()
    assert ("ctx.square", "KeepsIntermediate") in arrows(picture)


def test_a_partly_detached_gradient_is_marked():
    picture = hog.graph(Partly, x3())
    (fault,) = picture.faults
    assert "may be incomplete" in fault
    assert any(text.startswith("partly detached in Partly") for text in labels(picture).values())
    assert "octagon" not in str(picture)


ATTENTION = "ScaledDotProductFlashAttentionForCpuBackward"


@pytest.mark.parametrize(
    ("fn", "inputs", "name"),
    [
        (torch.cdist, (torch.randn(4, 3), torch.randn(5, 3)), "CdistBackward"),
        (lambda q: F.scaled_dot_product_attention(q, q, q), torch.randn(1, 2, 4, 8), ATTENTION),
    ],
    ids=["with a formula that raises", "without a formula"],
)
def test_an_operation_without_a_second_derivative_is_marked(fn, inputs, name):
    picture = hog.graph(fn, inputs)
    (fault,) = picture.faults
    assert f"{name} raises in the second derivative: " in fault
    (marked,) = (text for text in labels(picture).values() if "raises in" in text)
    assert marked.startswith(name)
    assert "doubleoctagon" in str(picture)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: (x * x.sqrt() / x).sum(), "Div gives NaN in the gradient with a graph."),
        (lambda x: x.norm(), "Div gives NaN in the second derivative."),
    ],
    ids=["first", "second"],
)
def test_where_a_derivative_is_nan(fn, said):
    picture = hog.graph(fn, torch.zeros(3))
    assert picture.faults == (said,)
    assert "doubleoctagon" in str(picture)
    assert hog.graph(fn, torch.ones(3)).faults == ()


def test_a_backward_that_raises_leaves_the_forward():
    picture = hog.graph(Breaks, x3())
    (fault,) = picture.faults
    assert fault.startswith("Breaks raises in the gradient with a graph: ValueError: not")
    assert ("Breaks", "output") in arrows(picture)
    assert "grad of x" not in str(picture)
    assert '\\"today\\" \\\\ <b> (at' in str(picture)


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


class Layer(nn.Module):
    """A linear layer, and what is wrong after it."""

    def __init__(self, wrong=None):
        super().__init__()
        self.linear, self.wrong = nn.Linear(4, 4), wrong

    def forward(self, x):
        x = self.linear(x).tanh()
        return x if self.wrong is None else self.wrong(x)


@pytest.mark.parametrize(("limit", "how"), [(130, "module"), (20, "name")])
@pytest.mark.parametrize("last", ["KeepsIntermediate", "CdistBackward"])
def test_a_large_graph_is_joined_but_for_its_faults(limit, how, last):
    wrong = KeepsIntermediate.apply if last[0] == "K" else lambda x: torch.cdist(x, x.detach() + 1)
    layers = [Layer(BackwardWithoutGrad.apply), *(Layer() for _ in range(20)), Layer(wrong)]
    picture = hog.graph(nn.Sequential(*layers), torch.randn(4, 4), max_nodes=limit)
    names = labels(picture).values()
    assert f"nodes, joined by {how})" in str(picture)
    assert len(names) <= 130
    joined = {"module": "7 (Layer)\n3 operations", "name": "Tanh, 2"}[how]
    for kept in (joined, "BackwardWithoutGrad\n", "DETACHED in BackwardWithoutGrad", f"{last}\n"):
        assert any(text.startswith(kept) for text in names)
    assert reaches(picture, "input", "output")
    assert not re.search(r"(n\d+) -> \1 ", str(picture))


# What was passed stays.


def test_nothing_that_was_passed_changes():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    model[0].weight.grad = torch.ones(4, 3)
    x, target = torch.randn(5, 3), torch.randn(5, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    hidden = weakref.ref(model)  # found only when it runs
    for fn in (model, lambda x: model(x).sum(), lambda x: hidden()(x).sum()):
        hog.graph(fn, x)
    loss = hog.functional_loss(model, F.mse_loss)
    hog.graph(loss, (hog.trainable_params(model), (x, target)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))
    assert model[0].bias.grad is None
    assert not x.requires_grad
    assert x.grad is None


def test_after_an_error_nothing_is_left_behind():
    def fn(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hog.graph(fn, x3())
    hog.graph(Breaks, x3())
    assert not torch.is_anomaly_enabled()
    assert not torch.nn.modules.module._global_forward_hooks
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


@pytest.mark.parametrize(
    ("fn", "inputs", "options", "said"),
    [
        (3, torch.ones(2), {}, "fn: expected a function"),
        (Cube, torch.arange(3), {}, "floating-point or complex tensor, got none"),
        (Cube, torch.ones(2), {"order": 4}, "order: expected 1, 2 or 3"),
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


def test_without_graphviz_the_text_is_saved_and_shown(picture, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert picture.save(str(tmp_path / "a.DOT")).read_text() == str(picture)
    assert picture._repr_mimebundle_() == {"text/plain": str(picture)}
    with pytest.raises(MissingDependencyError, match=r"apt install graphviz.*save as \.dot"):
        picture.save(tmp_path / "a.svg")
    assert [file.name for file in tmp_path.iterdir()] == ["a.DOT"]


def test_a_picture_is_saved_and_shown(picture, tmp_path, fake_dot):
    fake_dot("print('<svg>', sys.argv[1], len(sys.stdin.read()))")
    drawn = f"<svg> -Tsvg {len(str(picture))}\n"
    assert picture.save(tmp_path / "a.svg").read_text() == drawn
    shown = {"image/svg+xml": drawn, "text/plain": repr(picture)}
    assert picture._repr_mimebundle_() == shown
    assert repr(picture) == "<Graph of Cube: 0 faults; draw it with .save('graph.svg')>"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sys.exit('no such font')", "ended with status 1 and said: no such font"),
        ("pass", "ended with status 0 and said: nothing"),
        ("time.sleep(30)", "longer than 0.2 s"),
    ],
    ids=["fails", "draws nothing", "takes long"],
)
def test_errors_of_graphviz_are_reported(picture, tmp_path, fake_dot, monkeypatch, text, said):
    fake_dot(text)
    monkeypatch.setattr("hoglib.drawing.picture.TIMEOUT", 0.2 if "sleep" in text else 60)
    (tmp_path / "a.svg").write_text("old")
    with pytest.raises(DrawingError, match=said):
        picture.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == "old"


def test_a_folder_that_is_missing_and_a_suffix_that_is_unknown(picture, tmp_path):
    with pytest.raises(OSError, match=r"expected an existing folder.*make it first"):
        picture.save(tmp_path / "none" / "a.dot")
    with pytest.raises(ValueError, match=r"expected one of \.dot, \.gv, \.svg"):
        picture.save(tmp_path / "a.jpg")
    with pytest.raises(TypeError, match="path: expected a path"):
        picture.save(3)


def test_a_full_disk_leaves_what_was_there(picture, tmp_path, monkeypatch):
    path = tmp_path / "a.dot"
    path.write_text("old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="could not be written: No space left on device"):
        picture.save(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.dot"]


@pytest.mark.skipif(not shutil.which("dot"), reason="graphviz's program `dot` is not installed")
def test_graphviz_reads_the_text(tmp_path):
    for fn in (KeepsIntermediate, ThroughNumpy, Partly, OnceDifferentiable, Breaks):
        picture = hog.graph(lambda x, fn=fn: fn.apply(x.sin()).sum(), x3(), order=3)
        assert picture.save(tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


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
        (["f.py:Saves", "--input", "nonsense("], "expected an expression"),
        (["f.py:Saves", "-o", "missing/a.dot"], "expected an existing folder"),
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
