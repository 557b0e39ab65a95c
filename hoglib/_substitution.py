"""Parameters that stay in a module's places until its derivatives have been taken.

`torch.func.functional_call` puts a module's own parameters back when the call returns. What backward
runs again (a checkpointed block, a reversible layer, a solver that has the module on ctx) would then
find those, and differentiate by the wrong ones without an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn


class Places:
    """What stood in modules' places, so that it can be put back."""

    def __init__(self) -> None:
        self._was: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        for store in (module._parameters, module._buffers, vars(module)):
            if name in store:
                self._was.setdefault((id(store), name), (store, store[name]))
                store[name] = value
                return
        raise AttributeError(f"{type(module).__name__} has no {name}")

    def restore(self, model: nn.Module | None = None) -> None:
        """Put back what stood in the places of one model, or everything."""
        ours = {
            id(store)
            for module in (() if model is None else model.modules())
            for store in (module._parameters, module._buffers, vars(module))
        }
        for (store_id, name), (store, value) in list(self._was.items()):
            if model is None or store_id in ours:
                store[name] = value
                del self._was[store_id, name]

    def standing(self) -> "Standing":
        """What stands in the places now."""
        return [(store, name, store[name]) for (_, name), (store, _) in self._was.items()]


Standing = list[tuple[dict[str, Any], str, Any]]
_LINGERING: ContextVar[Places | None] = ContextVar("lingering", default=None)


@contextmanager
def lingering() -> Iterator[Places]:
    """Inside, a model keeps the parameters that it was called with until the next call, or the end."""
    outer = _LINGERING.get()
    if outer is not None:
        yield outer
        return
    places = Places()
    token = _LINGERING.set(places)
    try:
        yield places
    finally:
        _LINGERING.reset(token)
        places.restore()


@contextmanager
def standing_again(standing: Standing) -> Iterator[None]:
    """What stood in the places when a graph was made, for what its backward runs again."""
    before = [(store, name, store[name]) for store, name, _ in standing]
    try:
        for store, name, value in standing:
            store[name] = value
        yield
    finally:
        for store, name, value in before:
            store[name] = value


def places_that_linger() -> Places | None:
    return _LINGERING.get()


def substitute(places: Places, model: nn.Module, values: dict[str, Tensor]) -> None:
    """Put tensors in the places that their qualified names say."""
    for name, value in values.items():
        path, _, own_name = name.rpartition(".")
        places.put(model.get_submodule(path), own_name, value)
