"""Products, attention, convolutions, reductions over dimensions, and distances between rows."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import ops
from tests.ops.opinfo import references
from tests.ops.opinfo.op_info import (
    NEEDS_DIMENSIONS,
    ONE_TENSOR,
    WITH_COMPLEX,
    OpInfo,
    SampleInput,
    elementwise_info,
    normals,
    op_info,
    sample_input,
)


def _linear_act(name: str, acts: list[str], **others: Any) -> OpInfo:
    return op_info(name, "linear", references.linear_act, ops.linear_act).on(
        *tuple(sample_input(act, normals((2, 3), (4, 3), (4,)), act=act) for act in acts),
        zero_size=normals((0, 3), (4, 3), (4,)),
        skips={
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions as for linear; none stretch",
        },
        **others,
    )


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


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        heads = query.shape[-3] // key.shape[-3]
        key, value = (
            torch.stack([x[..., i // heads, :, :] for i in range(query.shape[-3])], -3)
            for x in (key, value)
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.einsum("...le,...se->...ls", query, key) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:]).tril().bool()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = scores.exp() * attn_mask
    else:
        weights = (scores if attn_mask is None else scores + attn_mask).exp()
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-300), 0) @ value


_MASK = torch.tensor([[True, False, True], [True, True, False]])

_LINEAR = (
    op_info("matmul", "linear", torch.matmul).on(
        sample_input("two matrices", normals((2, 3), (3, 4))),
        sample_input("batch of matrices", normals((2, 2, 3), (2, 3, 2))),
        sample_input("batch times matrix", normals((2, 2, 3), (3, 2))),
        sample_input("two vectors", normals((3,), (3,))),
        sample_input("matrix times vector", normals((2, 2, 3), (3,))),
        sample_input("vector times batch", normals((3,), (2, 3, 2))),
        zero_size=normals((2, 2, 0), (2, 0, 3)),
        broadcasting=normals((2, 1, 2, 3), (3, 3, 2)),
        dtypes=WITH_COMPLEX,
        skips=NEEDS_DIMENSIONS,
    ),
    op_info("linear", "linear", F.linear).on(
        sample_input("rows", normals((2, 3), (4, 3), (4,))),
        sample_input("without bias", lambda n: (n(2, 3), n(4, 3), None)),
        sample_input("one row", normals((3,), (2, 3), (2,))),
        sample_input("two leading dimensions", normals((2, 2, 3), (2, 3), (2,))),
        zero_size=normals((0, 3), (4, 3), (4,)),
        dtypes=WITH_COMPLEX,
        skips={**NEEDS_DIMENSIONS, "broadcasting": "leading dimensions have samples; none stretch"},
    ),
    _linear_act("linear_act", ["tanh", "sigmoid", "swish"], dtypes=WITH_COMPLEX),
    _linear_act("linear_act, real only", ["relu", "softplus"], smooth=False),
    op_info("bias_add", "linear", references.bias_add).on(
        sample_input("channels second", normals((2, 3, 2), (3,))),
        sample_input("channels last", normals((2, 3), (3,)), dim=-1),
        sample_input("channels first", normals((2, 3), (2,)), dim=0),
        zero_size=normals((0, 3), (3,)),
        dtypes=WITH_COMPLEX,
        skips={**NEEDS_DIMENSIONS, "broadcasting": "the bias has the size of its dimension"},
    ),
    elementwise_info("mul", torch.mul, theme="linear", tensors=2).on(
        sample_input("two matrices", normals((2, 3), (2, 3))),
        sample_input("by a number", lambda n: (n(2, 3), -1.5)),
        broadcasting=normals((2, 1), (4, 1, 3)),
        dtypes=WITH_COMPLEX,
    ),
    op_info("sparse_mm", "missing", _sparse_reference, sparse_mm).on(
        sample_input("matrices", normals((3, 2))),
        zero_size=normals((3, 0)),
        skips={
            "no dimensions": "a matrix product needs dimensions",
            "broadcasting": "one dense matrix, nothing to broadcast with",
            "compile": "torch's compiler does not trace the making of sparse matrices",
        },
        dtypes=WITH_COMPLEX,
    ),
    op_info("scaled_dot_product_attention", "missing", _attention).on(
        sample_input("plain", normals((2, 3), (4, 3), (4, 2))),
        sample_input("heads", normals((2, 2, 2, 3), (2, 2, 3, 3), (2, 2, 3, 2)), scale=0.7),
        sample_input("causal", normals((1, 3, 2), (1, 3, 2), (1, 3, 2)), is_causal=True),
        sample_input("boolean mask", lambda n: (n(2, 2), n(3, 2), n(3, 2), _MASK)),
        sample_input("learned bias", normals((2, 2), (3, 2), (3, 2), (2, 3))),
        sample_input("grouped heads", normals((1, 4, 2, 2), (1, 2, 3, 2), (1, 2, 3, 2)), enable_gqa=True),
        zero_size=normals((0, 2, 3), (0, 4, 3), (0, 4, 2)),
        skips={
            "no dimensions": "attention needs two dimensions to act on",
            "broadcasting": "leading dimensions have samples; none stretch",
        },
    ),
)  # fmt: skip

_CONV_SKIPS = {
    **NEEDS_DIMENSIONS,
    "broadcasting": "channels and kernel sizes must fit; none stretch",
}


def _conv(
    name: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    samples: tuple[SampleInput, ...],
    empty: SampleInput,
) -> OpInfo:
    return op_info(name, "conv", reference, function).on(
        *samples, zero_size=empty, dtypes=WITH_COMPLEX, skips=_CONV_SKIPS
    )


_CONV = (
    _conv(
        "conv1d",
        ops.conv1d,
        F.conv1d,
        (
            sample_input("plain", normals((2, 2, 5), (3, 2, 3), (3,))),
            sample_input("no bias, stride that leaves a rest", normals((1, 2, 6), (2, 2, 3)), stride=2),
            sample_input("unbatched, padded", normals((2, 4), (2, 2, 2), (2,)), padding=1),
            sample_input("same", normals((1, 2, 4), (2, 2, 3), (2,)), padding="same", dilation=2),
            sample_input("depthwise", normals((1, 3, 4), (6, 1, 2), (6,)), groups=3),
        ),
        sample_input("no samples", normals((0, 2, 5), (3, 2, 3), (3,))),
    ),
    _conv(
        "conv2d",
        ops.conv2d,
        F.conv2d,
        (
            sample_input("plain", lambda n: (n(2, 2, 3, 4), n(2, 2, 2, 3) / 4, n(2))),
            sample_input("all options", lambda n: (n(1, 4, 4, 5), n(2, 2, 2, 3) / 4, n(2)), stride=(2, 1), padding=(1, 2), dilation=(2, 1), groups=2),
            sample_input("unbatched", normals((2, 3, 3), (2, 2, 2, 2))),
        ),
        sample_input("no samples", normals((0, 2, 4, 4), (3, 2, 2, 2), (3,))),
    ),
    _conv(
        "conv3d",
        ops.conv3d,
        F.conv3d,
        (
            sample_input("plain", normals((1, 2, 2, 3, 2), (2, 2, 2, 2, 1), (2,))),
            sample_input("grouped, padded", normals((1, 2, 2, 2, 2), (2, 1, 2, 1, 2)), groups=2, padding=(0, 1, 0)),
        ),
        sample_input("no samples", normals((0, 1, 2, 2, 2), (1, 1, 1, 2, 2), (1,))),
    ),
)  # fmt: skip


def _reduction(
    name: str, function: Callable[..., Any], reference: Callable[..., Any], **others: Any
) -> OpInfo:
    return op_info(name, "reduce", reference, function).on(
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


_REDUCTIONS = (
    _reduction("sum", ops.sum, torch.sum, dtypes=WITH_COMPLEX),
    _reduction("mean", ops.mean, torch.mean, dtypes=WITH_COMPLEX),
    _reduction("amax", ops.amax, references.amax, smooth=False),
    _reduction("logsumexp", ops.logsumexp, references.logsumexp, dtypes=WITH_COMPLEX),
    op_info("cdist", "missing", _cdist).on(
        _two("Euclidean"),
        _two("Euclidean, by products", compute_mode="use_mm_for_euclid_dist"),
        sample_input("batches", normals((2, 1, 3, 2), (2, 2, 2))),
        _two("cubes", p=3.0),
        _two("fourth powers", p=4.0),
        _two("powers of one and a half", p=1.5),
        zero_size=normals((2, 0, 2), (2, 3, 2)),
        skips={**_NEEDS_ROWS, "broadcasting": "the sample of batches broadcasts in every cell"},
    ),
    op_info("cdist, piecewise", "missing", _cdist).on(
        _two("sums", p=1.0),
        _two("maxima", p=INFINITY),
        zero_size=normals((0, 2), (3, 2)),
        smooth=False,
        skips={**_NEEDS_ROWS, "broadcasting": "the entry cdist has a sample that broadcasts"},
    ),
    op_info("pdist", "missing", _pdist).on(
        _one("Euclidean"),
        _one("cubes", p=3.0),
        _one("powers of one and a half", p=1.5),
        zero_size=normals((1, 2)),
        skips={**ONE_TENSOR, **_NEEDS_ROWS, "stride 0": "its rows are equal, and their distance is not differentiable"},
    ),
    op_info("pairwise_distance", "wrong", _pairwise_distance).on(
        _same("Euclidean"),
        _same("sums", p=1.0, keepdim=True),
        _same("maxima", p=INFINITY),
        _same("cubes", p=3.0, eps=0.1),
        sample_input("broadcast", normals((2, 1, 3), (2, 3))),
        zero_size=normals((0, 3), (0, 3)),
        smooth=False,
        skips={"no dimensions": "needs a dimension of entries", "broadcasting": "a sample that broadcasts is in every cell"},
        dtypes=WITH_COMPLEX,
    ),
)  # fmt: skip

OPS = (*_LINEAR, *_CONV, *_REDUCTIONS)
