"""Matrix products at full precision: TF32 and reduced-precision sums off, and on again afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BACKENDS: Any = torch.backends  # its members are made at run time
_PRECISIONS: tuple[Any, ...] = (
    _BACKENDS.cuda.matmul,
    _BACKENDS.cudnn.conv,
    _BACKENDS.cudnn.rnn,
    _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv,
    _BACKENDS.mkldnn.rnn,
)
_REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@contextmanager
def exact_products() -> Iterator[None]:
    """float32 matrix products and convolutions are computed in float32 inside."""
    settings: list[tuple[Any, str, Any]] = [
        (backend, "fp32_precision", "ieee") for backend in _PRECISIONS
    ]
    settings += [(_BACKENDS.cuda.matmul, name, False) for name in _REDUCED]
    before = [(backend, name, getattr(backend, name)) for backend, name, _ in settings]
    try:
        for backend, name, value in settings:
            setattr(backend, name, value)
        yield
    finally:
        for backend, name, value in before:
            setattr(backend, name, value)
