"""Values that a function takes out of its graph are held constant while differences are taken.

A target under no_grad, `x + (round(x) - x).detach()`, the vectors of spectral norm: autograd holds them
constant, and so must the differences that it is compared with. A mode records what each call without a
graph returns for arguments with a graph, and replays that at every other point.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.autograd import Function
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

AUTOGRAD_CALLS = ("grad", "backward")  # they run Python code, which is seen call by call


class CallMode(TorchFunctionMode, ABC):
    """A mode that handles torch calls and custom Functions, not the calls in the forward of these.

    of_composites: of the calls of a composite torch function, those that are handled instead of it.
    Default: those that have a stand-in.
    """

    def __init__(self, of_composites: frozenset[str] | None = None) -> None:
        super().__init__()
        self._of_composites, self._applying = of_composites, Applying()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls are handled."""
        with watching_functions(self.on_function) as self._applying, self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._applying.depth:
            return func(*args, **kwargs)
        name = name_of_call(func)
        if isinstance(func, FunctionType) and name not in AUTOGRAD_CALLS:
            inner = without_override_check(func, self._of_composites)
            if inner is not None:
                with self:
                    return inner(*args, **kwargs)
        return self.on_call(func, name, args, kwargs)

    @abstractmethod
    def on_call(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Runs a torch call."""

    def on_function(self, function: type[Function], args: tuple[Any, ...]) -> None:
        """Called with a custom Function before it runs."""


class StopGradient(NamedTuple):
    """One call that ended the graph, and the value that it returned."""

    how: str
    line: SourceLine | None
    module: nn.Module | None  # the module that was running
    value: Any


@final
class StopGradientReplay(CallMode):
    """Records the stopped values of a function in its first run, and replays them in the others."""

    def __init__(self) -> None:
        super().__init__(frozenset({"detach"}))
        self.found: list[StopGradient] = []
        self.beyond = False  # whether there is one inside a transform, which cannot be replayed
        self._recorded, self._next = False, 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """The context for a run of the function with a graph, without its backward."""
        self._next = 0
        if not self._recorded:
            self.found.clear()
        with self.watching():
            yield
        self._recorded = True

    def on_call(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        graphed = any(map(_has_graph, pytree.leaves((args, kwargs))))
        result = func(*args, **kwargs)
        if not graphed or name in VALUE_INDEPENDENT or uses_only_metadata(name, args):
            return result
        if name in AUTOGRAD_CALLS and kwargs.get("create_graph"):
            return result
        if name in ESCAPES:
            return self._hold(ESCAPES[name], result) if _is_value(result) else result
        made = [y for y in pytree.leaves(result) if is_float(y)]
        if not made or any(map(_has_graph, made)):
            return result
        if name in ALIASES:
            return self._hold(ALIASES[name], result)
        how = "without a graph" if torch.is_grad_enabled() else "under torch.no_grad"
        held = self._hold(f"`{name}` {how}", result)
        if held is not result:  # the call may have written its result to a buffer
            with torch.no_grad():
                for y, value in zip(made, filter(is_float, pytree.leaves(held)), strict=True):
                    y.copy_(value)
        return result

    def _hold(self, how: str, result: Any) -> Any:
        """Record the result in the first run; return the recorded one in the others."""
        if transforms_active():
            self.beyond = True
            return result
        if not self._recorded:
            line, module = source_location.torch_call_line(), source_location.running_module()
            value = pytree.map_tensors(lambda x: x.detach().clone(), result)
            self.found.append(StopGradient(how, line, module, value))
            return result
        if self._next >= len(self.found) or self.found[self._next].how != how:
            raise RuntimeError("at another point the function makes other calls")
        value = self.found[self._next].value
        self._next += 1
        return pytree.map_tensors(torch.clone, value)


def _has_graph(x: Any) -> bool:
    """Whether autograd records what is computed from x; the wrappers of torch.func do not say so."""
    return is_float(x) and bool(x.requires_grad or unwrap(x).requires_grad)


def _is_value(result: Any) -> bool:
    """A number or an array of numbers, rather than an address."""
    return isinstance(result, float | complex | list) or type(result).__module__ == "numpy"
