"""Errors of stand-ins: also a RuntimeError, which torch raises for the same argument."""

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
