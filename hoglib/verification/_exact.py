"""Matrix products at full precision: TF32 and reduced-precision sums off, and on again afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PRECISIONS: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,
    torch.backends.cudnn.rnn,
    torch.backends.mkldnn.matmul,
    torch.backends.mkldnn.conv,
    torch.backends.mkldnn.rnn,
)
_REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@contextmanager
def exact_products() -> Iterator[None]:
    """float32 matrix products and convolutions are computed in float32 inside."""
    settings = [(backend, "fp32_precision", "ieee") for backend in _PRECISIONS]
    settings += [(torch.backends.cuda.matmul, name, False) for name in _REDUCED]
    before = [(backend, name, getattr(backend, name)) for backend, name, _ in settings]
    try:
        for backend, name, value in settings:
            setattr(backend, name, value)
        yield
    finally:
        for backend, name, value in before:
            setattr(backend, name, value)
