"""What an object holds: the closure of a function, the items of a container, attributes, methods."""

import dis
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from hoglib._warning import is_users

Step = Callable[[Any], Any]
Held = tuple[Any, Step, str | None]  # what, how from its holder, and the name that it has there
NEVER = {"__init__", "extra_repr", "reset_parameters", "__repr__"}
IMPLICIT = {
    "__call__", "__wrapped__", "__iter__", "__getitem__", "__len__", "__getattr__", "forward",
    "_parameters", "_buffers", "_modules",
}  # fmt: skip
_MAX_ITEMS = 1000  # of one container
_MAX_NUMBERS = 64
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    BuiltinFunctionType, type, Enum,
)  # fmt: skip
_attributes = attrgetter("__dict__")


def is_plain(value: Any) -> bool:
    """Whether a value is compared as it is: a number, a text, a class, a tuple of them."""
    if isinstance(value, tuple):
        return len(value) <= _MAX_NUMBERS and all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def names_in(code: CodeType) -> set[str]:
    """The names that code, and the functions inside it, look up, also by getattr."""
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
    """What an object holds."""
    if isinstance(value, Attributes):
        for name, item in list(value.fields.items()):
            yield item, itemgetter(name), name
    elif type(value).__module__.startswith(__package__):  # which keep tensors of the past
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
    if not is_users(value.__code__.co_filename):
        return
    read = names_in(value.__code__)
    for name in sorted(_globals_in(value.__code__) & value.__globals__.keys()):
        held = value.__globals__[name]
        if isinstance(held, ModuleType):
            if is_users(getattr(held, "__file__", None) or "<"):
                for attribute in sorted(read & vars(held).keys()):
                    yield vars(held)[attribute], partial(_in_module, name, attribute), None
        else:
            yield held, partial(_global, name), None


def _inside_container(value: Any) -> Iterator[Held]:
    try:
        pairs = list(value.items() if isinstance(value, Mapping) else enumerate(value))[:_MAX_ITEMS]
    except Exception:  # a class of the user's, whose items cannot be had
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


class Apart:
    """A value that a graph is given as an input, by whoever holds it: nothing looks into it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Attributes:
    """The attributes of an object, which are read by name and may grow in number."""

    __slots__ = ("fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


def _is_users_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_users(file))


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
