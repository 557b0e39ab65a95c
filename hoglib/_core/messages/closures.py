"""The objects that a callable reaches besides its arguments: through its closure, defaults, globals,
attributes and ``self``.

:class:`ClosureWalker` traverses them, by the :func:`references` from object to object. Recomputation
uses it to refuse captured tensors, which would silently get no gradient; guards of captured graphs and
the state of a curvature operator use it, too. A :class:`Scope` limits a traversal.
"""

import dis
import sys
import sysconfig
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.runtime.source_location import is_user_file
from hoglib._core.torch_api import pytree
from hoglib.errors import ArgumentValueError

Step = Callable[[Any], Any]  # holder -> the object that it holds
FOUND = (Tensor, nn.Module, torch.Generator)  # the types that a traversal looks for
NEVER = {"__init__", "extra_repr", "reset_parameters", "__repr__"}  # methods that no forward calls
# names that Python or torch reads implicitly
IMPLICIT = {
    "__call__", "__wrapped__", "__iter__", "__getitem__", "__len__", "__getattr__", "forward",
    "_parameters", "_buffers", "_modules",
}  # fmt: skip


class Reference(NamedTuple):
    """A reference from an object, its holder, to a value.

    value: The object that the holder refers to.
    step: Reads the value from the holder; guards call it again later.
    label: The last part of a path, for messages: "weight", "[0]", ".weight".
    how: A verb for messages, "closes over"; "": the label continues the holder's path.
    name: The name of an attribute; None for other references.
    if_read: For an attribute of a class or function: followed if code reads it, or by Scope.methods.
    """

    value: Any
    step: Step
    label: str = ""
    how: str = ""
    name: str | None = None
    if_read: bool = False


class Attributes:
    """The ``__dict__`` of an object; its items are references by name. It may grow after the visit.

    fields: The ``__dict__``.
    if_read: See :class:`Reference`.
    """

    __slots__ = ("fields", "if_read")

    def __init__(self, fields: dict[str, Any], if_read: bool = False) -> None:
        self.fields, self.if_read = fields, if_read


@final
@dataclass(frozen=True)
class Scope:
    """The limits of a traversal.

    Args:
        unread_attributes: Follow attributes of objects also if no visited code reads their names.
        methods: Follow methods and class attributes also if no visited code reads their names.
        modules: Enter ``nn.Module`` objects, as any others.
        libraries: Follow globals of functions in installed libraries, except torch and hoglib: their
            functions compute from their arguments.
        depth: The largest number of steps from the root.
    """

    unread_attributes: bool = False
    methods: bool = False
    modules: bool = True
    libraries: bool = True
    depth: float = float("inf")


READ = Scope()  # for guards: all paths along which the code may read a tensor
ALL = Scope(unread_attributes=True, methods=True)
STATE = Scope(modules=False, libraries=False)  # for operators, which read a module as a whole
# Deep enough for a partial of a method of an object that has a list of configs with tensors.
HELD = Scope(unread_attributes=True, modules=False, libraries=False, depth=8)
HELD_BY_MODULE = Scope(unread_attributes=True, modules=False, libraries=False, depth=3)

_MAX_OBJECTS = 200_000  # ends a traversal that has run into a large data structure of the user


class Capture(NamedTuple):
    """A tensor, module or generator that a traversal found; str() is a phrase for messages.

    how: A verb, "closes over".
    path: "self.layers[0]".
    value: The object.
    via: The way to the holder, "closes over `helper`, which ".
    """

    how: str
    path: str
    value: Any
    via: str = ""

    def __str__(self) -> str:
        return f"{self.via}{self.how} `{self.path}`"


def held(value: object) -> Iterator[Capture]:
    """The tensors, modules and generators that any object holds, nearest first."""
    return _search_captures(value, "holds", "value", HELD)


