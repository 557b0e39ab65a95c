"""The options of `verify`: checked once, and passed on in one frozen object."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple, final

import torch

from hoglib._core import validation
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.verification.report import MODES, ORDINALS, Mode

# The least tolerance in a dtype other than float64: central differences are no more accurate there.
NARROW = {torch.float32: 3e-2, torch.float16: 0.2, torch.bfloat16: 0.2}
# What central differences leave in float32 where their error was measured: no constant stands for it.
MEASURED = {torch.float32: (1e-4, 1e-3)}
# Of the gradient: an iterative solver leaves as much, and a second derivative that is less changes no
# product with it.
NATURAL = 1e-5


class Bounds(NamedTuple):
    """|derivative - difference| <= rtol |difference| + atol min(1, largest difference).

    natural: what is less than this share of the values does no harm, however much of it is missing.
    measured: whether the rounding of the derivative is that of the differences, as it was measured,
    and not a share of the largest element.
    """

    atol: float
    rtol: float
    natural: float = 0.0
    measured: bool = False

    def closer(self, dtype: torch.dtype) -> "Bounds | None":
        """The bounds for a second look in a dtype: those of `in_dtype` hide elements that are small
        beside the largest one. None where there are none."""
        if dtype not in MEASURED or self.measured:
            return None
        atol, rtol = MEASURED[dtype]
        if self.atol > NARROW[dtype]:  # asked for
            return None
        return Bounds(atol, rtol, self.natural, measured=True)


@final
@dataclass(frozen=True)
class Options:
    """What `verify` was asked for. Its arguments say what each field means."""

    orders: tuple[int, ...]
    modes: tuple[Mode, ...] | None  # None: all that the function offers
    surrogate: bool
    full: bool
    eps: float | None
    bounds: Bounds
    nondet_tol: float

    def __post_init__(self) -> None:
        if self.eps is not None and not 0.0 < validation.number("eps", self.eps) <= 1.0:
            raise ArgumentValueError(f"eps: expected a number in (0, 1], got {self.eps}.")
        bounds = {"atol": self.bounds.atol, "rtol": self.bounds.rtol}
        tolerances = {**bounds, "nondet_tol": self.nondet_tol}
        for name, value in tolerances.items():
            if validation.number(name, value, minimum=0.0) == inf:
                raise ArgumentValueError(f"{name}: expected a finite number, got {value}.")

    def in_dtype(self, dtype: torch.dtype) -> "Options":
        """The options with the tolerances that differences in a dtype allow."""
        least = NARROW.get(dtype, 0.0)
        atol, rtol, natural, _ = self.bounds
        return replace(self, bounds=Bounds(max(atol, least), max(rtol, least), natural))


def parse_modes(value: Any) -> tuple[Mode, ...] | None:
    """The modes, given by their short or full names; None for all that are offered."""
    if value is None:
        return None
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple | set | frozenset) or not given:
        raise ArgumentTypeError(
            f"modes: expected some of {', '.join(MODES)}, got {validation.describe(value)}."
        )
    known = {mode.title: mode for mode in MODES.values()} | MODES
    for name in given:
        if name not in known:
            raise ArgumentValueError(f"modes: expected some of {', '.join(known)}; got {name!r}.")
    return tuple(mode for mode in MODES.values() if {mode.key, mode.title} & set(given))


def parse_orders(value: Any) -> tuple[int, ...]:
    """The orders, ascending; first and second by default."""
    given = (1, 2) if value is None else (value,) if isinstance(value, int) else value
    if not isinstance(given, list | tuple | range | set) or not given:
        raise ArgumentTypeError(
            f"orders: expected some of 1, 2, 3, 4, got {validation.describe(value)}."
        )
    for order in given:
        if isinstance(order, bool) or order not in ORDINALS:
            raise ArgumentValueError(f"orders: expected some of 1, 2, 3, 4, got {order!r}.")
    return tuple(sorted(set(given)))
