"""Reductions by index: torch.scatter_reduce and torch.index_reduce, right in every mode.

torch's scatter_reduce is silently wrong in forward over reverse, and so in torch.func.hessian, for
products; for the others it is right in every mode, and taken. Its index_reduce has no forward mode.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops import _refusals as refusals
from hoglib.ops._halves import widened
from hoglib.ops._runs import products_by_key


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    r"""Reduce the entries of src into the places of input that index names, along a dimension.

        y_(index_i) = input_(index_i) * prod_i src_i        for "prod", along dim

    reduce: "sum", "prod", "mean", "amax" or "amin"; without include_self the places that index names
    start from nothing. Shapes: index no larger than src, nor than input in other dimensions than dim;
    y that of input. Equal maxima and minima share the derivative. Products are right where factors
    are 0; half precision is multiplied in float32. Errors are torch's.
    """
    arguments.tensor("input", input)
    differentiable = input.is_floating_point() or input.is_complex()
    if reduce != "prod" or not differentiable or input.dtype != src.dtype or _too_large(index, src):
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)
    if not input.dim() or not index.dim() or not src.dim():
        whole = scatter_reduce(
            torch.atleast_1d(input), dim, torch.atleast_1d(index), torch.atleast_1d(src), reduce,
            include_self=include_self,
        )  # fmt: skip
        return whole.reshape(input.shape)
    dim = arguments.dim("dim", dim, input.dim())
    keys, order = torch.sort(index, dim=dim, stable=True)
    factors = widened(src).gather(dim, order)
    products, met = products_by_key(factors, keys, dim, input)
    wide = widened(input)
    y = wide * products if include_self else torch.where(met, products, wide)
    return y.to(input.dtype)


def index_reduce(
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    r"""Reduce the slices of source into those of input that index names: `scatter_reduce` by slices.

    reduce: "prod", "mean", "amax" or "amin". Shapes: index (n,), source that of input with n at dim;
    y that of input. Raises RuntimeError for others.
    """
    arguments.tensor("input", input)
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise refusals.Refused(f"reduce: expected prod, mean, amax or amin, got {reduce!r}.")
    if index.dim() > 1:
        raise arguments.WrongIndex(
            f"index: expected a vector of indices, got {arguments.describe(index)}."
        )
    if index.dtype not in (torch.int64, torch.int32):
        raise refusals.RefusedType(
            f"index: expected int64 or int32, got {arguments.describe(index)}; use `.long()`."
        )
    if source.dtype != input.dtype:
        raise refusals.RefusedType(
            f"source: expected {input.dtype} as in input, got {source.dtype}; convert one of them."
        )
    axis = arguments.dim("dim", dim, input.dim())
    x, s = torch.atleast_1d(input), torch.atleast_1d(source)
    shape = (*x.shape[:axis], index.numel(), *x.shape[axis + 1 :])
    if s.shape != shape:
        raise refusals.Refused(
            f"source: expected shape {shape}, that of input with {index.numel()} entries of index at "
            f"dim, got {tuple(s.shape)}."
        )
    ones = (1,) * axis, (1,) * (x.dim() - axis - 1)
    into = index.long().reshape(*ones[0], -1, *ones[1]).expand(shape)
    y = scatter_reduce(x, axis, into, s, reduce, include_self=include_self)
    return y.reshape(input.shape)


def _too_large(index: Tensor, src: Tensor) -> bool:
    """Then torch has an error for it."""
    return index.dim() != src.dim() or any(
        i > s for i, s in zip(index.shape, src.shape, strict=True)
    )


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.scatter_reduce: scatter_reduce,
    torch.Tensor.scatter_reduce: scatter_reduce,
    torch.index_reduce: index_reduce,
    torch.Tensor.index_reduce: index_reduce,
}
