"""How a report names modes and derivatives."""

from typing import NamedTuple

from hoglib import _arguments as arguments


class Mode(NamedTuple):
    """One way to a second derivative: the outer of two levels over the inner one."""

    key: str  # "fr"
    title: str  # "forward-over-reverse"

    @property
    def outer(self) -> str:
        return self.key[0]

    @property
    def inner(self) -> str:
        return self.key[1]


MODES = {
    key: Mode(key, title)
    for key, title in {
        "rr": "reverse-over-reverse",
        "fr": "forward-over-reverse",
        "rf": "reverse-over-forward",
        "ff": "forward-over-forward",
    }.items()
}
ORDINALS = {1: "first", 2: "second", 3: "third"}


def modes(value: object) -> tuple[Mode, ...] | None:
    """The modes that were asked for, by either name; None for all that are offered."""
    if value is None:
        return None
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple | set | frozenset) or not given:
        raise arguments.WrongType(
            f"modes: expected some of {', '.join(MODES)}, got {arguments.describe(value)}."
        )
    known = {mode.title: mode for mode in MODES.values()} | MODES
    for name in given:
        if name not in known:
            raise arguments.WrongValue(f"modes: expected some of {', '.join(known)}; got {name!r}.")
    return tuple(mode for mode in MODES.values() if {mode.key, mode.title} & set(given))


def orders(value: object) -> tuple[int, ...]:
    """The orders that were asked for, first and second where nothing was."""
    given = (1, 2) if value is None else (value,) if isinstance(value, int) else value
    if not isinstance(given, list | tuple | range | set) or not given:
        raise arguments.WrongType(
            f"orders: expected some of 1, 2, 3, got {arguments.describe(value)}."
        )
    for order in given:
        if isinstance(order, bool) or order not in ORDINALS:
            raise arguments.WrongValue(f"orders: expected some of 1, 2, 3, got {order!r}.")
    return tuple(sorted(set(given)))
