"""float32 in float64 maths."""

import math

import torch
from torch.autograd import Function

from tests.functions import by_saved, save_inputs, saving_inputs
from tests.zoo.exhibit import Exhibit, normal


class Wave(Function):
    """y = sin(pi x), dy/dx = pi cos(pi x)."""

    forward = saving_inputs(lambda x: torch.sin(math.pi * x))

    backward = by_saved(lambda g, x: g * math.pi * torch.cos(math.pi * x))


class WaveFloatConstant(Wave):
    """y = sin(pi x), but the pi of the backward is a float32 tensor, off by 9e-8."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.tensor(math.pi, dtype=torch.float32) * torch.cos(math.pi * x)


class WaveFloatGradient(Wave):
    """y = sin(pi x), but the gradient is computed, and returned, in float32."""

    backward = by_saved(lambda g, x: g.float() * math.pi * torch.cos(math.pi * x.float()))


class Bump(Function):
    """y = exp(-x^2), dy/dx = -2 x y."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: torch.exp(-x * x))

    setup_context = save_inputs

    backward = by_saved(lambda g, x: -2 * x * torch.exp(-x * x) * g)


class BumpFloatForward(Bump):
    """y = exp(-x^2), but computed in float32, "for stability"."""

    forward = staticmethod(lambda x: torch.exp(-x.float() * x.float()).to(x.dtype))


class Stairs(Function):
    """y_ij = x_i j for j = 0, 1, 2; x_i receives sum_j j g_ij."""

    @staticmethod
    def forward(ctx, x):
        y = x.new_zeros(*x.shape, 3)
        for j in range(3):
            y[..., j] = x * j
        return y

    backward = staticmethod(lambda ctx, g: g[..., 1] + 2 * g[..., 2])


class StairsDefaultDtype(Stairs):
    """y_ij = x_i j, but the output is allocated in the default dtype."""

    @staticmethod
    def forward(ctx, x):
        y = torch.zeros(*x.shape, 3)
        for j in range(3):
            y[..., j] = x * j
        return y


EXHIBITS = [
    Exhibit("a float32 constant in float64 maths", wrong=WaveFloatConstant, right=Wave, inputs=normal((3, 4)), says=("float32",), verdict="warn"),
    Exhibit("a gradient in float32", wrong=WaveFloatGradient, right=Wave, inputs=normal((3, 4)), says=("float32",), verdict="warn"),
    Exhibit("a forward in float32", wrong=BumpFloatForward, right=Bump, inputs=lambda: (torch.randn(3, 4).double(),), says=("float32",), verdict="warn"),
    Exhibit("an output in the default dtype", wrong=StairsDefaultDtype, right=Stairs, inputs=normal((4,)), says=("float32",), verdict="warn"),
]  # fmt: skip
