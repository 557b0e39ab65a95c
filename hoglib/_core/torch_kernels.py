"""Kernels of torch that only its private operations reach: fused attention for the CPU, oneDNN's matrix
product, and the switches between vendors' kernels and torch's own.

Private torch API, as `torch_internals`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


@contextmanager
def native_kernels() -> Iterator[None]:
    """Without the kernels of oneDNN and cuDNN.

    `torch.backends.mkldnn.flags` sets TF32 too, by an interface that torch warns of.
    """
    onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


# torch's fused attention for the CPU, [n, h, L, E], of which `F.scaled_dot_product_attention` hides the
# second output.


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T + B) V and the logarithm of the sums of the softmax, [n, h, L]; zero where a row
    attends to nothing."""
    query, key, value = map(_with_dense_rows, (query, key, value))
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=1.0
    )
    return found


def cpu_attention_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
    bias: Tensor | None, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by query, key and value, from the outputs of `cpu_attention`."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad, query, key, value = map(_with_dense_rows, (grad, query, key, value))
    found: tuple[Tensor, Tensor, Tensor] = backward(
        grad, query, key, value, output, logsumexp, 0.0, causal, attn_mask=bias, scale=1.0
    )
    return found


def _with_dense_rows(x: Tensor) -> Tensor:
    """The kernel reads rows without a look at the stride of their elements."""
    return x if x.stride(-1) == 1 else x.contiguous()


# oneDNN's matrix product, which torch itself calls for half precision only.
# `torch.ops.mkldnn._linear_pointwise` is what torch's compiler uses for linear layers with constant
# weights.


def onednn_available() -> bool:
    """Whether this build of torch has oneDNN, and `torch.backends.mkldnn` is enabled."""
    return _onednn_is_built() and bool(torch.backends.mkldnn.enabled)


@cache
def _onednn_is_built() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_full_precision() -> bool:
    """Whether float32 products have full precision; with less, torch itself calls oneDNN."""
    products: Any = torch.backends.mkldnn
    return products.matmul.fp32_precision not in ("bf16", "tf32")


def onednn_takes(tensor: Tensor) -> bool:
    """Whether oneDNN accepts a tensor: a float32 matrix on the CPU, row-major or column-major."""
    if tensor.dtype is not torch.float32 or tensor.dim() != 2 or tensor.device.type != "cpu":
        return False
    return tensor.layout is torch.strided and (by_rows(tensor) or by_columns(tensor))


def by_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def by_columns(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0]


def onednn_affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of tensors that `onednn_takes` accepts, b [out] or None; it has no derivative."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
