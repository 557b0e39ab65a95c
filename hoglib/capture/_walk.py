"""What a function reaches besides its arguments, by the names that its code reads.

From the function to its closure, globals, defaults, `self`, and on through attributes, containers and
methods. An attribute is followed if some code on the way has its name: so a training loop that a
method's `self` also holds is left alone.
"""

from collections import defaultdict, deque
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib.capture._contents import IMPLICIT, NEVER, Step, inside, is_plain, names_in

_MAX_SEEN = 200_000
_OPAQUE = (ModuleType, CodeType, torch.Generator, torch.jit.ScriptFunction)


class Edge(NamedTuple):
    """How one object is reached from another; both by their places in the walk."""

    holder: int
    step: Step
    held: int


class Fact(NamedTuple):
    """A number, a text or a class that an object holds."""

    holder: int
    step: Step
    value: Any


class Walk:
    """The objects that are reached from `root`, in the order of their distance, and how."""

    def __init__(self, root: Any, everything: bool = False) -> None:
        self.objects: list[Any] = []
        self.edges: list[Edge] = []
        self.facts: list[Fact] = []
        self.places: dict[int, int] = {}
        self._names = set(IMPLICIT)
        self._everything = everything
        self._unread: dict[str, list[tuple[int, Step, Any]]] = defaultdict(list)
        self._classes: set[type] = set()
        self._left = deque([self.add(root)])
        while self._left and len(self.objects) < _MAX_SEEN:
            self._enter(self._left.popleft())

    def add(self, value: Any) -> int:
        """The place of an object that was not reached."""
        self.places[id(value)] = len(self.objects)
        self.objects.append(value)  # alive, so that no other gets its id
        return self.places[id(value)]

    def _enter(self, place: int) -> None:
        value = self.objects[place]
        if isinstance(value, FunctionType):
            self._read(names_in(value.__code__))
        elif type(value) not in self._classes:
            self._classes.add(type(value))
            self._read(self._names_of_methods(self._names))
        for held, step, name in inside(value):
            if name is None or self._everything or name in self._names:
                self._hold(place, step, held)
            else:
                self._unread[name].append((place, step, held))

    def _hold(self, place: int, step: Step, held: Any) -> None:
        if is_plain(held):
            self.facts.append(Fact(place, step, held))
            return
        if isinstance(held, _OPAQUE):
            return
        known = self.places.get(id(held))
        if known is None:
            known = self.add(held)
            if not isinstance(held, Tensor):
                self._left.append(known)
        self.edges.append(Edge(place, step, known))

    def _read(self, names: set[str]) -> None:
        """Code on the way reads these names, and with them what methods of these names read."""
        while names := names - self._names:
            self._names |= names
            for name in names:
                for found in self._unread.pop(name, ()):
                    self._hold(*found)
            names = self._names_of_methods(names)

    def _names_of_methods(self, called: set[str]) -> set[str]:
        found: set[str] = set()
        bases = {base for kind in self._classes for base in kind.__mro__}
        for base in bases - {nn.Module, object}:
            for name in called & vars(base).keys() - NEVER:
                method = vars(base)[name]
                code = getattr(getattr(method, "fget", method), "__code__", None)
                if isinstance(code, CodeType):
                    found |= names_in(code)
        return found
