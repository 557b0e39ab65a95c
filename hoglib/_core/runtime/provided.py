"""Functions of upper packages that lower ones call. Imports run downward, so an upper package registers
its function here when it is imported.

    provide("compile_level", run_level)              # in hoglib.capture
    provided("compile_level")(run, tensors)          # in hoglib._core.remat.recomputation
"""

from collections.abc import Callable
from typing import Any

_PROVIDED: dict[str, Callable[..., Any]] = {}  # name -> function


def provide(name: str, function: Callable[..., Any]) -> None:
    """Register a function under a name."""
    _PROVIDED[name] = function


def provided(name: str) -> Callable[..., Any]:
    """The function registered under a name; KeyError if its package is not imported."""
    return _PROVIDED[name]
