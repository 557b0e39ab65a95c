"""Reductions by segments, by index and by bags."""

from collections.abc import Callable
from functools import reduce as fold
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.testing.opinfo.op_info import ONE_TENSOR, WITH_COMPLEX, Build, op_info, sample_input

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


def _segmented(name: str, reduce: str) -> Any:
    return sample_input(name, lambda n: (n(6, 2), reduce), lengths=_LENGTHS)


def _onto_rows(name: str, index: Tensor, reduce: str, **options: Any) -> Any:
    return sample_input(name, lambda n: (n(3, 2), 0, index, n(4, 2), reduce), **options)


def _no_columns(index: Tensor, reduce: str) -> Build:
    return lambda n: (n(3, 0), 0, index, n(4, 0), reduce)


_SEGMENTS = {
    **ONE_TENSOR,
    "no dimensions": "needs an axis that has segments",
    "complex": "torch refuses complex data with a RuntimeError, and so does this",
}
_PLACED = {
    "no dimensions": "needs a dimension to scatter along",
    "broadcasting": "index says where each entry goes",
}
_NONE = torch.zeros(0, 3, dtype=torch.long)
_NO_ENTRIES = sample_input("no batches", lambda n: (n(0, 6), "sum"), lengths=_NONE, axis=1)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """A bag at a time, a row at a time."""
    if offsets is None:
        bags = [
            list(range(r * input.shape[1], (r + 1) * input.shape[1])) for r in range(len(input))
        ]
    else:
        starts = offsets.tolist() + ([] if include_last_offset else [len(input)])
        bags = [list(range(a, b)) for a, b in pairwise(starts)]
    rows = input.reshape(-1).tolist()
    scale = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    results = []
    for bag in bags:
        taken = [
            weight[rows[i]] * (1 if scale is None else scale[i])
            for i in bag
            if rows[i] != padding_idx
        ]
        if not taken:
            results.append(torch.zeros_like(weight[:0].sum(0)))
            continue
        stack = torch.stack(taken)
        results.append(getattr(stack, {"max": "amax"}.get(mode, mode))(0))
    return torch.stack(results) if results else weight[:0] * 1


_INDICES = torch.tensor([2, 0, 1, 3, 0])
_OFFSETS = torch.tensor([0, 3, 3])


def _bags(name: str, **options: Any) -> Any:
    return sample_input(
        name, lambda n: (_INDICES, n(4, 2)), offsets=_OFFSETS, include_last_offset=False, **options
    )


def _weighted_sums(
    weight: Tensor,
    per_sample_weights: Tensor,
    input: Tensor,
    offsets: Tensor | None = None,
) -> Tensor:
    return ops.embedding_bag(
        input, weight, offsets, mode="sum", per_sample_weights=per_sample_weights
    )


def _weighted_sums_reference(
    weight: Tensor, per_sample_weights: Tensor, input: Tensor, offsets: Tensor | None = None
) -> Tensor:
    return _embedding_bag(input, weight, offsets, "sum", per_sample_weights)


_BAG_SKIPS = {
    "no dimensions": "needs a table of rows",
    "broadcasting": "one table, nothing to broadcast with",
    "complex": "torch refuses complex tables and so does this, with a RuntimeError that is a TypeError",
}
_NO_BAGS = sample_input("no bags", lambda n: (_NONE, n(4, 2)))
_BAGS_OF_ONE_LENGTH = _INDICES[:4].reshape(2, 2)

OPS = (
    op_info(
        "segment_reduce", "missing", "sum, mean or product over i in segment s of x_i", _segments
    ).on(
        _segmented("sums", "sum"),
        _segmented("means", "mean"),
        _segmented("products", "prod"),
        sample_input(
            "batches",
            lambda n: (n(2, 4), "mean"),
            lengths=torch.tensor([[1, 3], [2, 2]]),
            axis=1,
        ),
        zero_size=_NO_ENTRIES,
        skips=_SEGMENTS,
    ),
    op_info(
        "segment_reduce, extremes", "missing", "max or min over i in segment s of x_i", _segments
    ).on(
        _segmented("maxima", "max"),
        _segmented("minima", "min"),
        zero_size=_NO_ENTRIES,
        skips=_SEGMENTS,
        smooth=False,
    ),
    op_info("scatter_reduce", "wrong", "x_j prod_(i to j) s_i", _by_index).on(
        _onto_rows("products", _PLACES, "prod"),
        _onto_rows("products without self", _PLACES, "prod", include_self=False),
        zero_size=_no_columns(_PLACES[:, :0], "prod"),
        skips=_PLACED,
        dtypes=WITH_COMPLEX,
    ),
    op_info("index_reduce", "missing", "x_j prod_(i to j) s_i", _by_index).on(
        _onto_rows("products", _INDEX, "prod"),
        _onto_rows("products without self", _INDEX, "prod", include_self=False),
        zero_size=_no_columns(_INDEX, "prod"),
        skips=_PLACED,
        dtypes=WITH_COMPLEX,
    ),
    op_info(
        "index_reduce, means and extremes",
        "missing",
        "mean, max or min over i to j of s_i, and x_j",
        _by_index,
    ).on(
        _onto_rows("means", _INDEX, "mean"),
        _onto_rows("maxima", _INDEX, "amax"),
        _onto_rows("minima without self", _INDEX, "amin", include_self=False),
        zero_size=_no_columns(_INDEX, "amax"),
        skips={
            **_PLACED,
            "complex": "torch has neither derivatives of complex means here nor maxima",
        },
        smooth=False,
    ),
    op_info("embedding_bag", "missing", "sum or mean over i in bag b of W[i]", _embedding_bag).on(
        _bags("mean"),
        _bags("sum", mode="sum"),
        _bags("padding", padding_idx=0),
        sample_input("bags of one length", lambda n: (_BAGS_OF_ONE_LENGTH, n(4, 2))),
        zero_size=_NO_BAGS,
        skips=_BAG_SKIPS,
    ),
    op_info("embedding_bag, maxima", "missing", "max over i in bag b of W[i]", _embedding_bag).on(
        _bags("maxima", mode="max"),
        sample_input("bags of one length", lambda n: (_BAGS_OF_ONE_LENGTH, n(4, 2)), mode="max"),
        zero_size=_NO_BAGS,
        skips={
            **_BAG_SKIPS,
            "stride 0": "its rows are equal: of equal maxima torch takes the first, amax shares",
        },
        smooth=False,
    ),
    op_info(
        "embedding_bag, weighted",
        "missing",
        "sum over i in bag b of s_i W[i]",
        _weighted_sums_reference,
        _weighted_sums,
    ).on(
        sample_input("bags", lambda n: (n(4, 2), n(5), _INDICES, _OFFSETS)),
        sample_input("one length", lambda n: (n(4, 2), n(2, 2), _BAGS_OF_ONE_LENGTH)),
        zero_size=lambda n: (n(4, 2), n(0, 3), _NONE),
        skips=_BAG_SKIPS,
    ),
)
