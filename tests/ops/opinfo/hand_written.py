"""Functions written by hand, to be read: what `hoglib.ops.define` and `external` do for any function.

The first lesson is what a Function may keep for its second derivative, by sinh:

    y = (e^x - e^-x) / 2        dy/dx = (e^x + e^-x) / 2

Backward needs e^x and e^-x. Forward has computed them, but a tensor that forward computed and kept for
itself has no graph: saved and used in backward it is a constant to the second derivative, which then
lacks sinh(x) without an error. There are two ways out. *Recompute*: save x only, an input, and compute
cosh(x) in backward from operations that autograd sees; `hoglib.ops.sinh` does. *Return them*: an
output has a graph, and the derivatives by e^x and e^-x come back to backward as gradients of their own;
`SinhReturningIntermediates` does.

The second lesson is how code that torch cannot see into becomes differentiable, by x^3 in NumPy:

    f = x^3        f' = 3 x^2        f'' = 6 x        f''' = 6

Autograd cannot differentiate NumPy, so each derivative is a Function of its own, whose backward is
made of torch operations and *the next Function*. Were the slope computed by NumPy inside
`Cube.backward`, the second derivative would be lost there without an error. In both Functions

* setup_context is separate from forward, or torch.func refuses the Function;
* what is saved is an input or an output, so that autograd goes through `saved_tensors` to it;
* jvp is the same rule in forward mode; vmap is trivial, because the function acts element by element;
* `detach`, which NumPy needs, is harmless in forward, where autograd does not record.

One thing only `external` does: a tracer that records `Cube` runs the NumPy code once and keeps its
numbers as constants, which an operator of torch.library avoids.
"""

from typing import Any

import torch
from torch import Tensor

from tests.functions import by_saved, save_inputs_for_both


def sinh_returning_intermediates(x: Tensor) -> Tensor:
    """sinh(x) by a Function that returns e^x and e^-x beside its value."""
    y, _, _ = SinhReturningIntermediates.apply(x)
    result: Tensor = y
    return result


class SinhReturningIntermediates(torch.autograd.Function):
    r"""x -> (y, p, n)  with  p = e^x, n = e^-x, y = (p - n) / 2.

        backward: (g_y, g_p, g_n) -> g_y (p + n) / 2 + g_p p - g_n n
        jvp: t -> (t (p + n) / 2, t p, -t n)

    The caller drops p and n, so g_p and g_n are zero in the first backward. The first term depends on
    p and n, so differentiating it sends gradients to them, and the second backward adds those. Without
    g_p and g_n the second derivative would be wrong as with a saved intermediate.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, n = torch.exp(x), torch.exp(-x)
        return (p - n) / 2, p, n

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        _, p, n = output
        ctx.save_for_backward(p, n)
        ctx.save_for_forward(p, n)

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, g_p: Tensor, g_n: Tensor) -> Tensor:
        p, n = (tensor.conj() for tensor in ctx.saved_tensors)
        return g_y * (p + n) / 2 + g_p * p - g_n * n

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, n = ctx.saved_tensors
        return t * (p + n) / 2, t * p, -t * n


def cube(x: Tensor) -> Tensor:
    """x^3 by NumPy, for real or complex x on the CPU."""
    return Cube.apply(x)


class Cube(torch.autograd.Function):
    """x -> x^3, with the slope by `CubeSlope`."""

    forward = staticmethod(lambda x: torch.as_tensor(x.detach().numpy() ** 3))

    setup_context = save_inputs_for_both

    # conj only matters for complex x
    backward = by_saved(lambda g, x: g * CubeSlope.apply(x).conj())

    jvp = by_saved(lambda t, x: t * CubeSlope.apply(x))

    vmap = staticmethod(lambda info, in_dims, x: (Cube.apply(x), in_dims[0]))


class CubeSlope(torch.autograd.Function):
    """x -> 3 x^2, with derivatives by torch."""

    forward = staticmethod(lambda x: torch.as_tensor(3 * x.detach().numpy() ** 2))

    setup_context = save_inputs_for_both

    # torch from here on: the chain ends, and every order is there
    backward = by_saved(lambda g, x: g * (6 * x).conj())

    jvp = by_saved(lambda t, x: t * (6 * x))

    vmap = staticmethod(lambda info, in_dims, x: (CubeSlope.apply(x), in_dims[0]))