def held_tensors(value: object) -> list[Tensor]:
    """The tensors that an object holds, also in its modules; none for a tensor itself."""
    if is_plain(value) or isinstance(value, Tensor | torch.Generator):
        return []
    if isinstance(value, list | tuple | dict):
        leaves = pytree.leaves(value)
        # a short cut: a traversal takes ten times as long
        if all(isinstance(x, Tensor) or is_plain(x) for x in leaves):
            return [x for x in leaves if isinstance(x, Tensor)]
    found = [capture.value for capture in held(value)]
    if isinstance(value, nn.Module):
        found = [value, *found]
    tensors: dict[int, Tensor] = {}
    for one in found:
        parts = [one]
        if isinstance(one, nn.Module):
            others = (capture.value for capture in unregistered(one))
            parts = [*one.parameters(), *one.buffers(), *others]
        tensors |= {id(x): x for x in parts if isinstance(x, Tensor)}
    return list(tensors.values())


def with_tensors(value: object, tensors: Sequence[Tensor | None]) -> Any:
    """A copy of an object with `tensors` in place of its :func:`held_tensors`; None keeps a tensor."""
    memo: dict[int, Any] = {}
    for x, y in zip(held_tensors(value), tensors, strict=True):
        memo[id(x)] = x if y is None else y
        if isinstance(x, nn.Parameter) and y is not None and not isinstance(y, nn.Parameter):
            memo[id(x)] = nn.Parameter(y, x.requires_grad)
    # Copy closures by hand, the innermost first: deepcopy does not copy functions.
    for one in reversed(ClosureWalker(value, HELD).objects):
        if (
            isinstance(one, FunctionType)
            and one.__closure__
            and all(map(is_filled, one.__closure__))
        ):
            cells = [CellType(deepcopy(c.cell_contents, memo)) for c in one.__closure__]
            fields = one.__code__, one.__globals__, one.__name__, one.__defaults__, tuple(cells)
            memo[id(one)] = FunctionType(*fields)
    return deepcopy(value, memo)


def generators(*values: Any) -> list[torch.Generator]:
    """The generators that the objects hold."""
    found = (capture.value for value in values for capture in held(value))
    return [value for value in found if isinstance(value, torch.Generator)]


def refuse(what: str, fn: Callable[..., Any], advice: str = "") -> list[torch.Generator]:
    """Raises if ``fn`` reaches a tensor or a module; otherwise returns the generators in reach."""
    is_object = not isinstance(fn, FunctionType | MethodType | partial)
    found = []
    for capture in _search_captures(fn, "is an object with" if is_object else "", "self", HELD):
        if isinstance(capture.value, torch.Generator):
            found.append(capture.value)
            continue
        raise ArgumentValueError(
            f"{what}: expected a function that is given every tensor and module as an argument, got "
            f"`{name_of(fn)}`, which {capture} ({_short(capture.value)}); backward would read it "
            f"again, changed or not, and give it no gradient. {advice or _advise(what, fn, capture)}"
        )
    return found


def refuse_hidden(what: str, module: nn.Module) -> None:
    """Raises if a module holds unregistered modules or trainable tensors."""
    for capture in unregistered(module):
        if _is_trainable(capture.value):
            raise ArgumentValueError(
                f"{what}: expected a module whose parameters and submodules are registered, "
                f"got {type(module).__name__}, which {capture} ({_short(capture.value)}) "
                "unregistered; it would get no gradient, without an error. Use nn.Parameter, "
                "nn.ParameterList or nn.ModuleList."
            )


def unregistered(module: nn.Module) -> Iterator[Capture]:
    """The unregistered tensors, modules and generators that a module holds."""
    known = {id(value) for value in (*module.parameters(), *module.buffers(), *module.modules())}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _MODULE_FIELDS or is_plain(value):
                continue
            path = f"{prefix}.{name}" if prefix else name
            for capture in _search_captures(value, "holds", path, HELD_BY_MODULE):
                if id(capture.value) not in known:
                    yield capture


