"""The members of what a Function keeps on its context: of tuples, lists, dicts and plain objects.

opened("ctx.stuff", (a, {"b": c}))      # {"ctx.stuff[0]": a, "ctx.stuff[1]['b']": c}
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DEPTH = 5
Key = tuple[str, Any]  # how a member is reached, "index", "key" or "attribute"; and by what
# Kinds whose attributes are none of the Function's values, or cannot be exchanged.
OPAQUE = (
    Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.dtype,
    torch.device, torch.Size, torch.Generator, torch.autograd.function.FunctionCtx, BaseException,
)  # fmt: skip


def opened(label: str, value: Any, depth: int = DEPTH) -> dict[str, Any]:
    """The innermost members by how they are written; the value itself if it is no container.

    Args:
        label: How the value is written.
        value: What may be a container, or contain some.
        depth: How many levels are opened.
    Returns:
        At least one entry. An empty container is one.
    """
    members = list(_members(value)) if depth else []
    if not members:
        return {label: value}
    found: dict[str, Any] = {}
    for key, member in members:
        found |= opened(written(label, key), member, depth - 1)
    return found


def exchanged(label: str, value: Any, members: Mapping[str, Any], depth: int = DEPTH) -> Any:
    """The value with other members, by the labels that `opened` gives; new containers of its kinds."""
    own = list(_members(value)) if depth else []
    if not own:
        return members.get(label, value)
    parts = [
        (key, exchanged(written(label, key), member, members, depth - 1)) for key, member in own
    ]
    if isinstance(value, tuple):
        made = [part for _, part in parts]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    result = copy.copy(value)
    for (how, key), part in parts:
        if how == "attribute":
            vars(result)[key] = part
        else:
            result[key] = part
    return result


def written(label: str, key: Key) -> str:
    """How a member is written."""
    return f"{label}.{key[1]}" if key[0] == "attribute" else f"{label}[{key[1]!r}]"


def steps_to(label: str, value: Any, wanted: str, depth: int = DEPTH) -> list[Key] | None:
    """The keys from a container to the member with a label; None if it has none."""
    if label == wanted:
        return []
    for key, member in _members(value) if depth else ():
        rest = steps_to(written(label, key), member, wanted, depth - 1)
        if rest is not None:
            return [key, *rest]
    return None


def _members(value: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, OPAQUE):
        return
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((("attribute", n), x) for n, x in zip(value._fields, value, strict=True))
    elif type(value) is tuple or isinstance(value, list | deque):
        yield from ((("index", i), x) for i, x in enumerate(value))
    elif isinstance(value, dict):
        yield from ((("key", k), x) for k, x in value.items())
    elif _is_plain(value):
        yield from ((("attribute", n), x) for n, x in vars(value).items())


def _is_plain(value: Any) -> bool:
    """Whether it is an object of a class that a user wrote, which keeps values in attributes."""
    kind = type(value)
    own: Callable[..., Any] | None = getattr(kind, "__setattr__", None)
    return (
        hasattr(value, "__dict__")
        and own is object.__setattr__
        and not callable(value)
        and kind.__module__.split(".")[0] not in ("builtins", "torch", "numpy", "collections")
    )
