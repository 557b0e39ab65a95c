"""x^3 by NumPy, written out by hand: how code that torch cannot see into becomes differentiable.

    f = x^3        f' = 3 x^2        f'' = 6 x        f''' = 6

Autograd cannot differentiate NumPy, so each derivative is a Function of its own, whose backward is
made of torch operations and *the next Function*. That is the whole trick: were the slope computed by
NumPy inside `Cube.backward`, the second derivative would be cut there, and no error would say so.

Things to see here, all of which `hoglib.ops.external` does for any function:

* setup_context is apart from forward, or torch.func refuses the Function;
* what is saved is the input, so that autograd can go through `saved_tensors` to x once more;
* jvp is the same rule forwards; vmap is trivial, because the function acts element by element;
* `detach` is what NumPy asks for, and is harmless in forward, which autograd does not look into.

One thing only `external` does: a tracer that records `Cube` runs the NumPy code once and keeps its
numbers as constants. The cure is an operator of torch.library.
"""

from typing import Any

import torch
from torch import Tensor


def cube(x: Tensor) -> Tensor:
    r"""The cube, computed by NumPy.

        y = x^3        dy/dx = 3 x^2

    Shapes: x any, real or complex, on the CPU; y like x. Differentiable to any order, in reverse mode,
    one level of forward mode, and under vmap.
    """
    return Cube.apply(x)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.as_tensor(x.detach().numpy() ** 3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * CubeSlope.apply(x).conj()  # conj only matters for complex x

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return t * CubeSlope.apply(x)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return Cube.apply(x), in_dims[0]


class CubeSlope(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.as_tensor(3 * x.detach().numpy() ** 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (6 * x).conj()  # torch from here on: the chain ends, and every order is there

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return t * (6 * x)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return CubeSlope.apply(x), in_dims[0]