def name_of(fn: Callable[..., Any]) -> str:
    """A name for messages: a function's name, a module's class, or an object's repr."""
    if isinstance(fn, partial):
        return name_of(fn.func)
    kind: Any = type(fn)
    by_class = isinstance(fn, nn.Module) or kind.__repr__ is object.__repr__
    name = getattr(fn, "__qualname__", None) or (kind.__name__ if by_class else repr(fn))
    return str(name).rpartition("<locals>.")[2]


def owner_of(func: Callable[..., Any]) -> Any:
    """The module, object or code that a function belongs to, for memos: it stays the same object if the
    user creates the function anew for each call."""
    if isinstance(func, nn.Module):  # a short cut: hasattr(module, "__wrapped__") is slow
        return func
    if isinstance(func, partial):
        return owner_of(func.func)
    if hasattr(func, "__wrapped__"):
        return owner_of(func.__wrapped__)
    owner = getattr(func, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        return owner
    return getattr(func, "__code__", None) or getattr(type(func).__call__, "__code__", func)


# The attributes of every module, and two lists of registered parameters in an RNN.
_MODULE_FIELDS = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}


def _is_trainable(value: object) -> bool:
    """Whether a value is a module or a leaf tensor that requires grad."""
    if isinstance(value, Tensor):
        return value.requires_grad and value.is_leaf
    return isinstance(value, nn.Module)


def _short(value: object) -> str:
    """A description of a tensor or module for messages."""
    if isinstance(value, Tensor):
        return validation.describe(value)
    return f"the module {type(value).__name__}"


def _advise(what: str, fn: Callable[..., Any], capture: Capture) -> str:
    """Advice on how to make the captured object an argument."""
    if isinstance(fn, MethodType) and isinstance(fn.__self__, nn.Module):
        name = fn.__name__
        if name in ("forward", "__call__"):
            return f"Write `{what}(module)(...)`, which makes its parameters arguments."
        return f"Write `{what}(lambda module, *args: module.{name}(*args))(module, ...)`."
    root = capture.path.partition(".")[0].partition("[")[0]
    name = root if root.isidentifier() and root not in ("self", "args") else "value"
    return f"Make it an argument: `{what}(lambda {name}, *args: ...)({name}, ...)`."


def _search_captures(root: object, how: str, path: str, scope: Scope) -> Iterator[Capture]:
    """The tensors, modules and generators in reach of `root`, as Captures with their paths."""
    if isinstance(root, FOUND):
        yield Capture(how, path, root)
        return
    walk = ClosureWalker(root, scope)
    for place in walk.found:
        yield walk.describe(place, how, path)


class Edge(NamedTuple):
    """A reference between two visited objects, as indices in ``ClosureWalker.objects``.

    holder: The index of the referring object.
    step: Reads the held object from the holder.
    held: The index of the held object.
    """

    holder: int
    step: Step
    held: int


class Fact(NamedTuple):
    """A number, string or class that a visited object holds.

    holder: The index of the object.
    step: Reads the value from the holder.
    value: The value at the visit.
    """

    holder: int
    step: Step
    value: Any


