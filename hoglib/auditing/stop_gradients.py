"""What a function takes out of its graph on purpose is held constant while differences are taken.

A target under no_grad, `x + (round(x) - x).detach()`, the vectors of spectral norm: autograd
differentiates with them held, and so must what it is compared with. A watch on torch's calls remembers
what each call without a graph gave to something with one, and gives the same again at every other
point.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hoglib._core import pytree, source_location
from hoglib._core.detachment import (
    ALIASES,
    ESCAPES,
    VALUE_INDEPENDENT,
    name_of_call,
    uses_only_metadata,
)
from hoglib._core.pytree import is_float
from hoglib._core.source_location import SourceLine
from hoglib._core.torch_internals import Applying, transforms_active, unwrap, watching_functions
from hoglib.stand_ins.mode import without_override_check

STOPPING = frozenset({"detach"})  # what a Python function of torch may call
INNER = ("grad", "backward")  # run Python of their own, which is judged and not held


class Stop(NamedTuple):
    """One call that ended the graph, and what it gave."""

    how: str
    place: SourceLine | None
    module: nn.Module | None  # that ran
    value: Any


class OtherPath(Exception):
    """At another point the function does not make the calls that it made at the first one."""


class StopGradientReplay:
    """The stops of a function: recorded in its first run, held in the others.

    owner: gives the module that runs.
    """

    def __init__(self, owner: Callable[[], nn.Module | None] = lambda: None) -> None:
        self.found: list[Stop] = []
        self.recorded = False
        self.beyond = False  # whether one was met inside of a transform, which cannot be held
        self.owner = owner

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around a run of the function with a graph, but not of its backward."""
        watch = _Watch(self)
        with watching_functions(lambda function, args: None) as applying:
            watch.applying = applying
            with watch:
                yield
        self.recorded = True


class _Watch(TorchFunctionMode):
    def __init__(self, stops: StopGradientReplay) -> None:
        super().__init__()
        self.applying = Applying()
        self._stops, self._next = stops, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.applying.depth:
            return func(*args, **kwargs)
        inside = isinstance(func, FunctionType) and func.__name__ not in INNER
        again = without_override_check(func, STOPPING) if inside else None
        if again is not None:
            with self:
                return again(*args, **kwargs)
        name = name_of_call(func)
        given = [x for x in pytree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        graphed = any(is_float(x) and _graphed(x) for x in given)
        result = func(*args, **kwargs)
        if not graphed or name in VALUE_INDEPENDENT or uses_only_metadata(name, args):
            return result
        if name in INNER and kwargs.get("create_graph"):
            return result
        if name in ESCAPES:
            return self._hold(ESCAPES[name], result) if _is_value(result) else result
        made = [y for y in pytree.leaves(result) if is_float(y)]
        if not made or any(_graphed(y) for y in made):
            return result
        how = ALIASES.get(name)
        if how is None:
            off = not torch.is_grad_enabled()
            how = f"`{name}` " + ("under torch.no_grad" if off else "without a graph")
        return self._hold(how, result, in_place=name not in ALIASES)

    def _hold(self, how: str, result: Any, *, in_place: bool = False) -> Any:
        stops = self._stops
        if transforms_active():
            stops.beyond = True
            return result
        if not stops.recorded:
            value = pytree.map_tensors(lambda x: x.detach().clone(), result)
            stops.found.append(Stop(how, source_location.torch_call_line(), stops.owner(), value))
            return result
        if self._next >= len(stops.found) or stops.found[self._next].how != how:
            raise OtherPath
        value = stops.found[self._next].value
        self._next += 1
        if not in_place:
            return pytree.map_tensors(torch.clone, value)
        # what it gave may be a buffer that was written
        pairs = zip(pytree.leaves(result), pytree.leaves(value), strict=True)
        with torch.no_grad():
            for place, kept in pairs:
                if isinstance(place, Tensor):
                    if place.shape != kept.shape:
                        raise OtherPath
                    place.copy_(kept)
        return result


def _graphed(x: Tensor) -> bool:
    """Whether autograd records what is made of it; the wrappers of torch.func do not tell."""
    return bool(x.requires_grad or unwrap(x).requires_grad)


def _is_value(result: Any) -> bool:
    """A number or numbers, rather than an address."""
    return isinstance(result, float | complex | list) or type(result).__module__ == "numpy"
