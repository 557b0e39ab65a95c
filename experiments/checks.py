"""Checks of options. Their types are checked by the command line, which reads them from annotations."""

from collections.abc import Collection, Sequence
from math import isfinite

from torch import Tensor

from hoglib.errors import ArgumentValueError, NonFiniteError


def at_least(name: str, value: int, minimum: int) -> int:
    """Return an integer of at least ``minimum``."""
    if value < minimum:
        raise ArgumentValueError(
            f"{name}: expected an integer of at least {minimum}, got {value}; set {name} to "
            f"{minimum} or more."
        )
    return value


def positive(name: str, value: float, advice: str = "") -> float:
    """Return a finite number greater than 0."""
    if not (isfinite(value) and value > 0):
        raise ArgumentValueError(
            f"{name}: expected a finite number greater than 0, got {value}. {advice}".rstrip()
        )
    return value


def learning_rate(name: str, value: float) -> float:
    """Return a finite number greater than 0, with advice for learning rates."""
    return positive(name, value, "Typical values are 0.001 to 0.1.")


def not_negative(name: str, value: float) -> float:
    """Return a finite number of at least 0."""
    if not (isfinite(value) and value >= 0):
        raise ArgumentValueError(f"{name}: expected a finite number of at least 0, got {value}.")
    return value


def fraction(name: str, value: float, advice: str) -> float:
    """Return a number from 0 to 1, without 1."""
    if not 0 <= value < 1:
        raise ArgumentValueError(
            f"{name}: expected a number of at least 0 and below 1, got {value}; {advice}"
        )
    return value


def one_of(name: str, value: str, known: Collection[str]) -> str:
    """Return one of the known words."""
    if value not in known:
        raise ArgumentValueError(f"{name}: expected one of {', '.join(known)}; got {value!r}.")
    return value


def hidden_widths(values: Sequence[int] | None, default: Sequence[int]) -> list[int]:
    """Return the widths of hidden layers, at least 1 each; the default for None."""
    return [at_least("hidden", width, 1) for width in (default if values is None else values)]


def finite(name: str, value: Tensor, advice: str) -> Tensor:
    """Return a scalar tensor that is neither NaN nor infinite."""
    if not value.detach().isfinite():
        raise NonFiniteError(f"{name}: expected a finite number, got {value.item()}. {advice}")
    return value
