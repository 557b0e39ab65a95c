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
    elementwise_info,
    normals,
    op_info,
    sample_input,
)


def _linear_act(name: str, acts: list[str], **others: Any) -> OpInfo:
    return op_info(name, "linear", "act(x W^T + b)", references.linear_act, ops.linear_act).on(
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

OPS = (
    op_info("matmul", "linear", "A B", torch.matmul).on(
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
    op_info("linear", "linear", "x W^T + b", F.linear).on(
        sample_input("rows", normals((2, 3), (4, 3), (4,))),
        sample_input("without bias", lambda n: (n(2, 3), n(4, 3), None)),
        sample_input("one row", normals((3,), (2, 3), (2,))),
        sample_input("two leading dimensions", normals((2, 2, 3), (2, 3), (2,))),
        zero_size=normals((0, 3), (4, 3), (4,)),
        dtypes=WITH_COMPLEX,
        skips={
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions have samples; none stretch",
        },
    ),
    _linear_act("linear_act", ["tanh", "sigmoid", "swish"], dtypes=WITH_COMPLEX),
    _linear_act("linear_act, real only", ["relu", "softplus"], smooth=False),
    op_info("bias_add", "linear", "x + b over channels", references.bias_add).on(
        sample_input("channels second", normals((2, 3, 2), (3,))),
        sample_input("channels last", normals((2, 3), (3,)), dim=-1),
        sample_input("channels first", normals((2, 3), (2,)), dim=0),
        zero_size=normals((0, 3), (3,)),
        dtypes=WITH_COMPLEX,
        skips={**NEEDS_DIMENSIONS, "broadcasting": "the bias has the size of its dimension"},
    ),
    elementwise_info("mul", "x p", torch.mul, theme="linear", tensors=2).on(
        sample_input("two matrices", normals((2, 3), (2, 3))),
        sample_input("by a number", lambda n: (n(2, 3), -1.5)),
        broadcasting=normals((2, 1), (4, 1, 3)),
        dtypes=WITH_COMPLEX,
    ),
    op_info("sparse_mm", "missing", "A x, A sparse and constant", _sparse_reference, sparse_mm).on(
        sample_input("matrices", normals((3, 2))),
        zero_size=normals((3, 0)),
        skips={
            "no dimensions": "a matrix product needs dimensions",
            "broadcasting": "one dense matrix, nothing to broadcast with",
            "compile": "torch's compiler does not trace the making of sparse matrices",
        },
        dtypes=WITH_COMPLEX,
    ),
    op_info("scaled_dot_product_attention", "missing", "softmax(scale Q K^T + B) V", _attention).on(
        sample_input("plain", normals((2, 3), (4, 3), (4, 2))),
        sample_input("heads", normals((2, 2, 2, 3), (2, 2, 3, 3), (2, 2, 3, 2)), scale=0.7),
        sample_input("causal", normals((1, 3, 2), (1, 3, 2), (1, 3, 2)), is_causal=True),
        sample_input("boolean mask", lambda n: (n(2, 2), n(3, 2), n(3, 2), _MASK)),
        sample_input("learned bias", normals((2, 2), (3, 2), (3, 2), (2, 3))),
        sample_input(
            "grouped heads",
            normals((1, 4, 2, 2), (1, 2, 3, 2), (1, 2, 3, 2)),
            enable_gqa=True,
        ),
        zero_size=normals((0, 2, 3), (0, 4, 3), (0, 4, 2)),
        skips={
            "no dimensions": "attention needs two dimensions to act on",
            "broadcasting": "leading dimensions have samples; none stretch",
        },
    ),
)
