"""The catalogue of products with a sparse matrix."""

import torch
from torch import Tensor

from hoglib import ops
from hoglib.ops._entry import Op, sample

_PLACES = torch.tensor([[0, 1, 1, 2, 0], [2, 0, 1, 1, 2]])
_VALUES = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.5], dtype=torch.float64)


def sparse_mm(mat2: Tensor) -> Tensor:
    """With a constant first matrix; only the dense one is differentiated."""
    mat1 = torch.sparse_coo_tensor(_PLACES, _VALUES.to(mat2), (3, 3), check_invariants=False)
    return ops.sparse_mm(mat1, mat2)


def _reference(mat2: Tensor) -> Tensor:
    dense = torch.zeros(3, 3, dtype=torch.float64)
    for i, j, value in zip(*_PLACES.tolist(), _VALUES.tolist(), strict=True):
        dense[i, j] += value
    return dense.to(mat2) @ mat2


SPARSE = (
    Op(
        "sparse_mm",
        "missing",
        "A x, A sparse and constant",
        sparse_mm,
        _reference,
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
