"""What a callable reaches besides its arguments: closures, globals, defaults, partial arguments, self.

`refuse` reports the tensors and modules that a function reaches, with the path to each: a Function that
runs it again in backward differentiates with respect to its arguments only. (`requires_grad` does not
tell: inside `torch.func` it is False.) `ClosureWalker` lists all objects that a function reaches, for
the guards of graphs.
"""

import dis
import inspect
import sys
import sysconfig
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from hoglib._core import validation
from hoglib._core.pytree import tensors_in
from hoglib._core.source_location import is_user_file
from hoglib.errors import ArgumentValueError, NoSecondDerivative

# Deep enough for a partial of a method of an object with a list of configs of tensors.
_MAX_DEPTH = 8
_MAX_ITEMS = 1000  # of one container
# Functions of installed libraries are assumed to compute with their arguments only.
_INSTALLED = tuple({path for key, path in sysconfig.get_paths().items() if key.endswith("lib")})
_OPAQUE = (str, bytes, int, float, complex, type, type(None), ModuleType, CodeType, torch.dtype)


class Capture(NamedTuple):
    """A tensor, module or generator, and how it is reached."""

    how: str  # "closes over"
    path: str  # "self.layers[0]"
    value: Any
    via: str = ""  # "closes over `helper`, which "

    def __str__(self) -> str:
        return f"{self.via}{self.how} `{self.path}`"


def held(value: Any) -> Iterator[Capture]:
    """The tensors, modules and generators inside any object."""
    yield from _of_value(value, "holds", "value", _MAX_DEPTH, set())


def hidden(module: nn.Module) -> Iterator[Capture]:
    """The modules and trainable tensors that a module holds and has not registered."""
    known = {id(value) for value in (*module.parameters(), *module.buffers(), *module.modules())}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _MODULE_FIELDS:
                continue
            where = f"{prefix}.{name}" if prefix else name
            for capture in _of_value(value, "holds", where, 3, set()):
                trainable = isinstance(capture.value, nn.Module) or (
                    isinstance(capture.value, Tensor)
                    and capture.value.requires_grad
                    and capture.value.is_leaf
                )
                if trainable and id(capture.value) not in known:
                    yield capture


def refuse(what: str, fn: Any) -> list[torch.Generator]:
    """Raise if `fn` reaches a tensor or a module; otherwise, the generators that it reaches."""
    generators = []
    for capture in _of_callable(fn, _MAX_DEPTH, set()):
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
    """Raise if a module holds parameters that it has not registered."""
    for capture in hidden(module):
        raise ArgumentValueError(
            f"{what}: expected a module whose parameters and parts are registered, got "
            f"{type(module).__name__}, which {capture} ({_short(capture.value)}) unregistered; it "
            "would get no gradient, without an error. Use nn.Parameter, nn.ParameterList or "
            "nn.ModuleList."
        )


def name_of(fn: Any) -> str:
    inner = fn.func if isinstance(fn, partial) else fn
    return str(getattr(inner, "__qualname__", type(inner).__name__)).rpartition("<locals>.")[2]


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return validation.describe(value)
    return f"the module {type(value).__name__}"


def _advice(what: str, fn: Any, capture: Capture) -> str:
    if isinstance(fn, MethodType) and isinstance(fn.__self__, nn.Module):
        name = fn.__name__
        if name in ("forward", "__call__"):
            return f"Write `{what}(module)(...)`, which makes its parameters arguments."
        return f"Write `{what}(lambda module, *args: module.{name}(*args))(module, ...)`."
    root = capture.path.partition(".")[0].partition("[")[0]
    name = root if root.isidentifier() and root not in ("self", "args") else "value"
    return f"Make it an argument: `{what}(lambda {name}, *args: ...)({name}, ...)`."


def _of_value(value: Any, how: str, path: str, depth: int, seen: set[int]) -> Iterator[Capture]:
    if isinstance(value, Tensor | nn.Module | torch.Generator):
        yield Capture(how, path, value)
    elif isinstance(value, _OPAQUE) or depth == 0 or id(value) in seen:
        return
    elif isinstance(value, FunctionType | MethodType | partial):
        for inner in _of_callable(value, depth - 1, seen):
            yield inner._replace(via=f"{how} `{path}`, which {inner.via}")
    else:
        seen.add(id(value))
        for inner_path, item in _items(value, path):
            yield from _of_value(item, how, inner_path, depth - 1, seen)


