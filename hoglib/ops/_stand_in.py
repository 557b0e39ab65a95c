"""The torch operations whose second derivative is missing or wrong, and what stands in for them.

    torch call  ->  an op of hoglib with the same signature

An op registers itself, and `hoglib.second_order()`, `hoglib env` and the page of torch's versions read
the table:

    @stands_in_for(torch.cdist, lacks="no double backward", issue="83510")
    def cdist(x1, x2, p=2.0): ...

Where torch names the same computation twice with two signatures, the second one is an adapter
(`torch_...`), registered under the name of the row.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from hoglib._core.torch_api.torch_version import TORCH_VERSION, Version

P = ParamSpec("P")
R = TypeVar("R")


class StandIn(NamedTuple):
    """A torch operation whose second derivative is missing or wrong, and its replacement.

    Attributes:
        name: The operation, or several of one kind.
        lacks: What is missing or wrong in torch.
        modes: The modes of differentiation in which it is: of "rr" (reverse over reverse), "fr"
            (forward over reverse), "rf" and "ff".
        replaces: From torch callables to the functions that run in their place.
        refuses: Torch callables without a replacement: a call that needs a gradient raises.
        instead: For those, what to write instead.
        issue: The number of the issue of pytorch/pytorch.
        since: The first torch version it was measured on.
        until: From modes that newer torch versions have right to the last one that has not.
        device: The type of device on which the derivative is missing or wrong.
    """

    name: str
    lacks: str
    modes: tuple[str, ...]
    replaces: Mapping[Any, Callable[..., Any]] = {}
    refuses: tuple[Any, ...] = ()
    instead: str = ""
    issue: str = ""
    since: Version = (2, 11)
    until: Mapping[str, Version] = {}
    device: str = "cpu"

    @property
    def needed(self) -> tuple[str, ...]:
        """The modes for which the installed torch needs it."""
        if self.since > TORCH_VERSION:
            return ()
        return tuple(m for m in self.modes if self.until.get(m, TORCH_VERSION) >= TORCH_VERSION)


NO_DOUBLE_BACKWARD = "no double backward, no forward mode"
NO_FORWARD = "no forward mode"
SILENT = ", without an error"
OVER_FORWARD = f"derivatives of its forward mode are wrong{SILENT}"
EVERY, OVER, IN_FORWARD = ("rr", "fr", "rf", "ff"), ("rf", "ff"), ("fr", "rf", "ff")  # modes

TABLE: dict[str, StandIn] = {}


def stands_in_for(
    *originals: Any, name: str | None = None, **facts: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers the function below as what runs in place of these callables of torch.

    originals: None is a callable that the installed torch does not have.
    name: of the row of the table. Default: that of the function.
    facts: What :class:`StandIn` says of the row, by default of every mode. The functions of one row
    give them once, at the first.
    """

    def register(op: Callable[P, R]) -> Callable[P, R]:
        key = name or op.__name__
        row = StandIn(key, **{"modes": EVERY} | facts) if facts else TABLE[key]
        new = {original: op for original in originals if original is not None}
        TABLE[key] = row._replace(replaces={**row.replaces, **new})
        return op

    return register
