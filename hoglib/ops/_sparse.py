"""A sparse matrix times a dense one, in every mode: torch.sparse.mm has no forward mode."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib.ops._halves import is_autocast, widened


def sparse_mm(mat1: Tensor, mat2: Tensor, *reduce: str) -> Tensor:
    r"""The product of a constant sparse matrix and a dense one.

        y_i = sum_(j: A_ij stored) A_ij x_j

    Shapes: mat1 (n, m) in the layout COO, mat2 (m, k) dense; y (n, k), dense. Half precision is
    summed in float32; under autocast the result has the dtype of autocast.
    What else torch.sparse.mm takes is left to it, with its derivatives: two sparse matrices, the
    layout CSR (which torch.func transforms cannot hold), a mat1 that requires grad.
    """
    ours = mat1.is_sparse and mat2.layout == torch.strided and mat1.dtype == mat2.dtype
    fits = mat1.dim() == mat2.dim() == 2 and mat1.shape[1] == mat2.shape[0]
    if reduce or mat1.requires_grad or not ours or not fits:
        return torch.sparse.mm(mat1, mat2, *reduce)
    rows, columns = mat1._indices().unbind()  # entries of one place add up, coalesced or not
    terms = widened(mat1._values()).unsqueeze(-1) * mat2.index_select(0, columns)
    y = terms.new_zeros(mat1.shape[0], mat2.shape[1]).index_add(0, rows, terms)
    return y.to(torch.get_autocast_dtype(mat2.device.type) if is_autocast(mat2) else mat2.dtype)


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {torch.sparse.mm: sparse_mm}
