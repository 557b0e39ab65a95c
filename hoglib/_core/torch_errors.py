"""Errors of the stand-ins: of the type that torch raises, with a message that explains itself."""

from torch import Tensor

from hoglib._core import validation
from hoglib.errors import ArgumentTypeError, ArgumentValueError


class Refused(ArgumentValueError, RuntimeError):
    """A ValueError that is a RuntimeError to those who expect torch's own; it explains itself."""


class RefusedType(ArgumentTypeError, RuntimeError):
    """A TypeError that is a RuntimeError to those who expect torch's own; it explains itself."""


def real(what: str, value: Tensor) -> Tensor:
    """A tensor of a real floating-point dtype."""
    try:
        return validation.real(what, value)
    except ArgumentTypeError as error:
        if not isinstance(value, Tensor):  # torch too has a TypeError for it
            raise
        raise RefusedType(str(error)) from None
