"""Reductions by segments, by index and by bags, and sampling between pixels."""

import itertools
from collections.abc import Callable
from functools import reduce as fold
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from tests.ops.opinfo.op_info import (
    ONE_TENSOR,
    WITH_COMPLEX,
    Build,
    Normal,
    SampleInput,
    normals,
    op_info,
    sample_input,
)

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
    weight: Tensor, per_sample_weights: Tensor, input: Tensor, offsets: Tensor | None = None
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

_INDEXING = (
    op_info("segment_reduce", "missing", _segments).on(
        _segmented("sums", "sum"),
        _segmented("means", "mean"),
        _segmented("products", "prod"),
        sample_input("batches", lambda n: (n(2, 4), "mean"), lengths=torch.tensor([[1, 3], [2, 2]]), axis=1),
        zero_size=_NO_ENTRIES,
        skips=_SEGMENTS,
    ),
    op_info("segment_reduce, extremes", "missing", _segments).on(
        _segmented("maxima", "max"),
        _segmented("minima", "min"),
        zero_size=_NO_ENTRIES,
        skips=_SEGMENTS,
        smooth=False,
    ),
    op_info("scatter_reduce", "wrong", _by_index).on(
        _onto_rows("products", _PLACES, "prod"),
        _onto_rows("products without self", _PLACES, "prod", include_self=False),
        zero_size=_no_columns(_PLACES[:, :0], "prod"),
        skips=_PLACED,
        dtypes=WITH_COMPLEX,
    ),
    op_info("index_reduce", "missing", _by_index).on(
        _onto_rows("products", _INDEX, "prod"),
        _onto_rows("products without self", _INDEX, "prod", include_self=False),
        zero_size=_no_columns(_INDEX, "prod"),
        skips=_PLACED,
        dtypes=WITH_COMPLEX,
    ),
    op_info("index_reduce, means and extremes", "missing", _by_index).on(
        _onto_rows("means", _INDEX, "mean"),
        _onto_rows("maxima", _INDEX, "amax"),
        _onto_rows("minima without self", _INDEX, "amin", include_self=False),
        zero_size=_no_columns(_INDEX, "amax"),
        skips={**_PLACED, "complex": "torch has neither derivatives of complex means here nor maxima"},
        smooth=False,
    ),
    op_info("embedding_bag", "missing", _embedding_bag).on(
        _bags("mean"),
        _bags("sum", mode="sum"),
        _bags("padding", padding_idx=0),
        sample_input("bags of one length", lambda n: (_BAGS_OF_ONE_LENGTH, n(4, 2))),
        zero_size=_NO_BAGS,
        skips=_BAG_SKIPS,
    ),
    op_info("embedding_bag, maxima", "missing", _embedding_bag).on(
        _bags("maxima", mode="max"),
        sample_input("bags of one length", lambda n: (_BAGS_OF_ONE_LENGTH, n(4, 2)), mode="max"),
        zero_size=_NO_BAGS,
        skips={**_BAG_SKIPS, "stride 0": "its rows are equal: of equal maxima torch takes the first, amax shares"},
        smooth=False,
    ),
    op_info("embedding_bag, weighted", "missing", _weighted_sums_reference, _weighted_sums).on(
        sample_input("bags", lambda n: (n(4, 2), n(5), _INDICES, _OFFSETS)),
        sample_input("one length", lambda n: (n(4, 2), n(2, 2), _BAGS_OF_ONE_LENGTH)),
        zero_size=lambda n: (n(4, 2), n(0, 3), _NONE),
        skips=_BAG_SKIPS,
    ),
)  # fmt: skip


def _kernel(d: Tensor, mode: str) -> Tensor:
    """The weight of a pixel at distance d, as one function over the whole line."""
    d = d.abs()
    if mode == "nearest":
        return (d < 0.5).to(d.dtype) + 0.0 * d
    if mode == "bilinear":
        return torch.where(d < 1, 1 - d, 0)
    near = 1.25 * d**3 - 2.25 * d**2 + 1
    far = -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
    return torch.where(d < 1, near, torch.where(d < 2, far, 0))


def _copied(x: Tensor, size: int, mode: str, padding_mode: str, align: bool) -> Tensor:
    """Weights [N, P, size] of all pixels: those of an endless line of copies, added up."""
    repeats = range(-4 * size - 4, 5 * size + 4)
    line = torch.tensor(list(repeats), dtype=x.dtype, device=x.device)
    w = _kernel(x.unsqueeze(-1) - line, mode)
    if padding_mode == "zeros":
        return w[..., -repeats[0] : size - repeats[0]]
    period = 2 * (size - 1) if align else 2 * size
    source = []
    for k in repeats:
        folded = k % period if period else 0
        mirror = period - folded if align else period - 1 - folded
        source.append(
            min(folded, mirror) if padding_mode == "reflection" else max(0, min(size - 1, k))
        )
    columns = [w[..., [j for j, s in enumerate(source) if s == i]].sum(-1) for i in range(size)]
    return torch.stack(columns, -1)


def _all_pixels(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> Tensor:
    """Every pixel times its weight, in a plane of copies of the image: no indices."""
    N, dims = grid.shape[0], grid.shape[-1]
    weights = []
    for axis in range(dims):
        size = input.shape[-1 - axis]
        g = grid[..., axis].reshape(N, -1)
        x = (g + 1) / 2 * (size - 1) if align_corners else ((g + 1) * size - 1) / 2
        weights.append(_copied(x, size, mode, padding_mode, align_corners))
    y = torch.einsum("nc...x,npx->ncp...", input, weights[0])
    for w in weights[1:]:
        y = torch.einsum("ncp...y,npy->ncp...", y, w)
    return y.reshape(N, input.shape[1], *grid.shape[1:-1])


def _samples() -> tuple[SampleInput, ...]:
    samples = []
    for mode, padding, align in itertools.product(
        ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)
    ):
        if align != (padding == "border"):
            continue  # each alignment with some; tests/ops/test_grid_sample.py crosses them, beside torch's
        samples.append(
            sample_input(
                f"{mode}, {padding}, {'centres' if align else 'edges'}",
                _plane(1.4 if padding == "border" else 0.8),
                mode=mode,
                padding_mode=padding,
                align_corners=align,
            )
        )
    samples.append(
        sample_input(
            "volume", lambda n: (n(1, 1, 2, 2, 3), 0.8 * n(1, 1, 1, 2, 3)), align_corners=False
        )
    )
    return tuple(samples)


def _plane(spread: float) -> Callable[[Normal], tuple[Tensor, ...]]:
    return lambda n: (n(1, 2, 2, 3), spread * n(1, 1, 2, 2))


_GRID_SAMPLE = (
    op_info("grid_sample", "missing", _all_pixels).on(
        *_samples(),
        zero_size=normals((1, 2, 2, 3), (1, 0, 2, 2)),
        smooth=False,
        skips={
            "no dimensions": "needs images with two dimensions or three",
            "broadcasting": "input and grid have one batch size, by torch's rule",
        },
    ),
)  # fmt: skip

OPS = (*_INDEXING, *_GRID_SAMPLE)