def _items(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", item) for key, item in list(value.items())[:_MAX_ITEMS]]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"{path}[{i}]", item) for i, item in enumerate(list(value)[:_MAX_ITEMS])]
    fields = dict(getattr(value, "__dict__", {}))
    slots = getattr(type(value), "__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        fields.setdefault(name, getattr(value, name, None))
    return [(f"{path}.{name}", item) for name, item in fields.items()]


def _of_callable(fn: Any, depth: int, seen: set[int]) -> Iterator[Capture]:
    if depth == 0 or id(fn) in seen or isinstance(fn, _OPAQUE):
        return
    if isinstance(fn, MethodType):
        yield from _of_value(fn.__self__, "is a method of", "self", depth, seen)
        yield from _of_callable(fn.__func__, depth - 1, seen)
        return
    if isinstance(fn, FunctionType):
        seen.add(id(fn))
        yield from _of_function(fn, depth - 1, seen)
        return
    if isinstance(fn, partial):
        seen.add(id(fn))
        yield from _of_callable(fn.func, depth - 1, seen)
        named = [*((f"args[{i}]", value) for i, value in enumerate(fn.args)), *fn.keywords.items()]
        for name, value in named:
            yield from _of_value(value, "has the partial argument", name, depth - 1, seen)
        return
    yield from _of_value(fn, "is an object with", "self", depth, seen)
    run = vars(type(fn)).get("__call__")
    if isinstance(run, FunctionType):
        yield from _of_callable(run, depth - 1, seen)


def _of_function(fn: FunctionType, depth: int, seen: set[int]) -> Iterator[Capture]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield from _of_value(value, "closes over", name, depth, seen)
    defaults = fn.__defaults__ or ()
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount][-len(defaults) or None :]
    for name, value in [*zip(names, defaults, strict=False), *(fn.__kwdefaults__ or {}).items()]:
        yield from _of_value(value, "has the default", name, depth, seen)
    if (fn.__module__ or "").partition(".")[0] == "hoglib" or _installed(fn.__code__):
        return
    for chain in _global_reads(fn.__code__):
        value, used = fn.__globals__.get(chain[0]), 1
        # `weights.w` of an imported Python module: only the attribute that is read counts.
        while isinstance(value, ModuleType) and used < len(chain):
            value, used = getattr(value, chain[used], None), used + 1
        yield from _of_value(value, "reads the global", ".".join(chain[:used]), depth, seen)


@lru_cache(maxsize=4096)
def _installed(code: CodeType) -> bool:
    return code.co_filename.startswith(_INSTALLED)


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
    reads = [tuple(chain) for chain in chains]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            reads.extend(_global_reads(constant))
    return tuple(dict.fromkeys(reads))


# The attributes of every module, and the lists in which an LSTM repeats its parameters.
_MODULE_FIELDS = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}


Step = Callable[[Any], Any]
Held = tuple[Any, Step, str | None]  # an object, how to get it from its holder, its name there
NEVER = {"__init__", "extra_repr", "reset_parameters", "__repr__"}
IMPLICIT = {
    "__call__", "__wrapped__", "__iter__", "__getitem__", "__len__", "__getattr__", "forward",
    "_parameters", "_buffers", "_modules",
}  # fmt: skip
_MAX_NUMBERS = 64
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    BuiltinFunctionType, type, Enum,
)  # fmt: skip
_attributes = attrgetter("__dict__")


