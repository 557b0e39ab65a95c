"""Copies of what a function is given, and whether two tensors are the same."""

from typing import Any

import torch
from torch import Tensor


def fresh(value: Any) -> Any:
    """A copy of what a run may change: a tensor's values, the state of a random generator."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.clone_state() if isinstance(value, torch.Generator) else value


def same(a: Tensor, b: Any) -> bool:
    """The same values of one shape, dtype, layout and device; NaN is the same as NaN."""
    if not isinstance(b, Tensor) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if a.layout is not b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    floating = a.is_floating_point() or a.is_complex()
    return bool(torch.equal(a.nan_to_num(), b.nan_to_num()) if floating else torch.equal(a, b))
