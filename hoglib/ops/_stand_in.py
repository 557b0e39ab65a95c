"""The table of torch operations with missing or wrong second derivatives, and of their replacements.

    torch call  ->  an op of hoglib with torch's signature

An op registers itself. `hoglib.second_order()`, `hoglib env` and docs/reference/torch-versions.md read
the table:

    @stands_in_for(torch.cdist, lacks="no double backward", issue="83510")
    def cdist(x1, x2, p=2.0): ...

If torch has a second function with another signature for a computation, an adapter (`torch_...`) is
registered under the row's name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from hoglib._core.torch_api.torch_version import TORCH_VERSION, Version

P = ParamSpec("P")
R = TypeVar("R")


class StandIn(NamedTuple):
    """A torch operation with a missing or wrong second derivative, and its replacement.

    Attributes:
        name: The operation, or several of one kind.
        lacks: The defect of torch's derivative, in words.
        modes: The modes of differentiation with this defect: "rr" (reverse over reverse), "fr"
            (forward over reverse), "rf", "ff".
        replaces: Torch callables -> the functions that run in their place.
        refuses: Torch callables without a replacement: a call that needs a gradient raises.
        instead: Advice for the refused callables.
        issue: The number of the issue of pytorch/pytorch.
        since: The first torch version with the defect, as far as measured.
        until: For modes that newer torch versions have right: mode -> the last version with the
            defect.
        device: The type of device with the defect.
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
        """The modes in which the installed torch has the defect."""
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
    """A decorator: the function runs in place of these torch callables.

    originals: torch callables; None stands for one that the installed torch lacks.
    name: the name of the table's row. Default: the function's name.
    facts: further fields of :class:`StandIn`; `modes` is EVERY by default. If several functions share a
        row, the first one gives the facts.
    """

    def register(op: Callable[P, R]) -> Callable[P, R]:
        key = name or op.__name__
        row = StandIn(key, **{"modes": EVERY} | facts) if facts else TABLE[key]
        new = {original: op for original in originals if original is not None}
        TABLE[key] = row._replace(replaces={**row.replaces, **new})
        return op

    return register
