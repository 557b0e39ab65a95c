"""Reductions of segments: torch.segment_reduce, to any order and in forward mode."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops import _refusals as refusals
from hoglib.ops._halves import widened
from hoglib.ops._runs import products_by_key

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
    arguments.tensor("data", data)
    given, axis = _segments(data, lengths, indices, offsets, axis)
    if reduce not in REDUCTIONS:
        raise refusals.Refused(
            f"reduce: expected one of {', '.join(REDUCTIONS[:5])}; got {reduce!r}."
        )
    refusals.real("data", data)
    kind = reduce.removeprefix("a")
    if offsets is None and not unsafe and data.device.type == "cpu":
        _check(given, data.shape[axis])
    keys, count = _keys(given, offsets is not None, data.shape[axis])
    rest = data.dim() - axis - 1
    into = keys.reshape(keys.shape + (1,) * rest).expand(data.shape)
    x = widened(data)
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
        raise refusals.Refused(
            "indices: expected None, got a tensor; torch does not take them yet."
        )
    given = lengths if offsets is None else offsets
    if given is None:
        raise refusals.Refused("lengths: expected lengths or offsets of the segments, got neither.")
    axis = arguments.dim("axis", axis, data.dim())
    if data.dim() < given.dim() or given.dim() != axis + 1:
        raise refusals.Refused(
            f"axis: expected the last dimension of lengths or offsets, got axis {axis} of data "
            f"{tuple(data.shape)} and {arguments.describe(given)}."
        )
    if given.shape[:-1] != data.shape[:axis]:
        raise refusals.Refused(
            f"lengths: expected {tuple(data.shape[:axis])} before the last dimension, as in data, got "
            f"{tuple(given.shape[:-1])}."
        )
    if given.dtype not in (torch.int64, torch.int32):
        raise refusals.RefusedType(
            f"lengths: expected whole numbers, int64 or int32, got {arguments.describe(given)}."
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


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {torch.segment_reduce: segment_reduce}
