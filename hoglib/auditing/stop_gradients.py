"""Values that a function takes out of its graph are held constant while differences are taken.

A target under no_grad, `x + (round(x) - x).detach()`, the vectors of spectral norm: autograd holds them
constant, and so must the differences that it is compared with. A mode records what each call without a
graph returns for arguments with a graph, and replays that at every other point.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, final

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

STOPPING_CALLS = frozenset(
    {"detach"}
)  # calls inside a composite torch function that stop a gradient
AUTOGRAD_CALLS = ("grad", "backward")  # they run Python code, which is seen call by call


class StopGradient(NamedTuple):
    """One call that ended the graph, and the value that it returned."""

    how: str
    line: SourceLine | None
    module: nn.Module | None  # the module that was running
    value: Any


class DifferentPathError(Exception):
    """At another point the function makes other calls than at the first one."""


@final
class StopGradientReplay:
    """Records the stopped values of a function in its first run, and replays them in the others.

    current_module: returns the module that is running.
    """

    def __init__(self, current_module: Callable[[], nn.Module | None] = lambda: None) -> None:
        self.found: list[StopGradient] = []
        self.recorded = False
        self.beyond = False  # whether there is one inside a transform, which cannot be replayed
        self.current_module = current_module

    @contextmanager
    def held(self) -> Iterator[None]:
        """The context for a run of the function with a graph, without its backward."""
        mode = _RecordOrReplay(self)
        with watching_functions(lambda function, args: None) as applying:
            mode.applying = applying
            with mode:
                yield
        self.recorded = True


class _RecordOrReplay(TorchFunctionMode):
    def __init__(self, replay: StopGradientReplay) -> None:
        super().__init__()
        self.applying = Applying()
        self._replay, self._next = replay, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.applying.depth:
            return func(*args, **kwargs)
        composite = isinstance(func, FunctionType) and func.__name__ not in AUTOGRAD_CALLS
        again = without_override_check(func, STOPPING_CALLS) if composite else None
        if again is not None:
            with self:
                return again(*args, **kwargs)
        name = name_of_call(func)
        given = [x for x in pytree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        graphed = any(is_float(x) and _has_graph(x) for x in given)
        result = func(*args, **kwargs)
        if not graphed or name in VALUE_INDEPENDENT or uses_only_metadata(name, args):
            return result
        if name in AUTOGRAD_CALLS and kwargs.get("create_graph"):
            return result
        if name in ESCAPES:
            return self._hold(ESCAPES[name], result) if _is_value(result) else result
        made = [y for y in pytree.leaves(result) if is_float(y)]
        if not made or any(_has_graph(y) for y in made):
            return result
        how = ALIASES.get(name)
        if how is None:
            off = not torch.is_grad_enabled()
            how = f"`{name}` " + ("under torch.no_grad" if off else "without a graph")
        return self._hold(how, result, in_place=name not in ALIASES)

    def _hold(self, how: str, result: Any, *, in_place: bool = False) -> Any:
        """Record the result in the first run; return the recorded one in the others."""
        replay = self._replay
        if transforms_active():
            replay.beyond = True
            return result
        if not replay.recorded:
            value = pytree.map_tensors(lambda x: x.detach().clone(), result)
            line = source_location.torch_call_line()
            replay.found.append(StopGradient(how, line, replay.current_module(), value))
            return result
        if self._next >= len(replay.found) or replay.found[self._next].how != how:
            raise DifferentPathError
        value = replay.found[self._next].value
        self._next += 1
        if not in_place:
            return pytree.map_tensors(torch.clone, value)
        # the call may have written its result to a buffer
        pairs = zip(pytree.leaves(result), pytree.leaves(value), strict=True)
        with torch.no_grad():
            for tensor, recorded in pairs:
                if isinstance(tensor, Tensor):
                    if tensor.shape != recorded.shape:
                        raise DifferentPathError
                    tensor.copy_(recorded)
        return result


def _has_graph(x: Tensor) -> bool:
    """Whether autograd records what is computed from x; the wrappers of torch.func do not say so."""
    return bool(x.requires_grad or unwrap(x).requires_grad)


def _is_value(result: Any) -> bool:
    """A number or an array of numbers, rather than an address."""
    return isinstance(result, float | complex | list) or type(result).__module__ == "numpy"
