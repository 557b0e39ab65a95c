"""`hog.graph`: what is in a picture of a gradient's graph, which faults it marks, and how it is saved."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib.errors import DrawingError, HoglibError, MissingDependencyError
from tests.functions import (
    BackwardWithoutGrad,
    ClassicCube,
    Cube,
    Detached,
    KeepsIntermediate,
    OnceDifferentiable,
    ThroughNumpy,
    by_saved,
    saving_inputs,
)
from tests.refused import refused
from tests.unchanged import unchanged

ROOT = Path(__file__).parents[1]


class Scaled(ClassicCube):
    """Right; it is linear, so that its gradient depends on the incoming one alone."""

    forward = staticmethod(lambda ctx, x: 3 * x)

    backward = staticmethod(lambda ctx, g: 3 * g)


class Masked(ClassicCube):
    """Right: what it saves without a graph is an input."""

    forward = saving_inputs(lambda x, mask: mask * x**3)

    backward = by_saved(lambda g, x, mask: (3 * mask * x**2 * g, None))


class Partly(ClassicCube):
    """One of two factors x is detached, and half of the second derivative with it; the other goes
    through a Function."""

    backward = by_saved(lambda g, x: Scaled.apply(x) * x.detach() * g)


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


def reaches(picture, start, end):
    """Whether a path of arrows that carry values leads from start to end, by the begins of labels."""
    names = labels(picture)
    pairs = re.findall(r"^ *(n\d+) -> (n\d+) \[\];", str(picture), re.M)
    at = {key for key, label in names.items() if label.startswith(start)}
    while more := {b for a, b in pairs if a in at} - at:
        at |= more
    return any(names[key].startswith(end) for key in at)


# What is drawn.


def test_a_function_its_gradient_and_the_way_between_them():
    first, picture, third = (hog.graph(Cube, x3(), order=k) for k in (1, 2, 3))
    found = set(labels(picture).values())
    ends = {"inputs[0]", "output 0", "incoming gradient", "grad of inputs[0]", "Cube", "Pow"}
    assert {f"{name}\n(3,)" for name in ends} <= found
    inside = str(picture).partition('label="made in Cube.backward"')[2].partition("}")[0]
    assert 'label="Pow\\n(3,)"' in inside
    assert reaches(picture, "inputs[0]", "output 0")
    assert reaches(picture, "inputs[0]", "grad of inputs[0]")
    assert "grad of" not in str(first)
    assert reaches(third, "inputs[0]", "second derivative by inputs[0]")
    assert picture.faults == third.faults == ()
    assert str(hog.graph(Cube, x3())) == str(picture)
    assert "0x" not in str(picture)


def test_models_losses_lists_and_complex_tensors():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    loss = hog.functional_loss(model, F.mse_loss)
    batch = torch.randn(2, 3), torch.randn(2, 4)
    for picture, name in (
        (hog.graph(model, batch[0]), "0.weight"),
        (hog.graph(loss, (hog.trainable_params(model), batch)), "inputs[0].0.weight"),
        (hog.graph(lambda x: model(x), batch[0]), "a tensor not in inputs"),
    ):
        assert f"{name}\n(4, 3)" in labels(picture).values()
        assert reaches(picture, name, "output 0")
    z = torch.randn(2, dtype=torch.complex64)
    picture = hog.graph(lambda z, rest: {"a": z.abs(), "b": rest[0] ** 2, "n": 3}, (z, [x3()]))
    assert {"inputs[0]\n(2,)", "inputs[1][0]\n(3,)", "output 1\n(3,)"} <= {
        *labels(picture).values()
    }


# What is wrong.


@pytest.mark.parametrize(
    ("function", "others"),
    [(Cube, ()), (Scaled, ()), (Masked, (torch.ones(3),))],
    ids=["Cube", "linear", "saves an input without a gradient"],
)
def test_right_functions_have_no_fault(function, others):
    def fn(x, *rest):
        return checkpoint(lambda y: function.apply(y.sin(), *rest), x, use_reentrant=False).sum()

    inputs = (x3().requires_grad_(), *others)
    assert hog.graph(fn, inputs, order=3).faults == ()
    assert hog.graph(function, inputs).faults == ()


@pytest.mark.parametrize(
    ("function", "says", "whole"),
    [
        (BackwardWithoutGrad, "under torch.no_grad", True),
        (Detached, ".detach() at", True),
        (ThroughNumpy, ".detach(), then NumPy, at", True),
        (OnceDifferentiable, "@once_differentiable", True),
        (KeepsIntermediate, "ctx.square, made in forward", True),
        (Partly, ".detach() at", False),
    ],
)
def test_where_a_backward_leaves_the_graph_is_marked_and_reported(function, says, whole):
    picture = hog.graph(lambda x: Scaled.apply(function.apply(Scaled.apply(x))), x3())
    (fault,) = picture.faults  # not those of the Functions around it, which are right
    assert fault.startswith(f"{function.__name__}.backward leaves the graph (")
    assert says in fault
    assert ("silently zero" in fault) == whole == (not reaches(picture, "inputs", "grad of"))
    assert ("may be incomplete" in fault) == (not whole)
    how = "DETACHED" if whole else "partly detached"
    key, label = next((k, v) for k, v in labels(picture).items() if v.startswith(how))
    assert label.startswith(f"{how} in {function.__name__}.backward\n")
    assert re.search(rf"-> {key} \[.*arrowhead=tee", str(picture))
    assert ("shape=octagon" in str(picture), "shape=hexagon" in str(picture)) == (whole, not whole)


@pytest.mark.parametrize(
    ("fn", "inputs", "says"),
    [
        (F.hardsigmoid, x3(), "NotImplemented raises in the second"),
        (Breaks, x3(), 'Breaks raises in the gradient: ValueError: not "today" \\ <b> (at'),
    ],
    ids=["without a second derivative", "of the user"],
)
def test_what_raises_is_marked_and_reported(fn, inputs, says):
    picture = hog.graph(fn, inputs)
    (fault,) = picture.faults
    assert fault.startswith(says)
    assert "doubleoctagon" in str(picture)
    assert reaches(picture, "inputs[0]", "output 0")
    assert ("grad of inputs[0]" in str(picture)) == (fn is F.hardsigmoid)


def test_an_output_without_a_graph_is_reported():
    picture = hog.graph(lambda x: x.detach() * 2, x3())
    assert "no output has a graph" in picture.faults[0]
    assert "output 0\n(3,)" in labels(picture).values()


@pytest.mark.gpu
def test_on_a_gpu():
    for function in (Cube, KeepsIntermediate, BackwardWithoutGrad, Breaks):
        expected, found = (hog.graph(function, x3().to(at)) for at in ("cpu", "cuda"))
        assert str(found) == str(expected)
        assert found.faults == expected.faults


# What was passed stays.


def test_nothing_that_was_passed_changes():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    model[0].weight.grad = torch.ones(4, 3)
    x = torch.randn(5, 3)
    with unchanged(model):
        for fn in (model, lambda x: model(x).sum()):
            hog.graph(fn, x)
        hog.graph(lambda x: x.mul_(2).sum(), x)
    assert not x.requires_grad
    assert x.grad is None
    with pytest.raises(AttributeError):
        hog.graph(lambda x: x.mine, x)
    for mode in (torch.no_grad, torch.inference_mode):
        expected = str(hog.graph(Cube, x3()))
        with mode():
            assert str(hog.graph(Cube, x3())) == expected


WRONG = {
    "no function": (lambda: hog.graph(3, torch.ones(2)), HoglibError, "fn: expected a function"),
    "integers": (lambda: hog.graph(Cube, torch.arange(3)), HoglibError, "floating-point or complex tensor, got none"),
    "an order": (lambda: hog.graph(Cube, x3(), order=4), HoglibError, "order: expected 1, 2 or 3"),
}  # fmt: skip
test_wrong_arguments_are_explained = refused(WRONG)


# Saving.


def test_without_graphviz_the_text_is_saved_and_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    picture = hog.graph(Cube, x3())
    assert repr(picture) == "<Graph of Cube: 0 faults; draw it with .save('graph.svg')>"
    assert picture.save(str(tmp_path / "a.DOT")).read_text() == str(picture)
    assert picture._repr_mimebundle_() == {"text/plain": str(picture)}
    with pytest.raises(MissingDependencyError, match=r"apt install graphviz.*save as \.dot"):
        picture.save(tmp_path / "a.svg")
    assert [file.name for file in tmp_path.iterdir()] == ["a.DOT"]


def test_graphviz_draws(tmp_path, monkeypatch):
    """By a program of its name, which prints or refuses."""
    picture, script = hog.graph(Cube, x3()), tmp_path / "dot"
    monkeypatch.setenv("PATH", str(tmp_path))
    script.touch(mode=0o755)
    script.write_text(
        f"#!{sys.executable}\nimport sys\nprint('<svg>', sys.argv[1], len(sys.stdin.read()))"
    )
    drawn = f"<svg> -Tsvg {len(str(picture))}\n"
    assert picture.save(tmp_path / "a.svg").read_text() == drawn
    assert picture._repr_mimebundle_() == {"image/svg+xml": drawn, "text/plain": repr(picture)}
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no such font')")
    with pytest.raises(DrawingError, match="ended with status 1 and said: no such font"):
        picture.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == drawn


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