@final
class ClosureWalker:
    """The objects that a root reaches, breadth-first, and the references between them.

    An attribute is followed if the code of a visited function or class contains its name: a loss that
    is a method of a training loop does not lead to all attributes of the loop. A :class:`Scope` may
    follow more attributes.

    Attributes:
        objects: The visited objects; the root is the first.
        found: The indices in ``objects`` of tensors, modules and generators other than the root.
        edges: All references between visited objects.
        facts: The numbers, strings and classes that visited objects hold.
        places: id of an object -> its index in ``objects``.
    """

    def __init__(self, root: object, scope: Scope = READ) -> None:
        self.objects: list[Any] = []
        self.found: list[int] = []
        self.edges: list[Edge] = []
        self.facts: list[Fact] = []
        self.places: dict[int, int] = {}
        self._scope = scope
        # index -> (holder, reference), at first visit
        self._first: dict[int, tuple[int, Reference]] = {}
        self._depths = {0: 0}  # index -> number of steps from the root
        self._names = set(IMPLICIT)  # names in the code of visited objects
        # name -> references by this name, followed once code contains the name
        self._unread: dict[str, list[tuple[int, Reference]]] = defaultdict(list)
        self._bases: set[type] = {nn.Module, object}  # visited classes, with their bases
        # name -> methods of visited classes
        self._methods: dict[str, list[Any]] = defaultdict(list)
        self._queue = deque([self.add(root)])
        while self._queue and len(self.objects) < _MAX_OBJECTS:
            self._enter(self._queue.popleft())

    def add(self, value: object) -> int:
        """Adds an object to ``objects``, and returns its index."""
        self.places[id(value)] = len(self.objects)
        self.objects.append(value)  # keeps the object alive, so its id stays unique
        return self.places[id(value)]

    def describe(self, place: int, how: str, path: str) -> Capture:
        """The Capture of a visited object; ``how`` and ``path`` describe the root."""
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
        """Visits an object: reads its code, then follows its references."""
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
        """Whether to follow a reference now; otherwise it waits until code contains its name."""
        if reference.name is None or reference.name in self._names:
            return True
        return self._scope.methods if reference.if_read else self._scope.unread_attributes

    def _follow(self, place: int, reference: Reference) -> None:
        """Records the value of a reference, and queues it for a visit."""
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
        """Follows attributes with these names, then the names in the methods with these names."""
        while names := names - self._names:
            self._names |= names
            for name in names & self._unread.keys():
                for place, reference in self._unread.pop(name):
                    self._follow(place, reference)
            methods = [x for name in names for x in self._methods.get(name, ())]
            names = set().union(*map(_names_in_method, methods))

    def _add_class(self, kind: type) -> set[str]:
        """Records the methods of a class; returns the names in the code of methods that code calls."""
        found: set[str] = set()
        for base in set(kind.__mro__) - self._bases:
            self._bases.add(base)
            for name, method in vars(base).items():
                if name not in NEVER:
                    self._methods[name].append(method)
                    if name in self._names:
                        found |= _names_in_method(method)
        return found


def _names_in_method(method: object) -> set[str]:
    code = getattr(getattr(method, "fget", method), "__code__", None)
    return set(names_in(code)) if isinstance(code, CodeType) else set()


_NOT_RECORDED = (ModuleType, CodeType, torch.jit.ScriptFunction)  # types without a visit


# References of one object: closure, defaults, globals that code reads, items, attributes, methods.

_MAX_ITEMS = 1000  # follow at most so many items of a container
_MAX_PLAIN = 64  # guards compare the numbers and strings of containers with at most so many items


# Objects of hoglib.capture hold tensors of earlier calls; only their attribute `fn` is followed.
_KEEP_TENSORS = "hoglib.capture."
_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)
_attributes = attrgetter("__dict__")


def references(value: object, libraries: bool = True) -> Iterator[Reference]:
    """The references of an object: closure, items of a container, attributes, methods."""
    if isinstance(value, FunctionType):
        yield from _of_function(value, libraries)
    elif isinstance(value, Attributes):
        for name, item in list(value.fields.items()):
            yield Reference(item, itemgetter(name), f".{name}", "", name, value.if_read)
    elif type(value).__module__.startswith(_KEEP_TENSORS):
        if hasattr(value, "fn"):
            yield Reference(value.fn, attrgetter("fn"))
    elif isinstance(value, MethodType):
        yield Reference(value.__self__, attrgetter("__self__"), "self", "is a method of")
        yield Reference(value.__func__, attrgetter("__func__"))
    elif isinstance(value, partial):
        yield Reference(value.func, attrgetter("func"))
        how, names = "has the partial argument", [f"args[{i}]" for i in range(len(value.args))]
        yield from _of_arguments(value, "args", how, names)
        yield from _of_arguments(value, "keywords", how)
    elif isinstance(value, _CONTAINERS):
        yield from _of_container(value)
    else:
        yield from _of_object(value)


