"""assert_double_differentiable: right Functions pass, each kind of mistake fails and is named."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hoglib.testing import assert_double_differentiable


class Base(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx, t):
        return 3 * t * ctx.saved_tensors[0] ** 2


class Right(Base):
    pass


class WrongSign(Base):
    @staticmethod
    def backward(ctx, g):
        return -3 * g * ctx.saved_tensors[0] ** 2


class Detached(Base):
    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0].detach() ** 2


class OnceOnly(Base):
    generate_vmap_rule = False

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0] ** 2


class WrongTangent(Base):
    @staticmethod
    def jvp(ctx, t):
        return 2 * t * ctx.saved_tensors[0] ** 2


class ThroughNumpy(Base):
    generate_vmap_rule = False

    @staticmethod
    def backward(ctx, g):
        return 3 * g * torch.from_numpy(np.asarray(ctx.saved_tensors[0].detach()) ** 2)


class Classic(torch.autograd.Function):
    """As most published code writes it: no setup_context, so no transforms."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0] ** 2


class KeepsIntermediate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.square = x * x
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.square


class ForgetsToSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, (g * a)[0]


x = torch.tensor([0.7, -1.3])
NEITHER = {"forward_mode": False, "vmap": False}


def test_right_functions_pass():
    assert_double_differentiable(Right, x, reference=lambda t: t**3)
    assert_double_differentiable(Right.apply, [x])
    assert_double_differentiable(Classic, x, **NEITHER)
    assert_double_differentiable(nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double(), x)
    assert_double_differentiable(lambda t, n: t**n, (x, 3))
    assert_double_differentiable(
        lambda t: (t.exp(), t.sin()), x, reference=lambda t: (t.exp(), t.sin())
    )
    assert_double_differentiable(
        torch.matmul, (torch.randn(2, 3), torch.randn(3, dtype=torch.complex64).real)
    )


FAULTY = {
    "wrong sign": (WrongSign, (x,), {}, "first derivative"),
    "detached in backward": (Detached, (x,), {}, "second derivative"),
    "once_differentiable": (OnceOnly, (x,), NEITHER, "second derivative"),
    "wrong tangent": (WrongTangent, (x,), {}, "first derivative"),
    "NumPy in backward": (ThroughNumpy, (x,), NEITHER, "second derivative"),
    "kept intermediate": (KeepsIntermediate, (x,), NEITHER, "second derivative"),
    "missing sum": (ForgetsToSum, (torch.randn(3, 2), torch.randn(2)), NEITHER, "first derivative"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_faulty_functions_fail(fault):
    function, inputs, options, which = FAULTY[fault]
    with pytest.raises(AssertionError, match=f"{function.__name__}.*: the {which} is wrong"):
        assert_double_differentiable(function, inputs, **options)


def test_another_function_than_the_reference_fails():
    with pytest.raises(AssertionError, match="agreement with the reference"):
        assert_double_differentiable(Right, x, reference=lambda t: t**3 + 1e-5 * t**2)


def test_the_inputs_are_not_changed():
    given = x.clone()
    assert_double_differentiable(Right, given)
    assert given.grad is None
    assert not given.requires_grad
    assert given.dtype == torch.float32


def test_nothing_to_differentiate_raises():
    with pytest.raises(ValueError, match="at least one floating-point"):
        assert_double_differentiable(Right, torch.arange(3))
    with pytest.raises(TypeError, match="fn: expected a function"):
        assert_double_differentiable("Right", x)
