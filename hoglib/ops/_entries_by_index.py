"""The catalogue of reductions by segments and by index, and of hardsigmoid."""

from collections.abc import Callable
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.ops._entry import ONE_TENSOR, Op, sample, unary

_LENGTHS = torch.tensor([2, 3, 1])
_INDEX = torch.tensor([1, 0, 1, 1])
_PLACES = torch.tensor([[1, 0], [1, 1], [2, 1], [0, 1]])


def _product(rows: list[Tensor]) -> Tensor:
    return fold(torch.mul, rows)


_REDUCE: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda rows: torch.stack(rows).sum(0),
    "mean": lambda rows: torch.stack(rows).mean(0),
    "max": lambda rows: torch.stack(rows).amax(0),
    "min": lambda rows: torch.stack(rows).amin(0),
    "prod": _product,
}


def _segments(data: Tensor, reduce: str, *, lengths: Tensor, axis: int = 0) -> Tensor:
    """A segment at a time; of a batch, a row at a time."""
    if axis:
        rows = [_segments(d, reduce, lengths=n) for d, n in zip(data, lengths, strict=True)]
        return torch.stack(rows) if rows else data[:, : lengths.shape[1]]
    parts = torch.split(data, lengths.tolist())
    return torch.stack([_REDUCE[reduce](list(part)) for part in parts])


def _by_index(
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """An entry at a time, of matrices along dimension 0."""
    places = index.tolist() if index.dim() == 2 else [[i] * input.shape[1] for i in index.tolist()]
    columns = []
    for c in range(input.shape[1]):
        column = []
        for r in range(input.shape[0]):
            new = [source[i, c] for i, row in enumerate(places) if row[c] == r]
            old = [input[r, c]] if include_self or not new else []
            column.append(_REDUCE[reduce.removeprefix("a")](old + new))
        columns.append(torch.stack(column))
    return torch.stack(columns, 1) if columns else input + source.sum()


def _hardsigmoid(input: Tensor) -> Tensor:
    inside = (input > -3) & (input < 3)
    return torch.where(inside, input / 6 + 0.5, (input >= 3).to(input.dtype))


def _data(name: str, reduce: str) -> Any:
    return sample(name, lambda n: (n(6, 2), reduce), lengths=_LENGTHS)


def _two(name: str, index: Tensor, reduce: str, **options: Any) -> Any:
    return sample(name, lambda n: (n(3, 2), 0, index, n(4, 2), reduce), **options)


def _no_columns(index: Tensor, reduce: str) -> Any:
    return {
        "zero size": sample("no columns", lambda n: (n(3, 0), 0, index, n(4, 0), reduce)),
    }


_SEGMENTS = {
    **ONE_TENSOR,
    "no dimensions": "needs an axis that has segments",
    "complex": "torch refuses complex data with a RuntimeError, and so does this",
}
_PLACED = {
    "no dimensions": "needs a dimension to scatter along",
    "broadcasting": "index says where each entry goes",
}
_NO_ENTRIES = {
    "zero size": sample(
        "no batches",
        lambda n: (n(0, 6), "sum"),
        lengths=torch.zeros(0, 3, dtype=torch.long),
        axis=1,
    )
}

BY_INDEX = (
    Op(
        "segment_reduce",
        "missing",
        "sum, mean or product over i in segment s of x_i",
        ops.segment_reduce,
        _segments,
        (
            _data("sums", "sum"),
            _data("means", "mean"),
            _data("products", "prod"),
            sample(
                "batches",
                lambda n: (n(2, 4), "mean"),
                lengths=torch.tensor([[1, 3], [2, 2]]),
                axis=1,
            ),
        ),
        corners=_NO_ENTRIES,
        skips=_SEGMENTS,
    ),
    Op(
        "segment_reduce, extremes",
        "missing",
        "max or min over i in segment s of x_i",
        ops.segment_reduce,
        _segments,
        (_data("maxima", "max"), _data("minima", "min")),
        corners=_NO_ENTRIES,
        skips=_SEGMENTS,
        smooth=False,
    ),
    Op(
        "scatter_reduce",
        "wrong",
        "x_j prod_(i to j) s_i",
        ops.scatter_reduce,
        _by_index,
        (
            _two("products", _PLACES, "prod"),
            _two("products without self", _PLACES, "prod", include_self=False),
        ),
        corners=_no_columns(_PLACES[:, :0], "prod"),
        skips=_PLACED,
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.complex128),
    ),
    Op(
        "index_reduce",
        "missing",
        "x_j prod_(i to j) s_i",
        ops.index_reduce,
        _by_index,
        (
            _two("products", _INDEX, "prod"),
            _two("products without self", _INDEX, "prod", include_self=False),
        ),
        corners=_no_columns(_INDEX, "prod"),
        skips=_PLACED,
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.complex128),
    ),
    Op(
        "index_reduce, means and extremes",
        "missing",
        "mean, max or min over i to j of s_i, and x_j",
        ops.index_reduce,
        _by_index,
        (
            _two("means", _INDEX, "mean"),
            _two("maxima", _INDEX, "amax"),
            _two("minima without self", _INDEX, "amin", include_self=False),
        ),
        corners=_no_columns(_INDEX, "amax"),
        skips={
            **_PLACED,
            "complex": "torch has neither derivatives of complex means here nor maxima",
        },
        smooth=False,
    ),
    unary(
        "hardsigmoid",
        "min(max(x + 3, 0), 6) / 6",
        ops.hardsigmoid,
        _hardsigmoid,
        theme="missing",
        samples=(
            sample("inside and outside", lambda n: (3 * n(2, 3),)),
            sample("beyond both ends", lambda n: (torch.cat([n(1, 3) / 9 + 5, n(1, 3) / 9 - 5]),)),
        ),
        smooth=False,
    ),
)
