"""What autocast and the dtypes of half a word ask of a composite."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """In float32, if x is in half precision: what many small terms are summed in."""
    return x.float() if x.dtype in HALVES else x


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x, and would change the dtype of such a tensor."""
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Products of matrices in the dtype of x, whatever autocast says."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()
