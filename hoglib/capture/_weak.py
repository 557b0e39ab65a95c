"""A function that others keep alive: its graphs do not, and find their tensors through it."""

from collections.abc import Callable
from typing import Any
from weakref import ref

from hoglib import _arguments as arguments


class Weak:
    """Holds a function, module or bound method for as long as it, or the method's object, lives."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        of = holder(fn)
        self._name = None if of is fn else fn.__func__.__name__  # type: ignore[attr-defined]
        self._ref = ref(of)

    @property
    def fn(self) -> Any:
        """The function."""
        found = self._ref()
        if found is None:
            raise arguments.NoSecondDerivative(
                "backward of a compiled product: expected the function that was differentiated to be "
                "there still, and it is gone. Keep a name for it until backward has run."
            )
        return found if self._name is None else getattr(found, self._name)


def holder(fn: Any) -> Any:
    """What a function lives as long as: for a bound method, made anew for each call, its object."""
    owner = getattr(fn, "__self__", None)
    func: Any = getattr(fn, "__func__", None)
    bound = owner is not None and func is not None and not isinstance(owner, type)
    return owner if bound and getattr(type(owner), func.__name__, None) is func else fn
