"""assert_double_differentiable: right Functions pass, each kind of mistake fails and is named."""

from functools import partial

import pytest
import torch
from torch import nn

import hoglib as hog
from hoglib.testing import assert_double_differentiable
from tests.functions import Cube, Detached, DetachedTangent, WrongSign, WrongTangent
from tests.models import Fn


def by_parameter(function):
    """x f(w), with f a function that may be wrong."""
    weight = nn.Parameter(torch.tensor([0.7, -1.3]))
    return Fn(lambda net, x: x * function(net.weight), weight=weight)


class ZeroGradient(Cube):
    backward = staticmethod(lambda ctx, g: 0 * g)

    jvp = staticmethod(lambda ctx, t: 0 * t)


x = torch.tensor([0.7, -1.3])
square = torch.tensor([[0.7, -1.3], [0.4, 2.1]])
mask = torch.tensor([0.0, 1.0])

# fmt: off
RIGHT = {
    "a Function": (Cube, x, {"reference": lambda t: t**3}),
    "a module in training, with running averages": (nn.BatchNorm1d(2), torch.randn(5, 2), {"modes": "rr"}),
    "two outputs": (lambda t: (t.exp(), t.sin()), x, {"reference": lambda t: (t.exp(), t.sin())}),
    "an output that does not require grad": (lambda t: (t.exp(), t.detach()), x, {}),
    "an output of integers": (torch.sort, x, {"reference": torch.sort}),
    "inputs in a dictionary": (lambda d: d["a"] * d["b"].sin(), {"a": x, "b": x}, {}),
    "a module and its reference": (by_parameter(torch.exp), square, {"reference": lambda t: t * torch.tensor([0.7, -1.3]).double().exp()}),
    "an empty output among others": (lambda t: (t[2:], t.sin()), x, {}),
    "random numbers that depend on nothing": (lambda t: t * torch.rand(2, dtype=t.dtype), x, {}),
    "a function that holds float32 numbers itself": (lambda t: t @ torch.ones(2), x, {}),
    "a complex input": (lambda z: z * z.conj() * z, torch.tensor([1 + 2j, 0.5j]), {"reference": lambda z: z * z.abs() ** 2}),
    "a mask of infinities in float32": (lambda t: (t + torch.tensor([0.0, -torch.inf])).softmax(-1)[0] * t.sin(), x, {}),
}
# fmt: on


@pytest.mark.parametrize("case", RIGHT)
def test_right_functions_pass(case):
    function, inputs, options = RIGHT[case]
    assert_double_differentiable(function, inputs, **options)


def test_warnings_of_the_report_do_not_fail():
    function = lambda t: t.float().sin().double()  # noqa: E731
    assert "warn" in {row.status for row in hog.verify(function, x)}
    assert_double_differentiable(function, x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_right_functions_pass_where_gradients_are_off(mode):
    with mode():
        assert_double_differentiable(torch.sin, torch.randn(3), reference=torch.sin)
        assert_double_differentiable(nn.Linear(2, 1), torch.randn(3, 2))


# fmt: off
WRONG = {
    "wrong tangent": (WrongTangent, x, {}, "first derivative: forward", "the jvp of WrongTangent is wrong"),
    "cut tangent inside a function": (lambda t: DetachedTangent.apply(t.sin()), x, {}, "second derivative: reverse-over-forward", "the tangent of output 0, by inputs[0]"),
    "a parameter's second derivative": (by_parameter(Detached.apply), x, {}, "second derivative: reverse-over-reverse", "by the parameter weight"),
    "right only at zero": (ZeroGradient, torch.zeros(2), {}, "first derivative: reverse", "by inputs[0] (`x`)"),
    "a constant": (lambda t: torch.ones(3), x, {}, "first derivative: reverse", "no output with elements requires grad"),
    "no elements": (lambda t: t[2:], x, {}, "first derivative: reverse", "no output with elements requires grad"),
    "no forward rule": (lambda t: torch.nn.functional.hardsigmoid(t).exp(), square, {}, "second derivative: reverse-over-reverse", "not implemented"),
    "another second derivative": (Cube, x, {"reference": lambda t: t**3 + (t - t.detach()) ** 2}, "reference: second derivative", "by inputs[0]"),
    "another number of outputs": (Cube, x, {"reference": lambda t: (t**3, t)}, "reference: value", "as many outputs as the reference gives, 2, got 1"),
    "other integers": (torch.sort, x, {"reference": lambda t: (t.sort()[0], t.argsort() + 1)}, "reference: value", "output 1"),
    "nested inputs": (lambda d: WrongSign.apply(d["a"]["b"]), ({"a": {"b": x}},), {}, "first derivative: reverse", "by inputs[0].a.b"),
}
# fmt: on


@pytest.mark.parametrize("case", WRONG)
def test_wrong_functions_fail(case):
    function, inputs, options, row, words = WRONG[case]
    with pytest.raises(AssertionError) as caught:
        assert_double_differentiable(function, inputs, **options)
    text = str(caught.value)
    name = getattr(function, "__name__", type(function).__name__)
    assert text.startswith(f"{name}: WRONG, by ")
    assert f"FAIL  {row}\n" in text
    assert words in " ".join(text.split())


@pytest.mark.parametrize("form", [WrongSign.apply, partial(WrongSign.apply)])
def test_a_function_is_named_by_its_class(form):
    with pytest.raises(AssertionError, match=r"^WrongSign: WRONG"):
        assert_double_differentiable(form, x)
