"""Errors of stand-ins: also a RuntimeError, which torch raises for the same argument."""

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.errors import ArgumentTypeError, ArgumentValueError


class TorchValueError(ArgumentValueError, RuntimeError):
    """An ArgumentValueError where torch raises RuntimeError."""


class TorchTypeError(ArgumentTypeError, RuntimeError):
    """An ArgumentTypeError where torch raises RuntimeError."""


def real(what: str, value: Tensor) -> Tensor:
    """The argument, a tensor of a real floating-point dtype."""
    try:
        return validation.real(what, value)
    except ArgumentTypeError as error:
        if not isinstance(value, Tensor):  # torch raises TypeError too
            raise
        raise TorchTypeError(str(error)) from None


def indices(what: str, value: Tensor, expected: str = "int64 or int32") -> None:
    if value.dtype not in (torch.int64, torch.int32):
        raise TorchTypeError(
            f"{what}: expected {expected}, got {validation.describe(value)}; use `.long()`."
        )


def dtype_of(like: str, other: Tensor, what: str, value: Tensor) -> None:
    """The argument has the dtype of another one."""
    if value.dtype != other.dtype:
        raise TorchTypeError(
            f"{what}: expected {other.dtype} as in {like}, got {value.dtype}; convert one of them."
        )
