"""Functions of upper packages that lower ones call: imports run downward, so each is registered here as
its package is imported.

    provide("compile_level", run_level)              # in hoglib.capture
    provided("compile_level")(run, tensors)          # in hoglib._core.remat.recomputation
"""

from collections.abc import Callable
from typing import Any

_PROVIDED: dict[str, Callable[..., Any]] = {}


def provide(name: str, function: Callable[..., Any]) -> None:
    """Registers a function under a name."""
    _PROVIDED[name] = function


def provided(name: str) -> Callable[..., Any]:
    """The function of this name."""
    return _PROVIDED[name]
