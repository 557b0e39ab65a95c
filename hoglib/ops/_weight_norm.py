"""Weight norm, right in every mode and at every order."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops._refusals import Refused
from hoglib.ops._standardise import wide


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    r"""A weight from its direction and its length, as `torch._weight_norm`.

        w = g v / ||v||        dw/dv = (g / ||v||) (1 - v v^T / ||v||^2)        dw/dg = v / ||v||

    with one norm for each index along dim, over all other dimensions; dim -1 means one norm over all
    dimensions, not the last. Shapes: v any; g has an element for each norm (along the first and the
    last dimension), or broadcasts with v; w like v. Where v is 0, w and all derivatives are 0, by
    convention: torch's w is NaN there. Half precision is computed in float32. To any order, in every
    mode, under vmap, complex numbers too.
    Raises TypeError for whole numbers, IndexError for a dim that v lacks, RuntimeError for shapes and
    dtypes that do not fit.
    Salimans & Kingma, Weight Normalization, 2016.
    """
    return _weight_norm(v, g, dim)[0]


def _weight_norm(v: Tensor, g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The weight, and the squares of the norms."""
    arguments.differentiable("v", v)
    arguments.differentiable("g", g)
    rank = v.dim()
    kept = None if dim == -1 else arguments.dim("dim", dim, rank)
    dtype = _result_type(v, g)
    inner = wide(dtype)
    direction, length = v.to(inner), g.to(inner)
    others = [d for d in range(rank) if d != kept]
    squares = (direction * direction.conj()).real
    total = squares.sum(others, keepdim=True) if others else squares
    if rank and kept is not None and dim in (0, rank - 1):
        length = _one_each(v, g, length, total)
    zero = total == 0
    scale = torch.where(zero, 0.0, length * torch.where(zero, 1.0, total).rsqrt())
    return (direction * scale).to(dtype), total


def _result_type(v: Tensor, g: Tensor) -> torch.dtype:
    """`torch.result_type`, which the compiler does not take: a g without dimensions widens nothing."""
    if v.dim() and not g.dim() and v.is_complex() >= g.is_complex():
        return v.dtype
    return torch.promote_types(v.dtype, g.dtype)


def _one_each(v: Tensor, g: Tensor, length: Tensor, total: Tensor) -> Tensor:
    """Along the first and the last dimension torch reads g as a list, whatever its shape."""
    if v.dtype != g.dtype or g.numel() != total.numel():
        raise Refused(
            f"g: expected {total.numel()} elements of {v.dtype}, one for each norm, got "
            f"{arguments.describe(g)}."
        )
    return length.reshape(total.shape)


def _interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """`torch._weight_norm_interface`: the norms too, as constants, in the dtype computed in."""
    if dim not in (0, v.dim() - 1):
        raise Refused(f"dim: expected the first or the last dimension, got {dim}.")
    w, total = _weight_norm(v, g, dim)
    return w, total.detach().sqrt()


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._weight_norm: weight_norm,
    torch._weight_norm_interface: _interface,
}
