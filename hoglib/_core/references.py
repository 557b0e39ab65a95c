"""What one object holds: a closure, defaults, the globals that code reads, items, attributes, methods.

:class:`hoglib._core.closures.ClosureWalker` follows these references from object to object.
"""

import dis
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core.source_location import is_user_file

Step = Callable[[Any], Any]
FOUND = (Tensor, nn.Module, torch.Generator)  # what a search through references is for
_MAX_ITEMS = 1000  # of one container
_MAX_PLAIN = 64  # items of a container whose numbers and texts are compared


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


NEVER = {"__init__", "extra_repr", "reset_parameters", "__repr__"}
IMPLICIT = {
    "__call__", "__wrapped__", "__iter__", "__getitem__", "__len__", "__getattr__", "forward",
    "_parameters", "_buffers", "_modules",
}  # fmt: skip
# Its objects keep tensors of earlier calls; of these, only the function is followed.
_KEEP_TENSORS = "hoglib.capture."
_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)
_attributes = attrgetter("__dict__")


def references(value: Any, libraries: bool = True) -> Iterator[Reference]:
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


_FIELDS = {
    name: attrgetter(name) for name in ("__defaults__", "__kwdefaults__", "args", "keywords")
}


def _of_arguments(
    holder: Any, field: str, how: str, names: tuple[str, ...] | list[str] = ()
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
                path = (*names[:used], name)
                yield Reference(
                    vars(value)[name], partial(_global, path), ".".join(path), "reads the global"
                )
        elif module is None or _is_users_module(module) or isinstance(value, FOUND):
            path = names[:used]
            yield Reference(value, partial(_global, path), ".".join(path), "reads the global")


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


def _of_object(value: Any) -> Iterator[Reference]:
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
    return (
        isinstance(value, tuple)
        and tuple.__len__(value) <= _MAX_PLAIN
        and all(map(is_plain, tuple.__iter__(value)))
    )


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
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


# Steps from a holder to what it holds, which guards keep and run again at each call.


def _closed_over(i: int, fn: Any) -> Any:
    return fn.__closure__[i].cell_contents


def _length(field: str, value: Any) -> int:
    return len(getattr(value, field))


def _item_of(field: str, key: Any, value: Any) -> Any:
    return getattr(value, field)[key]


def _stored(base: Any, i: int, value: Any) -> Any:
    return base.__getitem__(value, i)


def _nth(i: int, value: Any) -> Any:
    return list(value.values() if isinstance(value, Mapping) else value)[i]


def _global(path: tuple[str, ...], fn: Any) -> Any:
    value = fn.__globals__[path[0]]
    for name in path[1:]:
        value = getattr(value, name)
    return value


def _of_class(i: int, name: str, value: Any) -> Any:
    return vars(type(value).__mro__[i])[name]


def _getter(i: int, name: str, value: Any) -> Any:
    return vars(type(value).__mro__[i])[name].fget