def _of_function(fn: FunctionType, libraries: bool) -> Iterator[Reference]:
    """References to a function's closure, defaults, attributes, and globals that it reads."""
    code = fn.__code__
    for i, (name, cell) in enumerate(zip(code.co_freevars, fn.__closure__ or (), strict=True)):
        if is_filled(cell):
            yield Reference(cell.cell_contents, partial(_closed_over, i), name, "closes over")
    names = code.co_varnames[: code.co_argcount][-len(fn.__defaults__ or ()) :]
    yield from _of_arguments(fn, "__defaults__", "has the default", names)
    yield from _of_arguments(fn, "__kwdefaults__", "has the default")
    if vars(fn):
        yield Reference(Attributes(vars(fn), if_read=True), _attributes, "", "has the attribute")
    if _is_searched(code.co_filename, fn.__module__, libraries):
        yield from _of_globals(fn)


_FIELDS = {key: attrgetter(key) for key in ("__defaults__", "__kwdefaults__", "args", "keywords")}


def _of_arguments(
    holder: object, field: str, how: str, names: tuple[str, ...] | list[str] = ()
) -> Iterator[Reference]:
    """References to defaults or partial arguments, one for each; if all are plain, one to the tuple."""
    values = getattr(holder, field)
    if is_plain(values):  # a tuple of numbers, or None
        yield Reference(values, _FIELDS[field])
        return
    yield Reference(len(values), partial(_length, field))
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    for (key, value), name in zip(pairs, names or values, strict=True):
        yield Reference(value, partial(_item_of, field, key), name, how)


def _of_globals(fn: FunctionType) -> Iterator[Reference]:
    """References to globals that a function reads; for `module.x` a reference to x."""
    found = set()
    for names in _global_reads(fn.__code__):
        value: Any = fn.__globals__.get(names[0], _MISSING)
        module, used = None, 1
        while isinstance(value, ModuleType) and used < len(names):
            module, value, used = value, getattr(value, names[used], _MISSING), used + 1
        if value is _MISSING or names[:used] in found:
            continue
        found.add(names[:used])
        # an attribute may be read through a local variable: `m = module`, then `m.w`
        if isinstance(value, ModuleType) and _is_users_module(value):
            for name in sorted(names_in(fn.__code__) & vars(value).keys()):
                yield _at_global((*names[:used], name), vars(value)[name])
        elif module is None or _is_users_module(module) or isinstance(value, FOUND):
            yield _at_global(names[:used], value)


def _at_global(path: tuple[str, ...], value: object) -> Reference:
    return Reference(value, partial(_global, path), ".".join(path), "reads the global")


def _of_container(value: Any) -> Iterator[Reference]:
    """References to the items of a container; to plain items only if the container is small."""
    if isinstance(value, list | tuple) and type(value) not in (list, tuple):
        yield from _of_sequence(value)
        return
    try:
        pairs = list(value.items() if isinstance(value, Mapping) else enumerate(value))[:_MAX_ITEMS]
    except Exception:  # the user's class may raise anything
        return
    unordered = isinstance(value, set | frozenset)
    own_items = isinstance(value, dict) and type(value).__getitem__ is not dict.__getitem__
    for i, (key, item) in enumerate(pairs):
        if is_plain(item) and (unordered or len(pairs) > _MAX_PLAIN or not is_plain(key)):
            continue
        # A step by position holds no reference to the key, which may be freed.
        step: Step = itemgetter(key) if is_plain(key) and not unordered else partial(_nth, i)
        if isinstance(step, itemgetter) and own_items:  # the class's `[key]` may make a new object
            step = partial(_stored, dict, key)
        yield Reference(item, step, f"[{key!r}]")


def _of_sequence(value: list[Any] | tuple[Any, ...]) -> Iterator[Reference]:
    """References to the items of a subclass of list or tuple; its own `__iter__` may raise."""
    base: Any = list if isinstance(value, list) else tuple
    for i, item in enumerate(list(base.__iter__(value))[:_MAX_ITEMS]):
        if not is_plain(item) or base.__len__(value) <= _MAX_PLAIN:
            yield Reference(item, partial(_stored, base, i), f"[{i}]")


