"""Linear maps, products and attention."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import ops
from hoglib.testing.opinfo import references
from hoglib.testing.opinfo.op_info import (
    NEEDS_DIMENSIONS,
    WITH_COMPLEX,
    OpInfo,
    broadcasting_sample,
    same_shape_corners,
    sample_input,
)


def _linear_act(name: str, acts: list[str], **others: Any) -> OpInfo:
    return OpInfo(
        name,
        "linear",
        "act(x W^T + b)",
        ops.linear_act,
        references.linear_act,
        tuple(sample_input(act, lambda n: (n(2, 3), n(4, 3), n(4)), act=act) for act in acts),
        corners={
            "zero size": sample_input("no rows", lambda n: (n(0, 3), n(4, 3), n(4)), act=acts[0])
        },
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

OPS = (
    OpInfo(
        "matmul",
        "linear",
        "A B",
        ops.matmul,
        torch.matmul,
        (
            sample_input("two matrices", lambda n: (n(2, 3), n(3, 4))),
            sample_input("batch of matrices", lambda n: (n(2, 2, 3), n(2, 3, 2))),
            sample_input("batch times matrix", lambda n: (n(2, 2, 3), n(3, 2))),
            sample_input("two vectors", lambda n: (n(3), n(3))),
            sample_input("matrix times vector", lambda n: (n(2, 2, 3), n(3))),
            sample_input("vector times batch", lambda n: (n(3), n(2, 3, 2))),
        ),
        corners={
            "zero size": sample_input("zero size", lambda n: (n(2, 2, 0), n(2, 0, 3))),
            "broadcasting": broadcasting_sample((2, 1, 2, 3), (3, 3, 2)),
        },
        dtypes=WITH_COMPLEX,
        skips=NEEDS_DIMENSIONS,
    ),
    OpInfo(
        "linear",
        "linear",
        "x W^T + b",
        ops.linear,
        F.linear,
        (
            sample_input("rows", lambda n: (n(2, 3), n(4, 3), n(4))),
            sample_input("without bias", lambda n: (n(2, 3), n(4, 3), None)),
            sample_input("one row", lambda n: (n(3), n(2, 3), n(2))),
            sample_input("two leading dimensions", lambda n: (n(2, 2, 3), n(2, 3), n(2))),
        ),
        corners={"zero size": sample_input("no rows", lambda n: (n(0, 3), n(4, 3), n(4)))},
        dtypes=WITH_COMPLEX,
        skips={
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions have samples; none stretch",
        },
    ),
    _linear_act("linear_act", ["tanh", "sigmoid", "swish"], dtypes=WITH_COMPLEX),
    _linear_act("linear_act, real only", ["relu", "softplus"], smooth=False),
    OpInfo(
        "bias_add",
        "linear",
        "x + b over channels",
        ops.bias_add,
        references.bias_add,
        (
            sample_input("channels second", lambda n: (n(2, 3, 2), n(3))),
            sample_input("channels last", lambda n: (n(2, 3), n(3)), dim=-1),
            sample_input("channels first", lambda n: (n(2, 3), n(2)), dim=0),
        ),
        corners={"zero size": sample_input("no rows", lambda n: (n(0, 3), n(3)))},
        dtypes=WITH_COMPLEX,
        skips={**NEEDS_DIMENSIONS, "broadcasting": "the bias has the size of its dimension"},
    ),
    OpInfo(
        "mul",
        "linear",
        "x p",
        ops.mul,
        torch.mul,
        (
            sample_input("two matrices", lambda n: (n(2, 3), n(2, 3))),
            sample_input("by a number", lambda n: (n(2, 3), -1.5)),
        ),
        corners={**same_shape_corners(2), "broadcasting": broadcasting_sample((2, 1), (4, 1, 3))},
        dtypes=WITH_COMPLEX,
    ),
    OpInfo(
        "sparse_mm",
        "missing",
        "A x, A sparse and constant",
        sparse_mm,
        _sparse_reference,
        (sample_input("matrices", lambda n: (n(3, 2),)),),
        corners={"zero size": sample_input("no columns", lambda n: (n(3, 0),))},
        skips={
            "no dimensions": "a matrix product needs dimensions",
            "broadcasting": "one dense matrix, nothing to broadcast with",
            "compile": "torch's compiler does not trace the making of sparse matrices",
        },
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.complex128),
    ),
    OpInfo(
        "scaled_dot_product_attention",
        "missing",
        "softmax(scale Q K^T + B) V",
        ops.scaled_dot_product_attention,
        _attention,
        (
            sample_input("plain", lambda n: (n(2, 3), n(4, 3), n(4, 2))),
            sample_input(
                "heads", lambda n: (n(2, 2, 2, 3), n(2, 2, 3, 3), n(2, 2, 3, 2)), scale=0.7
            ),
            sample_input("causal", lambda n: (n(1, 3, 2), n(1, 3, 2), n(1, 3, 2)), is_causal=True),
            sample_input("boolean mask", lambda n: (n(2, 2), n(3, 2), n(3, 2), _MASK)),
            sample_input("learned bias", lambda n: (n(2, 2), n(3, 2), n(3, 2), n(2, 3))),
            sample_input(
                "grouped heads",
                lambda n: (n(1, 4, 2, 2), n(1, 2, 3, 2), n(1, 2, 3, 2)),
                enable_gqa=True,
            ),
        ),
        corners={
            "zero size": sample_input("zero size", lambda n: (n(0, 2, 3), n(0, 4, 3), n(0, 4, 2))),
        },
        skips={
            "no dimensions": "attention needs two dimensions to act on",
            "broadcasting": "leading dimensions have samples; none stretch",
        },
    ),
)
