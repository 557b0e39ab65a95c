"""Products within runs of equal keys, by doubling: only multiplications, so right at factors of 0.

Dividing the product of all by one factor, as torch's derivatives do, needs cases for zeros, and cases
by values have no derivatives of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib._core import torch_errors, validation
from hoglib._core.mixed_precision import upcast_half
from hoglib.errors import ArgumentIndexError


def segmented_products(x: Tensor, keys: Tensor, dim: int) -> Tensor:
    """Each entry times those before it in its run: y_i = prod_(j <= i, keys_j = keys_i) x_j.

    keys has the shape of x, and is sorted along dim. It takes log2(n) steps.
    """
    n, step = x.shape[dim], 1
    while step < n:
        before, after = x.narrow(dim, 0, n - step), x.narrow(dim, step, n - step)
        one_run = keys.narrow(dim, 0, n - step) == keys.narrow(dim, step, n - step)
        longer = after * torch.where(one_run, before, 1.0)
        x, step = torch.cat([x.narrow(dim, 0, step), longer], dim), 2 * step
    return x


def segment_ends(keys: Tensor, dim: int) -> Tensor:
    """Where a run of equal keys ends."""
    n = keys.shape[dim]
    if n == 0:
        return keys != keys
    changes = keys.narrow(dim, 0, n - 1) != keys.narrow(dim, 1, n - 1)
    return torch.cat([changes, torch.ones_like(keys.narrow(dim, 0, 1), dtype=torch.bool)], dim)


def products_by_key(x: Tensor, keys: Tensor, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The product of each key's entries, in the shape of like; and which keys there are.

    keys has the shape of x, and is sorted along dim.
    """
    products = torch.where(segment_ends(keys, dim), segmented_products(x, keys, dim), 0.0)
    zeros = torch.zeros(like.shape, dtype=x.dtype, device=x.device)
    met = zeros.bool().scatter(dim, keys, True)
    return torch.where(met, zeros.scatter_add(dim, keys, products), 1.0), met


# === Reductions by index: torch.scatter_reduce and torch.index_reduce, right in every mode.
#
# torch's scatter_reduce is silently wrong in forward over reverse, and so in torch.func.hessian,
# for
# products; for the others it is right in every mode, and taken. Its index_reduce has no forward
# mode.


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
    validation.tensor("input", input)
    differentiable = input.is_floating_point() or input.is_complex()
    if reduce != "prod" or not differentiable or input.dtype != src.dtype or _too_large(index, src):
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)
    if not input.dim() or not index.dim() or not src.dim():
        whole = scatter_reduce(
            torch.atleast_1d(input), dim, torch.atleast_1d(index), torch.atleast_1d(src), reduce,
            include_self=include_self,
        )  # fmt: skip
        return whole.reshape(input.shape)
    dim = validation.dim("dim", dim, input.dim())
    keys, order = torch.sort(index, dim=dim, stable=True)
    factors = upcast_half(src).gather(dim, order)
    products, met = products_by_key(factors, keys, dim, input)
    wide = upcast_half(input)
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
    validation.tensor("input", input)
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise torch_errors.Refused(f"reduce: expected prod, mean, amax or amin, got {reduce!r}.")
    if index.dim() > 1:
        raise ArgumentIndexError(
            f"index: expected a vector of indices, got {validation.describe(index)}."
        )
    if index.dtype not in (torch.int64, torch.int32):
        raise torch_errors.RefusedType(
            f"index: expected int64 or int32, got {validation.describe(index)}; use `.long()`."
        )
    if source.dtype != input.dtype:
        raise torch_errors.RefusedType(
            f"source: expected {input.dtype} as in input, got {source.dtype}; convert one of them."
        )
    axis = validation.dim("dim", dim, input.dim())
    x, s = torch.atleast_1d(input), torch.atleast_1d(source)
    shape = (*x.shape[:axis], index.numel(), *x.shape[axis + 1 :])
    if s.shape != shape:
        raise torch_errors.Refused(
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


SCATTER_REDUCE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.scatter_reduce: scatter_reduce,
    torch.Tensor.scatter_reduce: scatter_reduce,
    torch.index_reduce: index_reduce,
    torch.Tensor.index_reduce: index_reduce,
}


# === Reductions of segments: torch.segment_reduce, to any order and in forward mode.

REDUCTIONS = ("sum", "mean", "max", "min", "prod", "amax", "amin")
EMPTY = {"sum": 0.0, "mean": float("nan"), "max": float("-inf"), "min": float("inf"), "prod": 1.0}


