"""The penalties by name: each registers itself where it is defined.

    @register(REAL, term="|g_n|^2 / 2 at real")
    def r1(critic, real, *args, **options): ...

`hoglib.GradientPenalty`, `hoglib.penalties.check` and the tests find it here.
"""

import inspect
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeVar

from hoglib.errors import ArgumentValueError
from hoglib.penalties.options import OPTION_NAMES

F = TypeVar("F", bound=Callable[..., Any])
REAL, FAKE, BOTH = ("real",), ("fake",), ("real", "fake")


class Kind(NamedTuple):
    """A penalty, and what has to be known to call it by its name."""

    function: Callable[..., Any]
    sets: tuple[str, ...]  # of samples, that it is given before other arguments
    needs: str = ""  # the further argument without which it cannot be called
    without: Collection[str] = ()  # options of penalties that it does not have
    term: str = ""  # in words, for `check`; empty for a penalty that is not checked
    draw: Literal["", "between", "noise"] = ""  # how it draws its points, if they are not its sets
    # of (critic, points, points): the same, not drawing
    at_points: Callable[..., Any] | None = None

    @property
    def keywords(self) -> list[str]:
        """Its keyword arguments: its own, and the options of penalties."""
        parameters = inspect.signature(self.function).parameters.values()
        own = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        return own + [name for name in OPTION_NAMES if name not in self.without]


KINDS: dict[str, Kind] = {}


def register(sets: tuple[str, ...], **facts: Any) -> Callable[[F], F]:
    """Make a penalty known by the name of its function, which it returns as it is.

    sets: REAL, FAKE or BOTH. facts: further ones of :class:`Kind`.
    """

    def registered(function: F) -> F:
        KINDS[function.__name__] = Kind(function, sets, **facts)
        return function

    return registered


def kind_named(name: Any, known: Collection[str] = KINDS.keys()) -> str:
    """The name of a kind, also with hyphens, or an error with the closest one that is known."""
    wanted = str(name).replace("-", "_")
    if wanted in known:
        return wanted
    close = get_close_matches(wanted, known, n=1)
    raise ArgumentValueError(
        f"kind: expected one of {', '.join(known)}; got {name!r}"
        + (f", did you mean {close[0]!r}?" if close else ".")
    )
