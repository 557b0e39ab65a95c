"""Tensors of the tests: fixed random numbers."""

import torch
from torch import Tensor

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
C128, C64 = torch.complex128, torch.complex64


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Normally distributed numbers, the same at every call and others for another shape or seed.

    They are drawn in double precision, so that those of another dtype are these, rounded.
    """
    generator = torch.Generator().manual_seed(seed + sum(31**i * n for i, n in enumerate(shape)))
    drawn_in = C128 if dtype.is_complex else F64
    return torch.randn(shape, dtype=drawn_in, generator=generator).to(dtype)
