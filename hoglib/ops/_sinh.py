"""sinh in two ways: the lesson of what a Function may keep for its second derivative.

    y = (e^x - e^-x) / 2        dy/dx = (e^x + e^-x) / 2

Backward needs e^x and e^-x. Forward has them at hand, but a tensor that forward made and kept for
itself has no graph: saved and used in backward it is a constant to the second derivative, which
then lacks sinh(x) without an error. There are two ways out. *Recompute*: save x only, an input, and
work out cosh(x) in backward from operations that autograd sees. *Return them*: an output has a
graph, and the derivatives by e^x and e^-x come back to backward as gradients of their own.
"""

from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops._define import define


def sinh(x: Tensor) -> Tensor:
    r"""Hyperbolic sine.

        y = sinh(x)        dy/dx = cosh(x)

    Shapes: x any; y like x. Only x is kept and cosh(x) is recomputed. Differentiable to any order, in
    reverse and forward mode, under vmap.
    Raises TypeError for an integer x.
    """
    arguments.differentiable("x", x)
    return _sinh(x)


_sinh = define(torch.sinh, [lambda x, _: torch.cosh(x)], reference=torch.sinh, keep="inputs")


def sinh_returning_intermediates(x: Tensor) -> Tensor:
    """`sinh` by a Function that returns e^x and e^-x beside its value; they stay hidden here."""
    arguments.differentiable("x", x)
    y, _, _ = SinhReturningIntermediates.apply(x)
    result: Tensor = y
    return result


class SinhReturningIntermediates(torch.autograd.Function):
    r"""x -> (y, p, n)  with  p = e^x, n = e^-x, y = (p - n) / 2.

        backward: (g_y, g_p, g_n) -> g_y (p + n) / 2 + g_p p - g_n n
        jvp: t -> (t (p + n) / 2, t p, -t n)

    The caller drops p and n, so g_p and g_n are zero in the first backward. The first term depends on
    p and n, so differentiating it sends gradients to them, and the second backward collects those.
    Left out, g_p and g_n would be the same silent mistake as a saved intermediate.
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