def is_plain(value: Any) -> bool:
    """Whether a value is compared by value: a number, a string, a class, or a tuple of these."""
    if isinstance(value, tuple):
        return len(value) <= _MAX_NUMBERS and all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def names_in(code: CodeType) -> set[str]:
    """The names that code, and the functions defined in it, look up, also by getattr."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return found


def _globals_in(code: CodeType) -> set[str]:
    found = {
        str(i.argval)
        for i in dis.get_instructions(code)
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return found.union(*(_globals_in(x) for x in code.co_consts if isinstance(x, CodeType)))


def inside(value: Any) -> Iterator[Held]:
    """The objects that an object holds: closure, items, attributes, methods."""
    if isinstance(value, Attributes):
        for name, item in list(value.fields.items()):
            yield item, itemgetter(name), name
    elif type(value).__module__.startswith(_KEEP_TENSORS):
        if hasattr(value, "fn"):
            yield value.fn, attrgetter("fn"), None
    elif isinstance(value, FunctionType):
        yield from _inside_function(value)
    elif isinstance(value, MethodType):
        yield value.__self__, attrgetter("__self__"), None
        yield value.__func__, attrgetter("__func__"), None
    elif isinstance(value, partial):
        for name in ("func", "args", "keywords"):
            yield getattr(value, name), attrgetter(name), None
    elif isinstance(value, Mapping | list | tuple | deque):
        yield from _inside_container(value)
    else:
        yield from _inside_object(value)


def _inside_function(value: FunctionType) -> Iterator[Held]:
    for i, cell in enumerate(value.__closure__ or ()):
        if is_filled(cell):
            yield cell.cell_contents, partial(_closed_over, i), None
    for name in ("__defaults__", "__kwdefaults__"):
        yield getattr(value, name), attrgetter(name), None
    if vars(value):
        yield Attributes(vars(value)), _attributes, None
    if not is_user_file(value.__code__.co_filename):
        return
    read = names_in(value.__code__)
    for name in sorted(_globals_in(value.__code__) & value.__globals__.keys()):
        held = value.__globals__[name]
        if isinstance(held, ModuleType):
            if is_user_file(getattr(held, "__file__", None) or "<"):
                for attribute in sorted(read & vars(held).keys()):
                    yield vars(held)[attribute], partial(_in_module, name, attribute), None
        else:
            yield held, partial(_global, name), None


def _inside_container(value: Any) -> Iterator[Held]:
    try:
        pairs = list(value.items() if isinstance(value, Mapping) else enumerate(value))[:_MAX_ITEMS]
    except Exception:  # a class of the user, whose items cannot be read
        return
    for key, item in pairs:
        if is_plain(key) and (len(pairs) <= _MAX_NUMBERS or not is_plain(item)):
            yield item, itemgetter(key), None


def _inside_object(value: Any) -> Iterator[Held]:
    fields = getattr(value, "__dict__", None)
    if isinstance(fields, dict):
        yield Attributes(fields), _attributes, None
    for i, kind in enumerate(type(value).__mro__):
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield getattr(value, name), attrgetter(name), name
        if _is_users_class(kind):
            for name, item in list(vars(kind).items()):
                if name in IMPLICIT or not (name in NEVER or name.startswith("__")):
                    if isinstance(item, property):
                        yield item.fget, partial(_getter, i, name), name
                    else:
                        yield item, partial(_of_class, i, name), name


# Modules whose objects hold tensors of earlier calls.
_KEEP_TENSORS = ("hoglib.capture.", "hoglib._core.closures")


class Opaque:
    """A value that its holder passes to a graph as an input, so walks do not enter it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Attributes:
    """The attributes of an object, which are read by name; new ones may be added."""

    __slots__ = ("fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


def _is_users_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_user_file(file))


def is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _closed_over(i: int, fn: Any) -> Any:
    return fn.__closure__[i].cell_contents


def _global(name: str, fn: Any) -> Any:
    return fn.__globals__[name]


def _in_module(module: str, name: str, fn: Any) -> Any:
    return vars(fn.__globals__[module])[name]


def _of_class(i: int, name: str, value: Any) -> Any:
    return vars(type(value).__mro__[i])[name]


def _getter(i: int, name: str, value: Any) -> Any:
    return vars(type(value).__mro__[i])[name].fget


_MAX_SEEN = 200_000
_NOT_ENTERED = (ModuleType, CodeType, torch.Generator, torch.jit.ScriptFunction)


class Edge(NamedTuple):
    """How to get one object from another; both are indices in `ClosureWalker.objects`."""

    holder: int
    step: Step
    held: int


class Fact(NamedTuple):
    """A plain value that an object holds."""

    holder: int
    step: Step
    value: Any


