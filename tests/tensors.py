"""Tensors of the tests: fixed random numbers, and functions compared by value and gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
C128, C64 = torch.complex128, torch.complex64


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Normally distributed numbers, the same at every call and others for another shape or seed.

    They are drawn in double precision, so that those of another dtype are these, rounded.
    """
    generator = torch.Generator().manual_seed(seed + sum(31**i * n for i, n in enumerate(shape)))
    drawn_in = C128 if dtype.is_complex else F64
    return torch.randn(shape, dtype=drawn_in, generator=generator).to(dtype)


def value_and_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """The value, and the gradients of its weighted sum by each tensor; the weights are fixed."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    weights = torch.arange(1, y.numel() + 1, dtype=F64).sin().reshape(y.shape) + 1.5
    return [y.detach(), *torch.autograd.grad(y, leaves, weights.to(y.dtype))]


def assert_same_value_and_gradients(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *tensors: Tensor, **options: Any
) -> None:
    """The options are those of `torch.testing.assert_close`."""
    a, b = (value_and_gradients(function, *tensors) for function in (ours, theirs))
    for x, y in zip(a, b, strict=True):
        assert_close(x, y, **options)
