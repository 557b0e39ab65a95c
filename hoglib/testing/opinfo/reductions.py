"""Reductions over dimensions, and distances between rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.testing.opinfo import references
from hoglib.testing.opinfo.op_info import (
    ONE_TENSOR,
    WITH_COMPLEX,
    OpInfo,
    normals,
    op_info,
    sample_input,
)


def _reduction(
    name: str,
    formula: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    **others: Any,
) -> OpInfo:
    return op_info(name, "reduce", formula, reference, function).on(
        sample_input("rows of a matrix", lambda n: (n(2, 3), 1)),
        sample_input("two dimensions kept", lambda n: (n(2, 3, 2), (0, -1)), keepdim=True),
        sample_input("all dimensions", lambda n: (n(2, 2), None)),
        zero_size=lambda n: (n(2, 0), 0),
        no_dimensions=lambda n: (n(), -1),
        skips=ONE_TENSOR,
        **others,
    )


INFINITY = float("inf")
_NEEDS_ROWS = {"no dimensions": "needs a dimension of rows and one of entries"}


def _norm(d: Tensor, p: float) -> Tensor:
    """By the definition, a row at a time; no row of the samples has an entry of 0."""
    if p == INFINITY:
        return d.abs().max(-1).values
    return (d.abs() ** p).sum(-1) ** (1 / p)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    rows = [_norm(x1 - x2[..., j : j + 1, :], p) for j in range(x2.shape[-2])]
    if not rows:
        return (x1 @ x2.mT).sum(-1, keepdim=True) * x1.new_zeros(0)
    return torch.stack(rows, -1)


def _pdist(input: Tensor, p: float = 2.0) -> Tensor:
    n = input.shape[0]
    pairs = [_norm(input[i] - input[j], p) for i in range(n) for j in range(i + 1, n)]
    return torch.stack(pairs) if pairs else input.sum(-1)[:0]


def _pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    y = _norm(x1 - x2 + eps, p)
    return y[..., None] if keepdim else y


def _two(name: str, **options: Any) -> Any:
    return sample_input(name, normals((3, 2), (2, 2)), **options)


def _one(name: str, **options: Any) -> Any:
    return sample_input(name, normals((3, 2)), **options)


def _same(name: str, **options: Any) -> Any:
    return sample_input(name, normals((2, 3), (2, 3)), **options)


OPS = (
    _reduction("sum", "sum_i x_i", ops.sum, torch.sum, dtypes=WITH_COMPLEX),
    _reduction("mean", "sum_i x_i / n", ops.mean, torch.mean, dtypes=WITH_COMPLEX),
    _reduction("amax", "max_i x_i", ops.amax, references.amax, smooth=False),
    _reduction(
        "logsumexp", "log sum_i e^x_i", ops.logsumexp, references.logsumexp, dtypes=WITH_COMPLEX
    ),
    op_info("cdist", "missing", "(sum_k |a_ik - b_jk|^p)^(1/p)", _cdist).on(
        _two("Euclidean"),
        _two("Euclidean, by products", compute_mode="use_mm_for_euclid_dist"),
        sample_input("batches", normals((2, 1, 3, 2), (2, 2, 2))),
        _two("cubes", p=3.0),
        _two("fourth powers", p=4.0),
        _two("powers of one and a half", p=1.5),
        zero_size=normals((2, 0, 2), (2, 3, 2)),
        skips={
            **_NEEDS_ROWS,
            "broadcasting": "the sample of batches broadcasts in every cell",
        },
    ),
    op_info("cdist, piecewise", "missing", "sum_k |a_ik - b_jk|, or their maximum", _cdist).on(
        _two("sums", p=1.0),
        _two("maxima", p=INFINITY),
        zero_size=normals((0, 2), (3, 2)),
        smooth=False,
        skips={**_NEEDS_ROWS, "broadcasting": "the entry cdist has a sample that broadcasts"},
    ),
    op_info("pdist", "missing", "(sum_k |x_ik - x_jk|^p)^(1/p), i < j", _pdist).on(
        _one("Euclidean"),
        _one("cubes", p=3.0),
        _one("powers of one and a half", p=1.5),
        zero_size=normals((1, 2)),
        skips={
            **ONE_TENSOR,
            **_NEEDS_ROWS,
            "stride 0": "its rows are equal, and their distance is not differentiable",
        },
    ),
    op_info(
        "pairwise_distance", "wrong", "(sum_k |a_ik - b_ik + eps|^p)^(1/p)", _pairwise_distance
    ).on(
        _same("Euclidean"),
        _same("sums", p=1.0, keepdim=True),
        _same("maxima", p=INFINITY),
        _same("cubes", p=3.0, eps=0.1),
        sample_input("broadcast", normals((2, 1, 3), (2, 3))),
        zero_size=normals((0, 3), (0, 3)),
        smooth=False,
        skips={
            "no dimensions": "needs a dimension of entries",
            "broadcasting": "a sample that broadcasts is in every cell",
        },
        dtypes=WITH_COMPLEX,
    ),
)