def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    r"""Sum, mean, maximum, minimum or product of each segment along an axis.

        y_s = initial + sum_(i in segment s) x_i, and so on for the others

    Shapes: data (..., n, ...) with n at axis; lengths (..., segments) or offsets (..., segments + 1),
    whose last dimension is that axis; y is data with segments for n. What lies in no segment is left
    out. A mean divides initial too. A segment of nothing is initial, or 0, NaN, -inf, inf and 1,
    without derivatives. Equal maxima and minima share the derivative
    (torch's share only one that is greater than 0). Products are right where
    factors are 0. Half precision is computed in float32.
    Raises RuntimeError where torch does: also, on the CPU, for lengths that are negative or, unless
    unsafe, that do not sum to n.
    """
    validation.tensor("data", data)
    given, axis = _segments(data, lengths, indices, offsets, axis)
    if reduce not in REDUCTIONS:
        raise torch_errors.Refused(
            f"reduce: expected one of {', '.join(REDUCTIONS[:5])}; got {reduce!r}."
        )
    torch_errors.real("data", data)
    kind = reduce.removeprefix("a")
    if offsets is None and not unsafe and data.device.type == "cpu":
        _check(given, data.shape[axis])
    keys, count = _keys(given, offsets is not None, data.shape[axis])
    rest = data.dim() - axis - 1
    into = keys.reshape(keys.shape + (1,) * rest).expand(data.shape)
    x = upcast_half(data)
    shape = (*data.shape[:axis], count + 1, *data.shape[axis + 1 :])
    base = torch.full(shape, EMPTY[kind], dtype=x.dtype, device=x.device)
    if kind in ("max", "min"):
        y = base.scatter_reduce(axis, into, x, f"a{kind}", include_self=False)
        if initial is not None:
            y = torch.where(y < initial if kind == "max" else y > initial, initial, y)
    elif kind == "prod":
        y = products_by_key(x, into, axis, base)[0]
        y = y if initial is None else y * initial
    else:
        y = torch.zeros_like(base).scatter_add(axis, into, x)
        y = y if initial is None else y + initial
        if kind == "mean":
            sizes = torch.zeros_like(base).scatter_add(axis, into, torch.ones_like(x))
            empty = EMPTY["mean"] if initial is None else initial
            y = torch.where(sizes == 0, empty, y / sizes.clamp(min=1))
    return y.narrow(axis, 0, count).to(data.dtype)


def _segments(
    data: Tensor, lengths: Tensor | None, indices: Tensor | None, offsets: Tensor | None, axis: int
) -> tuple[Tensor, int]:
    """The lengths or offsets that count, and the axis from the front."""
    if indices is not None:
        raise torch_errors.Refused(
            "indices: expected None, got a tensor; torch does not take them yet."
        )
    given = lengths if offsets is None else offsets
    if given is None:
        raise torch_errors.Refused(
            "lengths: expected lengths or offsets of the segments, got neither."
        )
    axis = validation.dim("axis", axis, data.dim())
    if data.dim() < given.dim() or given.dim() != axis + 1:
        raise torch_errors.Refused(
            f"axis: expected the last dimension of lengths or offsets, got axis {axis} of data "
            f"{tuple(data.shape)} and {validation.describe(given)}."
        )
    if given.shape[:-1] != data.shape[:axis]:
        raise torch_errors.Refused(
            f"lengths: expected {tuple(data.shape[:axis])} before the last dimension, as in data, got "
            f"{tuple(given.shape[:-1])}."
        )
    if given.dtype not in (torch.int64, torch.int32):
        raise torch_errors.RefusedType(
            f"lengths: expected whole numbers, int64 or int32, got {validation.describe(given)}."
        )
    return given, axis


def _check(lengths: Tensor, n: int) -> None:
    """An assertion inside the graph, because a branch on values would leave it."""
    text = (
        "lengths: expected whole numbers of at least 0 that sum to data.size(axis); or set unsafe."
    )
    torch._assert_async(((lengths >= 0).all(-1) & (lengths.sum(-1) == n)).all(), text)


def _keys(given: Tensor, are_offsets: bool, n: int) -> tuple[Tensor, int]:
    """The segment of each entry, or the number of segments for what is in none."""
    ends = given[..., 1:] if are_offsets else given.cumsum(-1)
    place = torch.arange(n, dtype=ends.dtype, device=given.device)
    place = place.expand(*given.shape[:-1], n).contiguous()
    keys = torch.searchsorted(ends.contiguous(), place, right=True)
    if are_offsets:
        keys = torch.where(place < given[..., :1], ends.shape[-1], keys)
    return keys, ends.shape[-1]


SEGMENT_REDUCE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.segment_reduce: segment_reduce
}
