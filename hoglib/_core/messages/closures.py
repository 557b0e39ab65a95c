"""What a callable reaches besides its arguments: closure, defaults, globals, attributes, ``self``.

One traversal, :class:`ClosureWalker`, answers this for recomputation (a tensor that a function does
not get as an argument would receive no gradient, without an error), for the guards of captured graphs,
and for the state that a curvature operator depends on. A :class:`Scope` says how far it goes. It
follows the :func:`references` from object to object, at the end.
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

Step = Callable[[Any], Any]
FOUND = (Tensor, nn.Module, torch.Generator)  # what a search through references is for
NEVER = {"__init__", "extra_repr", "reset_parameters", "__repr__"}
IMPLICIT = {
    "__call__", "__wrapped__", "__iter__", "__getitem__", "__len__", "__getattr__", "forward",
    "_parameters", "_buffers", "_modules",
}  # fmt: skip


class Reference(NamedTuple):
    """What an object holds."""

    value: Any
    step: Step  # from the holder to the value
    label: str = ""  # "weight", "[0]", ".weight"
    how: str = ""  # "closes over"; empty for what continues the path of its holder
    name: str | None = None  # of an attribute
    if_read: bool = False  # an attribute of a class or a function


class Attributes:
    """The attributes of an object, which are read by name and may grow in number."""

    __slots__ = ("fields", "if_read")

    def __init__(self, fields: dict[str, Any], if_read: bool = False) -> None:
        self.fields, self.if_read = fields, if_read


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

_MAX_OBJECTS = 200_000  # at which a search ends that has met a data structure of the user's


class Capture(NamedTuple):
    """A tensor, module or generator, and how it is reached."""

    how: str  # "closes over"
    path: str  # "self.layers[0]"
    value: Any
    via: str = ""  # "closes over `helper`, which "

    def __str__(self) -> str:
        return f"{self.via}{self.how} `{self.path}`"


def held(value: object) -> Iterator[Capture]:
    """The tensors, modules and generators inside any object, nearest first."""
    return _search_captures(value, "holds", "value", HELD)


def held_tensors(value: object) -> list[Tensor]:
    """The tensors inside any object that is none itself, those of modules too."""
    if is_plain(value) or isinstance(value, Tensor | torch.Generator):
        return []
    if isinstance(value, list | tuple | dict):
        leaves = pytree.leaves(value)
        if all(
            isinstance(x, Tensor) or is_plain(x) for x in leaves
        ):  # the search takes ten times as long
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
    """A copy of an object with others in the place of its :func:`held_tensors`; None keeps one."""
    memo: dict[int, Any] = {}
    for x, y in zip(held_tensors(value), tensors, strict=True):
        memo[id(x)] = x if y is None else y
        if isinstance(x, nn.Parameter) and y is not None and not isinstance(y, nn.Parameter):
            memo[id(x)] = nn.Parameter(y, x.requires_grad)
    # the innermost first: `deepcopy` takes functions for atoms
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
    """The generators inside any objects."""
    found = (capture.value for value in values for capture in held(value))
    return [value for value in found if isinstance(value, torch.Generator)]


def refuse(what: str, fn: Callable[..., Any]) -> list[torch.Generator]:
    """Raises if ``fn`` reaches a tensor or a module; otherwise returns the generators it reaches."""
    is_object = not isinstance(fn, FunctionType | MethodType | partial)
    found = []
    for capture in _search_captures(fn, "is an object with" if is_object else "", "self", HELD):
        if isinstance(capture.value, torch.Generator):
            found.append(capture.value)
            continue
        raise ArgumentValueError(
            f"{what}: expected a function that is given every tensor and module as an argument, got "
            f"`{name_of(fn)}`, which {capture} ({_short(capture.value)}); it would get no gradient, "
            f"without an error. {_advise(what, fn, capture)}"
        )
    return found


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
            for capture in _search_captures(value, "holds", path, HELD_BY_MODULE):
                if id(capture.value) not in known:
                    yield capture


def name_of(fn: Callable[..., Any]) -> str:
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


def _is_trainable(value: object) -> bool:
    """Whether a value is a module or a leaf tensor that requires grad."""
    if isinstance(value, Tensor):
        return value.requires_grad and value.is_leaf
    return isinstance(value, nn.Module)


def _short(value: object) -> str:
    """A few words on a tensor or module."""
    if isinstance(value, Tensor):
        return validation.describe(value)
    return f"the module {type(value).__name__}"


def _advise(what: str, fn: Callable[..., Any], capture: Capture) -> str:
    """How to make what was found an argument."""
    if isinstance(fn, MethodType) and isinstance(fn.__self__, nn.Module):
        name = fn.__name__
        if name in ("forward", "__call__"):
            return f"Write `{what}(module)(...)`, which makes its parameters arguments."
        return f"Write `{what}(lambda module, *args: module.{name}(*args))(module, ...)`."
    root = capture.path.partition(".")[0].partition("[")[0]
    name = root if root.isidentifier() and root not in ("self", "args") else "value"
    return f"Make it an argument: `{what}(lambda {name}, *args: ...)({name}, ...)`."


def _search_captures(root: object, how: str, path: str, scope: Scope) -> Iterator[Capture]:
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

    def __init__(self, root: object, scope: Scope = READ) -> None:
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

    def add(self, value: object) -> int:
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


def _names_in_method(method: object) -> set[str]:
    code = getattr(getattr(method, "fget", method), "__code__", None)
    return set(names_in(code)) if isinstance(code, CodeType) else set()


_NOT_RECORDED = (ModuleType, CodeType, torch.jit.ScriptFunction)


# What one object holds: a closure, defaults, the globals that code reads, items, attributes, methods.

_MAX_ITEMS = 1000  # of one container
_MAX_PLAIN = 64  # items of a container whose numbers and texts are compared


# Its objects keep tensors of earlier calls; of these, only the function is followed.
_KEEP_TENSORS = "hoglib.capture."
_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)
_attributes = attrgetter("__dict__")


def references(value: object, libraries: bool = True) -> Iterator[Reference]:
    """What an object holds: a closure, the items of a container, attributes, methods."""
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
    """What a function closes over, its defaults, its attributes and the globals that it reads."""
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
    """Defaults or partial arguments, each under its name; plain ones as a whole."""
    values = getattr(holder, field)
    if is_plain(values):  # a tuple of numbers, or None
        yield Reference(values, _FIELDS[field])
        return
    yield Reference(len(values), partial(_length, field))
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    for (key, value), name in zip(pairs, names or values, strict=True):
        yield Reference(value, partial(_item_of, field, key), name, how)


def _of_globals(fn: FunctionType) -> Iterator[Reference]:
    """The globals that a function reads; of Python modules, the attributes that it reads."""
    found = set()
    for names in _global_reads(fn.__code__):
        value: Any = fn.__globals__.get(names[0], _MISSING)
        module, used = None, 1
        while isinstance(value, ModuleType) and used < len(names):
            module, value, used = value, getattr(value, names[used], _MISSING), used + 1
        if value is _MISSING or names[:used] in found:
            continue
        found.add(names[:used])
        if isinstance(value, ModuleType) and _is_users_module(value):  # `m = module`, then `m.w`
            for name in sorted(names_in(fn.__code__) & vars(value).keys()):
                yield _at_global((*names[:used], name), vars(value)[name])
        elif module is None or _is_users_module(module) or isinstance(value, FOUND):
            yield _at_global(names[:used], value)


def _at_global(path: tuple[str, ...], value: object) -> Reference:
    return Reference(value, partial(_global, path), ".".join(path), "reads the global")


def _of_container(value: Any) -> Iterator[Reference]:
    """The items of a container; plain ones only of a small one."""
    if isinstance(value, list | tuple) and type(value) not in (list, tuple):
        yield from _of_sequence(value)
        return
    try:
        pairs = list(value.items() if isinstance(value, Mapping) else enumerate(value))[:_MAX_ITEMS]
    except Exception:  # a class of the user's, whose items cannot be read
        return
    unordered = isinstance(value, set | frozenset)
    own_items = isinstance(value, dict) and type(value).__getitem__ is not dict.__getitem__
    for i, (key, item) in enumerate(pairs):
        if is_plain(item) and (unordered or len(pairs) > _MAX_PLAIN or not is_plain(key)):
            continue
        # A step keeps no key alive that is an object.
        step: Step = itemgetter(key) if is_plain(key) and not unordered else partial(_nth, i)
        if isinstance(step, itemgetter) and own_items:  # whose `[key]` may make a new object
            step = partial(_stored, dict, key)
        yield Reference(item, step, f"[{key!r}]")


def _of_sequence(value: list[Any] | tuple[Any, ...]) -> Iterator[Reference]:
    """The items of a list or tuple of another class, which may refuse to be iterated."""
    base: Any = list if isinstance(value, list) else tuple
    for i, item in enumerate(list(base.__iter__(value))[:_MAX_ITEMS]):
        if not is_plain(item) or base.__len__(value) <= _MAX_PLAIN:
            yield Reference(item, partial(_stored, base, i), f"[{i}]")


def _of_object(value: object) -> Iterator[Reference]:
    """The attributes of an object, and the members of its classes that are the user's."""
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
    """Whether a value is compared as it is: a number, a text, a class, a tuple of them."""
    if type(value) in _PLAIN or isinstance(value, _PLAIN):  # the first is faster
        return True
    # The methods of tuple itself: those of a subclass may raise.
    small = isinstance(value, tuple) and tuple.__len__(value) <= _MAX_PLAIN
    return small and all(map(is_plain, tuple.__iter__(value)))


def stored_items(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> int:
    """The number of items of a container, also where its class has another length, or none."""
    if isinstance(value, dict):
        return dict.__len__(value)
    return list.__len__(value) if isinstance(value, list) else tuple.__len__(value)


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """The names that code, and the functions inside it, look up, also by getattr."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return frozenset(found)


@lru_cache(maxsize=4096)
def _global_reads(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The globals that code reads, each with the attributes read of it: ("F", "relu")."""
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
    """Whether the globals that a function of this file and module reads are followed."""
    if file.startswith("<"):  # typed at a prompt, or generated
        return (module or "torch").partition(".")[0] not in ("torch", "hoglib")
    return is_user_file(file) and (libraries or not file.startswith(_INSTALLED))


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or (module is not None and _is_users_module(module))


_is_user_file = lru_cache(maxsize=4096)(is_user_file)


def _is_users_module(module: ModuleType) -> bool:
    return _is_user_file(getattr(module, "__file__", None) or "<")


def is_filled(cell: CellType) -> bool:
    """Whether the variable of a closure has been assigned."""
    return cell != CellType()  # an empty one, which equals empty ones alone


# Steps from a holder to what it holds, which guards keep and run again at each call.


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
