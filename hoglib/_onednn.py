"""oneDNN's matrix product, which torch has beside that of its BLAS but calls for half precision only.

The private torch API that this needs is here: `torch.ops.mkldnn._linear_pointwise`, which torch's
compiler puts in the place of linear layers with constant weights.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def available() -> bool:
    """Whether this build of torch has it, and torch's own switch for oneDNN is on."""
    return _is_built() and bool(torch.backends.mkldnn.enabled)


@cache
def _is_built() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def full_precision() -> bool:
    """Whether float32 is computed in float32: with less, torch calls oneDNN by itself."""
    products: Any = torch.backends.mkldnn
    return products.matmul.fp32_precision not in ("bf16", "tf32")


def takes(tensor: Tensor) -> bool:
    """Whether it is a matrix as oneDNN reads it: float32, on a processor, by rows or by columns."""
    if tensor.dtype is not torch.float32 or tensor.dim() != 2 or tensor.device.type != "cpu":
        return False
    return tensor.layout is torch.strided and (by_rows(tensor) or by_columns(tensor))


def by_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def by_columns(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0]


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of tensors that `takes` accepts, b [out] or None. Has no derivative."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
