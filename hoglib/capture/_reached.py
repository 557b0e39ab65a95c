"""Where a function reaches tensors and modules besides its arguments, so that each call finds those of
now.

A graph is captured with the tensors that stood there then. What has been put in their place since
(a parameter made anew, another head on a model, a variable of the caller's) is found by the same way
from the function: through its closure, globals, `self`, attributes and containers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

Step = Callable[[Any], Any]
_MAX_ITEMS = 1000  # of one container
_MAX_SEEN = 200_000
_OPAQUE = (
    str, bytes, int, float, complex, type, type(None), ModuleType, CodeType, torch.dtype,
    torch.device, torch.Generator,
)  # fmt: skip


class Missing(NamedTuple):
    """Stands for what is not there any more."""


class Way:
    """How a tensor or module is reached from a function; without steps it is the thing itself."""

    __slots__ = ("_steps", "found")

    def __init__(self, found: Any, steps: tuple[Step, ...] | None) -> None:
        self.found: Final = found  # what was there
        self._steps = steps

    def now(self, root: Any) -> Any:
        """What is there now."""
        if self._steps is None:
            return self.found
        try:
            for step in self._steps:
                root = step(root)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError):
            return Missing()
        return root


def ways_to(root: Any, wanted: list[Any]) -> list[Way]:
    """The way to each of these tensors and modules, the shortest that there is."""
    left = {id(value) for value in wanted}
    found: dict[int, tuple[Step, ...]] = {}
    queue: deque[tuple[Any, tuple[Step, ...]]] = deque([(root, ())])
    seen: set[int] = set()
    while queue and left and len(seen) < _MAX_SEEN:
        value, steps = queue.popleft()
        if id(value) in left:
            found[id(value)] = steps
            left.discard(id(value))
        if isinstance(value, (*_OPAQUE, Tensor)) or id(value) in seen:
            continue
        seen.add(id(value))
        queue.extend((inner, (*steps, *step)) for inner, step in _inside(value))
    return [Way(value, found.get(id(value))) for value in wanted]


def _inside(value: Any) -> Iterator[tuple[Any, tuple[Step, ...]]]:
    """What an object holds, with the steps there."""
    if type(value).__module__.startswith(__package__):  # which keep tensors of the past
        if hasattr(value, "fn"):
            yield value.fn, (partial(_attribute, "fn"),)
    elif isinstance(value, FunctionType):
        for i, cell in enumerate(value.__closure__ or ()):
            if _is_filled(cell):
                yield cell.cell_contents, (partial(_closed_over, i),)
        for i, default in enumerate(value.__defaults__ or ()):
            yield default, (partial(_default, i),)
        for name, default in (value.__kwdefaults__ or {}).items():
            yield default, (partial(_keyword_default, name),)
        for name in _names(value.__code__):
            if name in value.__globals__:
                yield value.__globals__[name], (partial(_global, name),)
    elif isinstance(value, MethodType):
        yield value.__self__, (_self,)
        yield value.__func__, (_func,)
    elif isinstance(value, partial):
        yield value.func, (partial(_attribute, "func"),)
        yield value.args, (partial(_attribute, "args"),)
        yield value.keywords, (partial(_attribute, "keywords"),)
    elif isinstance(value, Mapping):
        for key, item in list(value.items())[:_MAX_ITEMS]:
            yield item, (partial(_item, key),)
    elif isinstance(value, list | tuple | deque):
        for i, item in enumerate(list(value)[:_MAX_ITEMS]):
            yield item, (partial(_item, i),)
    elif isinstance(value, nn.Module):
        for store in ("_parameters", "_buffers", "_modules"):
            for name, item in value.__dict__[store].items():
                yield item, (partial(_in_store, store, name),)
        for name, item in vars(value).items():
            if name not in _MODULE_FIELDS:
                yield item, (partial(_attribute, name),)
    else:
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield item, (partial(_in_dict, name),)
        slots = getattr(type(value), "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield getattr(value, name), (partial(_attribute, name),)
        wrapped = getattr(type(value), "__call__", None)
        if isinstance(wrapped, FunctionType):
            yield wrapped, (_call,)


def _names(code: CodeType) -> list[str]:
    """The names that code, and the functions inside it, look up."""
    found = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += _names(constant)
    return list(dict.fromkeys(found))


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _closed_over(i: int, fn: Any) -> Any:
    return fn.__closure__[i].cell_contents


def _default(i: int, fn: Any) -> Any:
    return fn.__defaults__[i]


def _keyword_default(name: str, fn: Any) -> Any:
    return fn.__kwdefaults__[name]


def _global(name: str, fn: Any) -> Any:
    return fn.__globals__[name]


def _self(method: Any) -> Any:
    return method.__self__


def _func(method: Any) -> Any:
    return method.__func__


def _call(value: Any) -> Any:
    return type(value).__call__


def _attribute(name: str, value: Any) -> Any:
    return getattr(value, name)


def _item(key: Any, value: Any) -> Any:
    return value[key]


def _in_store(store: str, name: str, module: nn.Module) -> Any:
    return module.__dict__[store][name]


def _in_dict(name: str, value: Any) -> Any:
    return value.__dict__[name]


_MODULE_FIELDS = set(vars(nn.Module()))