def _of_object(value: object) -> Iterator[Reference]:
    """References to an object's attributes, and to members of its classes in the user's code."""
    fields = getattr(value, "__dict__", None)
    if isinstance(fields, dict):
        yield Reference(Attributes(fields), _attributes)
    for i, kind in enumerate(type(value).__mro__):
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield Reference(getattr(value, name), attrgetter(name), f".{name}", "", name)
        if kind is not object and _is_users_class(kind):
            for name, item in list(vars(kind).items()):
                if name in IMPLICIT or not (name in NEVER or name.startswith("__")):
                    getter = isinstance(item, property)
                    step = partial(_getter if getter else _of_class, i, name)
                    found: Any = item.fget if getter else item
                    yield Reference(found, step, f".{name}", "", name, True)


_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    BuiltinFunctionType, type, Enum,
)  # fmt: skip


def is_plain(value: Any) -> bool:
    """Whether guards compare a value by ==: a number, string or class, or a tuple of plain values."""
    if type(value) in _PLAIN or isinstance(value, _PLAIN):  # the first test is faster
        return True
    # The methods of tuple: a subclass may override them, and raise.
    small = isinstance(value, tuple) and tuple.__len__(value) <= _MAX_PLAIN
    return small and all(map(is_plain, tuple.__iter__(value)))


def stored_items(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> int:
    """The number of items of a container, even if a subclass overrides __len__."""
    if isinstance(value, dict):
        return dict.__len__(value)
    return list.__len__(value) if isinstance(value, list) else tuple.__len__(value)


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """The names that code and its nested functions look up, and strings that getattr may take."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return frozenset(found)


@lru_cache(maxsize=4096)
def _global_reads(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The globals that code reads, each with its chain of attributes: ("F", "relu")."""
    chains: list[list[str]] = []
    growing = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains.append([instruction.argval])
            growing = True
        elif growing and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains[-1].append(instruction.argval)
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            growing = False
    reads = [tuple(names) for names in chains]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            reads.extend(_global_reads(constant))
    return tuple(dict.fromkeys(reads))


_INSTALLED = tuple({path for key, path in sysconfig.get_paths().items() if key.endswith("lib")})
_MISSING = object()


@lru_cache(maxsize=4096)
def _is_searched(file: str, module: str | None, libraries: bool) -> bool:
    """Whether to follow the globals that functions of this file and module read."""
    if file.startswith("<"):  # code typed at a prompt or generated has no file
        return (module or "torch").partition(".")[0] not in ("torch", "hoglib")
    return is_user_file(file) and (libraries or not file.startswith(_INSTALLED))


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or (module is not None and _is_users_module(module))


_is_user_file = lru_cache(maxsize=4096)(is_user_file)


def _is_users_module(module: ModuleType) -> bool:
    return _is_user_file(getattr(module, "__file__", None) or "<")


def is_filled(cell: CellType) -> bool:
    """Whether the variable in a cell of a closure is assigned."""
    return cell != CellType()  # an empty cell equals only empty cells


# Steps from a holder to a value. Guards keep the steps, and call them at each call of a graph.


def _closed_over(i: int, fn: Any) -> Any:
    return fn.__closure__[i].cell_contents


def _length(field: str, value: object) -> int:
    return len(getattr(value, field))


def _item_of(field: str, key: object, value: object) -> Any:
    return getattr(value, field)[key]


def _stored(base: Any, i: int, value: Any) -> Any:
    return base.__getitem__(value, i)


def _nth(i: int, value: Any) -> Any:
    return list(value.values() if isinstance(value, Mapping) else value)[i]


def _global(path: tuple[str, ...], fn: Callable[..., Any]) -> Any:
    value = fn.__globals__[path[0]]
    for name in path[1:]:
        value = getattr(value, name)
    return value


def _of_class(i: int, name: str, value: object) -> Any:
    return vars(type(value).__mro__[i])[name]


def _getter(i: int, name: str, value: object) -> Any:
    return vars(type(value).__mro__[i])[name].fget
