"""assert_double_differentiable: right Functions pass, each kind of mistake fails and is named."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib.testing import assert_double_differentiable
from tests.functions import (
    ClassicCube,
    Cube,
    Detached,
    DetachedTangent,
    KeepsIntermediate,
    OnceDifferentiable,
    ThroughNumpy,
    WrongSign,
    WrongTangent,
)


class ForgetsToSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, (g * a)[0]


class ByParameter(nn.Module):
    """x f(w), with f a function that may be wrong."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([0.7, -1.3]))

    def forward(self, x):
        return x * self.function(self.weight)


class Product(torch.autograd.Function):
    """a^2 b."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return 2 * g * a * b, g * a * a


class WrongWhenAlone(Product):
    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, g * a
        return 2 * g * a * b, g * a * a


class CutWhenAlone(Product):
    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return 2 * g * a.detach() * b, None
        return 2 * g * a * b, g * a * a


class WrongForTransposedGradients(Cube):
    @staticmethod
    def backward(ctx, g):
        flat = torch.as_strided(g, (g.numel(),), (1,)) if 0 not in g.stride() else g.reshape(-1)
        return 3 * flat.view(g.shape) * ctx.saved_tensors[0] ** 2


class WrongForTransposedInputs(Cube):
    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0]
        return 3 * g * (x if x.is_contiguous() else x.sin()) ** 2


class WrongForExpandedGradients(Cube):
    @staticmethod
    def backward(ctx, g):
        return (1 if 0 in g.stride() else 3) * g * ctx.saved_tensors[0] ** 2


class ViewsGradients(Cube):
    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0]
        return (3 * g.view(-1) * x.reshape(-1) ** 2).reshape(x.shape)


class SmallAndWrong(Cube):
    @staticmethod
    def forward(x):
        return 1e-7 * x**3

    @staticmethod
    def backward(ctx, g):
        return 5e-7 * g * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx, t):
        return 5e-7 * t * ctx.saved_tensors[0] ** 2


class ZeroGradient(Cube):
    @staticmethod
    def backward(ctx, g):
        return 0 * g

    @staticmethod
    def jvp(ctx, t):
        return 0 * t


class WrongBatch(Cube):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return WrongBatch.apply(x) * 2, in_dims[0]


class LosesBatchDimension(Cube):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return LosesBatchDimension.apply(x), 0


class RoundedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * torch.tensor(0.1)

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0] * 0.1


class RoundedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * 0.1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] * torch.tensor(0.2)


class RightBatch(Cube):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return RightBatch.apply(x), in_dims[0]


class Masked(torch.autograd.Function):
    """t^3 m, with no derivative by m."""

    @staticmethod
    def forward(ctx, t, m):
        ctx.save_for_backward(t, m)
        return t**3 * m

    @staticmethod
    def backward(ctx, g):
        t, m = ctx.saved_tensors
        return 3 * g * t**2 * m, None


def layer_norm(t, weight):
    centred = t - t.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


x = torch.tensor([0.7, -1.3])
square = torch.tensor([[0.7, -1.3], [0.4, 2.1]])
mask = torch.tensor([0.0, 1.0])

# fmt: off
RIGHT = {
    "a Function": (Cube, x, {"reference": lambda t: t**3}),
    "its apply, in a list of inputs": (Cube.apply, [x], {}),
    "a Function with its own vmap": (RightBatch, square, {}),
    "a Function without jvp, setup_context or options": (ClassicCube, x, {}),
    "a Function without jvp inside a function": (lambda t: ClassicCube.apply(t).sum(), x, {}),
    "a Function of two inputs": (Product, (x, x), {"reference": lambda a, b: a * a * b}),
    "a Function at a zero": (Cube, torch.zeros(2), {"reference": lambda t: t**3}),
    "a module in float32": (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), square, {}),
    "a module with a right Function": (ByParameter(Cube.apply), x, {}),
    "a module in training, with running averages": (nn.BatchNorm1d(2), torch.randn(5, 2), {"modes": "rr"}),
    "an input that is a number": (lambda t, n: t**n, (x, 3), {}),
    "two outputs": (lambda t: (t.exp(), t.sin()), x, {"reference": lambda t: (t.exp(), t.sin())}),
    "an output in a dictionary": (lambda t: {"y": t.exp()}, x, {"reference": torch.exp}),
    "an output that does not require grad": (lambda t: (t.exp(), t.detach()), x, {}),
    "an output of integers": (torch.sort, x, {"reference": torch.sort}),
    "inputs in a list": (lambda pair: pair[0] * pair[1], ([x, x],), {}),
    "inputs in a dictionary": (lambda d: d["a"] * d["b"].sin(), {"a": x, "b": x}, {}),
    "an input that is constant": (Masked, (x.clone().requires_grad_(), mask), {}),
    "a target that is constant": (F.binary_cross_entropy, ((mask / 2 + 0.2).requires_grad_(), mask), {}),
    "a reference that is a module": (torch.tanh, x, {"reference": nn.Tanh()}),
    "a module and its reference": (ByParameter(torch.exp), square, {"reference": lambda t: t * torch.tensor([0.7, -1.3]).double().exp()}),
    "an empty output among others": (lambda t: (t[2:], t.sin()), x, {}),
    "random numbers that depend on nothing": (lambda t: t * torch.rand(2, dtype=t.dtype), x, {}),
    "a target of zeros and ones as a variable": (F.binary_cross_entropy, (mask / 2 + 0.2, mask), {}),
    "a function that holds float32 numbers itself": (lambda t: t @ torch.ones(2), x, {}),
    "layer_norm, wrong in other modes of torch": (lambda t, w: F.layer_norm(t, (2,), w), (square, x), {"reference": layer_norm, "modes": ("rr", "fr")}),
    "a complex input": (lambda z: z * z.conj() * z, torch.tensor([1 + 2j, 0.5j]), {"reference": lambda z: z * z.abs() ** 2}),
    "a scalar": (torch.sin, torch.tensor(0.3), {"reference": torch.sin}),
    "a view": (torch.t, square, {}),
    "a function that refuses non-contiguous inputs": (lambda t: t.view(-1).sin(), square, {}),
    "zeros by cancellation": (lambda t: F.layer_norm(t, (2,)).sum(), square, {"reference": lambda t: 0 * t.sum(), "modes": ("rr", "fr")}),
    "a saturated function": (torch.tanh, torch.tensor([18.0, 25.0]), {"reference": torch.tanh}),
    "large values": (lambda t: 1e6 * t.exp() + t, x, {}),
    "the edge of a domain": (torch.log, torch.tensor([1e-3, 1.0]), {}),
    "values held in half precision": (lambda t: t * torch.tensor([0.5, 3.0]), x, {}),
    "a mask of infinities in float32": (lambda t: (t + torch.tensor([0.0, -torch.inf])).softmax(-1)[0] * t.sin(), x, {}),
    "zeros in float32": (lambda t: t.sin() + torch.zeros_like(t, dtype=torch.float32), x, {}),
    "matmul": (torch.matmul, (torch.randn(2, 3), torch.randn(3)), {}),
}
# fmt: on


@pytest.mark.parametrize("case", RIGHT)
def test_right_functions_pass(case):
    function, inputs, options = RIGHT[case]
    assert_double_differentiable(function, inputs, **options)


DIGITS = {
    "a float32 constant in forward": (RoundedForward, "dtype: constants", "`mul` got a float32 tensor of shape ()"),
    "a float32 constant in backward": (RoundedBackward, "dtype: constants", "`mul` got a float32 tensor of shape ()"),
    "computed in float32": (lambda t: t.float().sin().double(), "dtype: float64", "`float` rounded float64 numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIGITS)
def test_functions_that_lose_digits_are_warned_of(case):
    function, name, text = DIGITS[case]
    report = hog.verify(function, x).raise_if_failed()
    assert report[name].status == "warn"
    assert text in report[name].text


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_right_functions_pass_where_gradients_are_off(mode):
    with mode():
        assert_double_differentiable(torch.sin, torch.randn(3), reference=torch.sin)
        assert_double_differentiable(nn.Linear(2, 1), torch.randn(3, 2))


# fmt: off
WRONG = {
    "wrong sign": (WrongSign, x, {}, "first derivative: reverse", "the sign is wrong"),
    "detached in backward": (Detached, x, {}, "detached: .detach()", "Detached.backward leaves the graph by .detach()"),
    "once_differentiable": (OnceDifferentiable, x, {}, "detached: @once_differentiable", "Without it the second derivative is right"),
    "wrong tangent": (WrongTangent, x, {}, "first derivative: forward", "the jvp of WrongTangent is wrong"),
    "cut tangent": (DetachedTangent, x, {}, "detached: .detach()", "DetachedTangent.jvp leaves the graph"),
    "cut tangent inside a function": (lambda t: DetachedTangent.apply(t.sin()), x, {}, "second derivative: reverse-over-forward", "the tangent of output 0, by inputs[0]"),
    "NumPy in backward": (ThroughNumpy, x, {}, "detached: .detach()", ".detach(), then NumPy,"),
    "kept intermediate": (KeepsIntermediate, x, {}, "saved: ctx.square", "ctx.square = x * x"),
    "missing sum": (ForgetsToSum, (torch.randn(3, 2), x), {}, "first derivative: reverse", "by inputs[1] (`b`)"),
    "a parameter's second derivative": (ByParameter(Detached.apply), x, {}, "second derivative: reverse-over-reverse", "by the parameter weight"),
    "a parameter differentiated once": (ByParameter(OnceDifferentiable.apply), x, {}, "detached: @once_differentiable", "Remove the decorator"),
    "wrong when alone": (WrongWhenAlone, (x, x + 1), {}, "inputs: each subset", "when only inputs[1] (`b`) requires grad, the gradient"),
    "cut when alone": (CutWhenAlone, (x, x + 1), {}, "inputs: each subset", "when only inputs[0] (`a`) requires grad, the second derivative"),
    "transposed gradients": (WrongForTransposedGradients, square, {}, "layout: non-contiguous gradients", "is different"),
    "transposed inputs": (WrongForTransposedInputs, square, {}, "layout: non-contiguous inputs", "is different"),
    "expanded gradients": (WrongForExpandedGradients, x, {}, "layout: stride-0 gradients", "is different"),
    "gradients viewed": (ViewsGradients, square, {}, "layout: non-contiguous gradients", "backward raised RuntimeError: view size"),
    "small values": (SmallAndWrong, x, {}, "first derivative: reverse", "1.667 times the expected value"),
    "right only at zero": (ZeroGradient, torch.zeros(2), {}, "first derivative: reverse", "by inputs[0] (`x`)"),
    "a batch computed otherwise": (WrongBatch, x, {}, "vmap", "differs from a loop"),
    "a batch dimension lost": (LosesBatchDimension, square, {}, "vmap", "over inputs[0] (`x`) has shape"),
    "a constant": (lambda t: torch.ones(3), x, {}, "first derivative: reverse", "no output with elements requires grad"),
    "no elements": (lambda t: t[2:], x, {}, "first derivative: reverse", "no output with elements requires grad"),
    "no forward rule": (lambda t: torch.cdist(t, t + 1).exp(), square, {}, "second derivative: reverse-over-reverse", "not implemented"),
    "forward mode asked for": (ClassicCube, x, {"modes": "fr"}, "second derivative: forward-over-reverse", "ClassicCube without a jvp staticmethod"),
    "layer_norm in reverse-over-forward": (lambda t: F.layer_norm(t, (2,)), square, {}, "culprit: layer_norm in reverse-over-forward", "torch's own layer_norm"),
    "another value": (Cube, x, {"reference": lambda t: t**3 + 1e-5 * t**2}, "reference: value", "output 0 differs from the reference"),
    "another value, only at zero the same": (Cube, torch.zeros(2), {"reference": lambda t: t**5}, "reference: value", "differs from the reference"),
    "another second derivative": (Cube, x, {"reference": lambda t: t**3 + (t - t.detach()) ** 2}, "reference: second derivative", "by inputs[0]"),
    "another number of outputs": (Cube, x, {"reference": lambda t: (t**3, t)}, "reference: value", "gives 2 outputs, the function 1"),
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


def test_nothing_the_caller_has_is_changed():
    given, module, batch = x.clone(), nn.BatchNorm1d(2), torch.randn(5, 2)
    state, random = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    assert_double_differentiable(lambda t: Cube.apply(t) + 0 * torch.rand(2), given)
    assert_double_differentiable(module, batch, modes="rr")
    assert given.grad is None
    assert not given.requires_grad
    assert given.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in module.state_dict().items():
        assert torch.equal(value, state[key])
        assert value.dtype == state[key].dtype
    assert all(p.grad is None for p in module.parameters())


NOTHING = {
    "integers": (torch.arange(3), "at least one floating-point"),
    "no tensors": ((), "at least one floating-point"),
    "no elements": (torch.randn(0), r"inputs\[0\]: expected at least one element"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_to_differentiate_by_raises(case):
    inputs, message = NOTHING[case]
    with pytest.raises(ValueError, match=message):
        assert_double_differentiable(Cube, inputs)


def test_what_is_no_function_raises():
    with pytest.raises(TypeError, match="fn: expected a function"):
        assert_double_differentiable("Cube", x)
    with pytest.raises(TypeError, match="reference: expected a function"):
        assert_double_differentiable(Cube, x, reference="Cube")
