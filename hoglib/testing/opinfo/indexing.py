"""The catalogue of reductions by segments and by index, and of hardsigmoid."""

import itertools
from collections.abc import Callable
from functools import reduce as fold
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.testing.opinfo.entry import ONE_TENSOR, Normal, Op, Sample, sample, unary

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


# === The catalogue of embedding_bag.


def _reference(
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
    return sample(
        name, lambda n: (_INDICES, n(4, 2)), offsets=_OFFSETS, include_last_offset=False, **options
    )


def _sums(
    weight: Tensor,
    per_sample_weights: Tensor,
    input: Tensor,
    offsets: Tensor | None = None,
) -> Tensor:
    return ops.embedding_bag(
        input, weight, offsets, mode="sum", per_sample_weights=per_sample_weights
    )


def _sums_reference(
    weight: Tensor, per_sample_weights: Tensor, input: Tensor, offsets: Tensor | None = None
) -> Tensor:
    return _reference(input, weight, offsets, "sum", per_sample_weights)


_CORNERS = {
    "no dimensions": "needs a table of rows",
    "broadcasting": "one table, nothing to broadcast with",
    "complex": "torch refuses complex tables and so does this, with a RuntimeError that is a TypeError",
}
_NO_BAGS = {
    "zero size": sample("no bags", lambda n: (torch.zeros(0, 3, dtype=torch.long), n(4, 2)))
}

EMBEDDING_BAG = (
    Op(
        "embedding_bag",
        "missing",
        "sum or mean over i in bag b of W[i]",
        ops.embedding_bag,
        _reference,
        (
            _bags("mean"),
            _bags("sum", mode="sum"),
            _bags("padding", padding_idx=0),
            sample("bags of one length", lambda n: (_INDICES[:4].reshape(2, 2), n(4, 2))),
        ),
        corners=_NO_BAGS,
        skips=_CORNERS,
    ),
    Op(
        "embedding_bag, maxima",
        "missing",
        "max over i in bag b of W[i]",
        ops.embedding_bag,
        _reference,
        (
            _bags("maxima", mode="max"),
            sample(
                "bags of one length", lambda n: (_INDICES[:4].reshape(2, 2), n(4, 2)), mode="max"
            ),
        ),
        corners=_NO_BAGS,
        skips={
            **_CORNERS,
            "stride 0": "its rows are equal: of equal maxima torch takes the first, amax shares",
        },
        smooth=False,
    ),
    Op(
        "embedding_bag, weighted",
        "missing",
        "sum over i in bag b of s_i W[i]",
        _sums,
        _sums_reference,
        (
            sample("bags", lambda n: (n(4, 2), n(5), _INDICES, _OFFSETS)),
            sample("one length", lambda n: (n(4, 2), n(2, 2), _INDICES[:4].reshape(2, 2))),
        ),
        corners={
            "zero size": sample(
                "no bags", lambda n: (n(4, 2), n(0, 3), torch.zeros(0, 3, dtype=torch.long))
            )
        },
        skips=_CORNERS,
    ),
)


# === The catalogue of products with a sparse matrix.

_SPARSE_PLACES = torch.tensor([[0, 1, 1, 2, 0], [2, 0, 1, 1, 2]])
_VALUES = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.5], dtype=torch.float64)


def sparse_mm(mat2: Tensor) -> Tensor:
    """With a constant first matrix; only the dense one is differentiated."""
    mat1 = torch.sparse_coo_tensor(_SPARSE_PLACES, _VALUES.to(mat2), (3, 3), check_invariants=False)
    return ops.sparse_mm(mat1, mat2)


def _sparse_reference(mat2: Tensor) -> Tensor:
    dense = torch.zeros(3, 3, dtype=torch.float64)
    for i, j, value in zip(*_SPARSE_PLACES.tolist(), _VALUES.tolist(), strict=True):
        dense[i, j] += value
    return dense.to(mat2) @ mat2


SPARSE = (
    Op(
        "sparse_mm",
        "missing",
        "A x, A sparse and constant",
        sparse_mm,
        _sparse_reference,
        (sample("matrices", lambda n: (n(3, 2),)),),
        corners={"zero size": sample("no columns", lambda n: (n(3, 0),))},
        skips={
            "no dimensions": "a matrix product needs dimensions",
            "broadcasting": "one dense matrix, nothing to broadcast with",
            "compile": "torch's compiler does not trace the making of sparse matrices",
        },
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.complex128),
    ),
)


# === The catalogue entry of grid_sample.


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


def _samples() -> tuple[Sample, ...]:
    samples = []
    for mode, padding, align in itertools.product(
        ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)
    ):
        if mode == "nearest" and (padding != "zeros") != align:
            continue  # three of the six will do, where there is no gradient by grid
        samples.append(
            sample(
                f"{mode}, {padding}, {'centres' if align else 'edges'}",
                _plane(1.4 if padding == "border" else 0.8),
                mode=mode,
                padding_mode=padding,
                align_corners=align,
            )
        )
    samples.append(
        sample(
            "volume",
            lambda n: (n(1, 1, 2, 2, 3), 0.8 * n(1, 1, 1, 2, 3)),
            align_corners=False,
        )
    )
    return tuple(samples)


def _plane(spread: float) -> Callable[[Normal], tuple[Tensor, ...]]:
    return lambda n: (n(1, 2, 2, 3), spread * n(1, 1, 2, 2))


GRID = (
    Op(
        "grid_sample",
        "missing",
        "sum_k w(x - k) v_k",
        ops.grid_sample,
        _all_pixels,
        _samples(),
        corners={
            "zero size": sample(
                "no places", lambda n: (n(1, 2, 2, 3), n(1, 0, 2, 2)), align_corners=False
            )
        },
        smooth=False,
        skips={
            "no dimensions": "needs images with two dimensions or three",
            "broadcasting": "input and grid have one batch size, by torch's rule",
        },
    ),
)
