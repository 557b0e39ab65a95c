"""What a callable reaches besides its arguments: closure, defaults, globals, attributes, ``self``.

One traversal, :class:`ClosureWalker`, answers this for recomputation (a tensor that a function does
not get as an argument would receive no gradient, without an error), for the guards of captured graphs,
and for the state that a curvature operator depends on. A :class:`Scope` says how far it goes.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hoglib._core import validation
from hoglib._core.references import (
    FOUND,
    IMPLICIT,
    NEVER,
    Attributes,
    Reference,
    Step,
    is_plain,
    names_in,
    references,
)
from hoglib.errors import ArgumentValueError


@final
@dataclass(frozen=True)
class Scope:
    """How far a traversal goes.

    Args:
        unread_attributes: Attributes of objects are followed also if no code on the way reads them.
        methods: Methods and class attributes are followed also if no code on the way reads them.
        modules: ``nn.Module`` objects are entered, as other objects are.
        libraries: Globals of functions of installed libraries are followed too (but for those of torch
            and hoglib, whose functions compute with their arguments).
        depth: The largest number of steps from the root.
    """

    unread_attributes: bool = False
    methods: bool = False
    modules: bool = True
    libraries: bool = True
    depth: float = float("inf")


READ = Scope()  # what the code may read: guards need every path to a tensor
ALL = Scope(unread_attributes=True, methods=True)
STATE = Scope(modules=False, libraries=False)  # whose modules are read as a whole
# Deep enough for a partial of a method of an object with a list of configs of tensors.
HELD = Scope(unread_attributes=True, modules=False, libraries=False, depth=8)
HELD_BY_MODULE = Scope(unread_attributes=True, modules=False, libraries=False, depth=3)

_MAX_OBJECTS = 200_000


class Capture(NamedTuple):
    """A tensor, module or generator, and how it is reached."""

    how: str  # "closes over"
    path: str  # "self.layers[0]"
    value: Any
    via: str = ""  # "closes over `helper`, which "

    def __str__(self) -> str:
        return f"{self.via}{self.how} `{self.path}`"


def held(value: Any) -> Iterator[Capture]:
    """The tensors, modules and generators inside any object, nearest first."""
    return _search(value, "holds", "value", HELD)


def refuse(what: str, fn: Any) -> list[torch.Generator]:
    """Raises if ``fn`` reaches a tensor or a module; otherwise returns the generators it reaches."""
    is_object = not isinstance(fn, FunctionType | MethodType | partial)
    generators = []
    for capture in _search(fn, "is an object with" if is_object else "", "self", HELD):
        if isinstance(capture.value, torch.Generator):
            generators.append(capture.value)
            continue
        raise ArgumentValueError(
            f"{what}: expected a function that is given every tensor and module as an argument, got "
            f"`{name_of(fn)}`, which {capture} ({_short(capture.value)}); it would get no gradient, "
            f"without an error. {_advice(what, fn, capture)}"
        )
    return generators


def refuse_hidden(what: str, module: nn.Module) -> None:
    """Raises if a module holds modules or trainable tensors that it has not registered."""
    for capture in unregistered(module):
        if _is_trainable(capture.value):
            raise ArgumentValueError(
                f"{what}: expected a module whose parameters and submodules are registered, "
                f"got {type(module).__name__}, which {capture} ({_short(capture.value)}) "
                "unregistered; it would get no gradient, without an error. Use nn.Parameter, "
                "nn.ParameterList or nn.ModuleList."
            )


def unregistered(module: nn.Module) -> Iterator[Capture]:
    """The tensors, modules and generators that a module holds besides those it has registered."""
    known = {id(value) for value in (*module.parameters(), *module.buffers(), *module.modules())}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _MODULE_FIELDS or is_plain(value):
                continue
            path = f"{prefix}.{name}" if prefix else name
            for capture in _search(value, "holds", path, HELD_BY_MODULE):
                if id(capture.value) not in known:
                    yield capture


def name_of(fn: Any) -> str:
    """The name of a function for messages; of a module its class, of another object its own repr."""
    if isinstance(fn, partial):
        return name_of(fn.func)
    kind: Any = type(fn)
    by_class = isinstance(fn, nn.Module) or kind.__repr__ is object.__repr__
    name = getattr(fn, "__qualname__", None) or (kind.__name__ if by_class else repr(fn))
    return str(name).rpartition("<locals>.")[2]


def owner_of(func: Callable[..., Any]) -> Any:
    """The module, object or code of a function: the same object in each call, also for a function that
    is created anew for each call."""
    if isinstance(func, nn.Module):  # which would take long to say that it has no __wrapped__
        return func
    if isinstance(func, partial):
        return owner_of(func.func)
    if hasattr(func, "__wrapped__"):
        return owner_of(func.__wrapped__)
    owner = getattr(func, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        return owner
    return getattr(func, "__code__", None) or getattr(type(func).__call__, "__code__", func)


# What every module has, and an LSTM's list of its own parameters.
_MODULE_FIELDS = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}


def _is_trainable(value: Any) -> bool:
    """Whether a value is a module or a leaf tensor that requires grad."""
    if isinstance(value, Tensor):
        return value.requires_grad and value.is_leaf
    return isinstance(value, nn.Module)


def _short(value: Any) -> str:
    """A few words on a tensor or module."""
    if isinstance(value, Tensor):
        return validation.describe(value)
    return f"the module {type(value).__name__}"


def _advice(what: str, fn: Any, capture: Capture) -> str:
    """How to make what was found an argument."""
    if isinstance(fn, MethodType) and isinstance(fn.__self__, nn.Module):
        name = fn.__name__
        if name in ("forward", "__call__"):
            return f"Write `{what}(module)(...)`, which makes its parameters arguments."
        return f"Write `{what}(lambda module, *args: module.{name}(*args))(module, ...)`."
    root = capture.path.partition(".")[0].partition("[")[0]
    name = root if root.isidentifier() and root not in ("self", "args") else "value"
    return f"Make it an argument: `{what}(lambda {name}, *args: ...)({name}, ...)`."


def _search(root: Any, how: str, path: str, scope: Scope) -> Iterator[Capture]:
    """The tensors, modules and generators that are reached, with a description of the way there."""
    if isinstance(root, FOUND):
        yield Capture(how, path, root)
        return
    walk = ClosureWalker(root, scope)
    for place in walk.found:
        yield walk.describe(place, how, path)


class Edge(NamedTuple):
    """How one object is reached from another; both by their places in the traversal."""

    holder: int
    step: Step
    held: int


class Fact(NamedTuple):
    """A number, a text or a class that an object holds."""

    holder: int
    step: Step
    value: Any


@final
class ClosureWalker:
    """The objects that are reached from a root, breadth-first, and how.

    An attribute is followed if some code on the way has its name: so the training loop that the
    ``self`` of a method also holds is left alone. A :class:`Scope` may ask for more.

    Attributes:
        objects: The objects that were reached; the root is the first.
        found: The indices in ``objects`` of tensors, modules and generators other than the root.
        edges: All references between them.
        facts: The numbers, texts and classes that they hold.
        places: id of an object -> its index in ``objects``.
    """

    def __init__(self, root: Any, scope: Scope = READ) -> None:
        self.objects: list[Any] = []
        self.found: list[int] = []
        self.edges: list[Edge] = []
        self.facts: list[Fact] = []
        self.places: dict[int, int] = {}
        self._scope = scope
        self._first: dict[int, tuple[int, Reference]] = {}  # how each object was reached first
        self._depths = {0: 0}
        self._names = set(IMPLICIT)  # that some code reads
        self._unread: dict[str, list[tuple[int, Reference]]] = defaultdict(list)
        self._bases: set[type] = {nn.Module, object}  # classes on the way, and theirs
        self._methods: dict[str, list[Any]] = defaultdict(list)  # of these, by name
        self._queue = deque([self.add(root)])
        while self._queue and len(self.objects) < _MAX_OBJECTS:
            self._enter(self._queue.popleft())

    def add(self, value: Any) -> int:
        """Adds an object that was not reached, and returns its place."""
        self.places[id(value)] = len(self.objects)
        self.objects.append(value)  # kept alive, so that no other object gets its id
        return self.places[id(value)]

    def describe(self, place: int, how: str, path: str) -> Capture:
        """How an object is reached; ``how`` and ``path`` describe the root."""
        value, via, steps = self.objects[place], "", []
        while place:
            place, reference = self._first[place]
            steps.append(reference)
        for reference in reversed(steps):
            if reference.how:
                via += f"{how} `{path}`, which " if how else ""
                how, path = reference.how, reference.label
            else:
                path += reference.label
        return Capture(how, path.removeprefix("."), value, via)

    def _enter(self, place: int) -> None:
        """Follows the references of an object."""
        value = self.objects[place]
        if isinstance(value, FunctionType):
            self._read(names_in(value.__code__))
        elif type(value) not in self._bases:
            self._read(self._add_class(type(value)))
        for reference in references(value, self._scope.libraries):
            if self._is_followed(reference):
                self._follow(place, reference)
            elif reference.name is not None:
                self._unread[reference.name].append((place, reference))

    def _is_followed(self, reference: Reference) -> bool:
        """Whether a reference is followed already, before more code is read."""
        if reference.name is None or reference.name in self._names:
            return True
        return self._scope.methods if reference.if_read else self._scope.unread_attributes

    def _follow(self, place: int, reference: Reference) -> None:
        """Records what a reference leads to, and enters it later."""
        held = reference.value
        if is_plain(held):
            self.facts.append(Fact(place, reference.step, held))
            return
        if isinstance(held, _NOT_RECORDED):
            return
        known = self.places.get(id(held))
        if known is None:
            depth = self._depths[place] + (type(held) is not Attributes)
            if depth > self._scope.depth:
                return
            known = self.add(held)
            self._first[known], self._depths[known] = (place, reference), depth
            found = type(held) is not FunctionType and isinstance(held, FOUND)
            if found:
                self.found.append(known)
            if not found or (self._scope.modules and isinstance(held, nn.Module)):
                self._queue.append(known)
        self.edges.append(Edge(place, reference.step, known))

    def _read(self, names: Set[str]) -> None:
        """Follows the attributes of these names, and of those that methods of these names read."""
        while names := names - self._names:
            self._names |= names
            for name in names & self._unread.keys():
                for place, reference in self._unread.pop(name):
                    self._follow(place, reference)
            methods = [x for name in names for x in self._methods.get(name, ())]
            names = set().union(*map(_names_in_method, methods))

    def _add_class(self, kind: type) -> set[str]:
        """Adds the methods of a class, and returns the names that those read which are called."""
        found: set[str] = set()
        for base in set(kind.__mro__) - self._bases:
            self._bases.add(base)
            for name, method in vars(base).items():
                if name not in NEVER:
                    self._methods[name].append(method)
                    if name in self._names:
                        found |= _names_in_method(method)
        return found


def _names_in_method(method: Any) -> set[str]:
    code = getattr(getattr(method, "fget", method), "__code__", None)
    return set(names_in(code)) if isinstance(code, CodeType) else set()


_NOT_RECORDED = (ModuleType, CodeType, torch.jit.ScriptFunction)
