"""Kernels of torch that only its private operations reach: fused attention for the CPU, and the
switches between vendors' kernels and torch's own.

Private torch API, as `torch_internals`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

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