class ClosureWalker:
    """The objects that are reached from `root`, in the order of their distance, and the paths to them.

    It goes from a function to its closure, globals, defaults and `self`, and on through attributes,
    containers and methods. It follows an attribute only if some code on the path contains its name, so
    it does not enter, say, a training loop that the `self` of a method also holds.
    """

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
        """Adds an object that was not reached; its index."""
        self.places[id(value)] = len(self.objects)
        self.objects.append(value)  # kept alive, so that no other object gets its id
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
        if isinstance(held, _NOT_ENTERED):
            return
        known = self.places.get(id(held))
        if known is None:
            known = self.add(held)
            if not isinstance(held, Tensor):
                self._left.append(known)
        self.edges.append(Edge(place, step, known))

    def _read(self, names: set[str]) -> None:
        """Follows attributes of these names, and of the names that methods of these names read."""
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


class Weak:
    """A weak reference to a function, a module or a bound method."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        of = holder(fn)
        self._name = None if of is fn else fn.__func__.__name__  # type: ignore[attr-defined]
        self._ref = ref(of)

    @property
    def fn(self) -> Any:
        """The function."""
        found = self._ref()
        if found is None:
            raise NoSecondDerivative(
                "backward of a compiled product: expected the function that was differentiated to be "
                "alive, but it was deleted. Keep a reference to it until backward has run."
            )
        return found if self._name is None else getattr(found, self._name)


def holder(fn: Any) -> Any:
    """The object whose lifetime a function has: of a bound method, the object that it is bound to."""
    owner = getattr(fn, "__self__", None)
    func: Any = getattr(fn, "__func__", None)
    bound = owner is not None and func is not None and not isinstance(owner, type)
    return owner if bound and getattr(type(owner), func.__name__, None) is func else fn


PLAIN = (bool, int, float, str, type(None))


class StateFingerprint:
    """The tensors, modules and settings that a loss depends on: `now()` changes when they change.

    Pointers and version counters are not sufficient, because fused optimizers, `.data` and NumPy write
    without changing them. A sum is not sufficient either: the gradient of a weight before a layer norm
    sums to zero, and so does a step along it. So the sum and the norm of each tensor are read.
    """

    def __init__(
        self, loss: Any, leaves: Callable[[], list[Tensor]], data: Callable[[], Any]
    ) -> None:
        self._leaves, self._data = leaves, data
        self._roots = list(_reached(loss))

    def now(self) -> list[Any]:
        tensors = [*self._leaves(), *(t for _, t in tensors_in("", self._data()))]
        modules = [m for root in self._roots if isinstance(root, nn.Module) for m in root.modules()]
        tensors += [root for root in self._roots if isinstance(root, Tensor)]
        settings: list[Any] = []
        for module in modules:
            tensors += [t for t in module._parameters.values() if t is not None]
            tensors += [t for t in module._buffers.values() if t is not None]
            settings.append(id(module))
            settings += [(k, v) for k, v in vars(module).items() if type(v) in PLAIN]
        tensors = list({id(t): t for t in tensors}.values())
        kinds = sorted({t.device.type for t in tensors} - {"meta"})
        autocast = [torch.is_autocast_enabled(kind) for kind in kinds]
        versions = [t._version for t in tensors if not t.is_inference()]
        pointers = [t.data_ptr() for t in tensors]
        return [*settings, *autocast, *pointers, *versions, *numbers(tensors)]


def numbers(tensors: list[Tensor]) -> list[float]:
    """The sum of each tensor with a storage, and the norm of floating-point ones."""
    found = []
    for t in tensors:
        if t.layout is torch.strided and not t.is_quantized and t.device.type != "meta":
            t = (torch.view_as_real(t) if t.is_complex() else t).detach()
            sizes = [torch.linalg.vector_norm(t)] if t.is_floating_point() else []
            found += [x.to("cpu", torch.float64) for x in (t.sum(), *sizes)]
    return torch.stack(found).tolist() if found else []


def _reached(function: Any, depth: int = 3) -> Iterator[Any]:
    """The modules and tensors that a loss holds: its model, `self`, closure and globals."""
    if isinstance(function, nn.Module | Tensor):
        yield function
        return
    held: list[Any] = [getattr(function, name, None) for name in ("model", "user_criterion")]
    if isinstance(function, partial):
        held += [function.func, *function.args, *function.keywords.values()]
    held.append(getattr(function, "__self__", None))
    if inspect.isfunction(function):
        held += [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        held += [function.__globals__.get(name) for name in function.__code__.co_names]
    for value in held:
        if isinstance(value, nn.Module | Tensor):
            yield value
        elif depth and (inspect.isfunction(value) or hasattr(value, "user_criterion")):
            yield from _reached(value, depth - 1)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
