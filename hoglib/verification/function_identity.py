"""Identify custom Functions: classes that a function defines anew in each call share verdicts.

    def solve(A, b, eps=1e-6):
        class Solve(Function):        # a new class object in each call
            ...                       # with the same code objects as methods, and equal eps
        return Solve.apply(A, b)

Two classes share an Identity if their methods have the same code objects and close over equal
constants, identical objects, and tensors of equal dtype, layout, device and dimension.
"""

from collections.abc import Hashable, Sequence
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any, final
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.torch_api import torch_internals

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
MAX_DEPTH = 5  # levels of nested functions and containers to follow
MAX_IDENTITIES = 1000  # entries of the cache: a constant that changes in each call makes a new one


@final
class Identity:
    """Stands for all classes with one key, as the key of their verdicts."""

    def __init__(self, held: Sequence[Any]) -> None:
        self._held = held  # keeps the code objects alive: their ids are part of the key


_IDENTITIES: dict[Hashable, Identity] = {}  # by `_key` of the class attributes
# cache of `identity_of`
_KNOWN: WeakKeyDictionary[type[Function], Identity | type[Function]] = WeakKeyDictionary()


def identity_of(function: type[Function]) -> Identity | type[Function]:
    """The class itself; for a class defined inside a function, the Identity that it shares."""
    if "<locals>" not in function.__qualname__:
        return function
    found = _KNOWN.get(function)
    if found is None:
        found = _KNOWN[function] = _look_up(function)
    return found


def _look_up(function: type[Function]) -> Identity | type[Function]:
    classes = function.__mro__[: function.__mro__.index(Function)]
    # torch adds a `_backward_cls` to each class
    own = {k: v for c in reversed(classes) for k, v in vars(c).items() if k[:2] != "__"}
    own.pop("_backward_cls", None)
    codes: list[Any] = []
    objects: list[Any] = []
    key = tuple((name, _key(own[name], codes, objects, MAX_DEPTH)) for name in sorted(own))
    if key in _IDENTITIES:
        return _IDENTITIES[key]
    try:
        for x in objects:  # when an object dies, its id may be reused: the key is then void
            finalize(x, _IDENTITIES.pop, key, None)
    except TypeError:  # an object that takes no weak references
        return function
    if len(_IDENTITIES) >= MAX_IDENTITIES:
        _IDENTITIES.clear()
    return _IDENTITIES.setdefault(key, Identity(codes))


def _key(x: object, codes: list[Any], objects: list[Any], depth: int) -> Hashable:
    """A key for a class attribute or for a value in a closure.

    Appends the code objects to `codes`, and to `objects` all values compared by id."""
    if isinstance(x, CONSTANTS):
        return type(x), repr(x)
    if isinstance(x, Tensor):  # without its values: as for arguments, they change from call to call
        return Tensor, x.dtype, x.layout, x.device, x.dim(), x.requires_grad
    if isinstance(x, type) and "<locals>" in x.__qualname__:
        return x.__module__, x.__qualname__
    inner = partial(_key, codes=codes, objects=objects, depth=depth - 1)
    if isinstance(x, staticmethod | classmethod):
        return inner(x.__func__)
    if depth and isinstance(x, FunctionType):
        codes.append(x.__code__)
        held = *torch_internals.closed_over(x), *(x.__defaults__ or ())
        return id(x.__code__), *map(inner, held)
    if depth and isinstance(x, tuple | list):
        return type(x), *map(inner, x)
    if depth and isinstance(x, dict):
        return dict, *((inner(k), inner(v)) for k, v in x.items())
    if depth and isinstance(x, partial):
        return partial, inner(x.func), inner(x.args), inner(x.keywords)
    objects.append(x)
    return type(x), id(x)
