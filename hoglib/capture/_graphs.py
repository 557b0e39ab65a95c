"""The graphs of a function, which all that compile it share, and what is known of each."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hoglib import _functorch, _tree
from hoglib.capture._reached import Reached
from hoglib.capture._signature import Form
from hoglib.capture._trace import Place

CAPTURING = threading.RLock()


@final
@dataclass(frozen=True, eq=False)
class Captured:
    """One graph of a function, and what it cost: an entry of `compile(fn).signatures`."""

    arguments: str  # dtypes and shapes, in short
    nodes: int  # operations
    backend: str
    source: str  # "compiled", or found in "memory" or on "disk"
    seconds_to_trace: float
    seconds_to_compile: float
    draws: bool = field(repr=False)  # random numbers
    code: str = field(repr=False)  # of the graph, to be read
    run: Callable[..., Any] = field(repr=False)
    reached: Reached = field(repr=False)
    shared: list[tuple[int, int]] = field(
        repr=False
    )  # arguments that are also reached, and as which
    leaves: list[Any] = field(repr=False)  # of the output; a Place where a tensor stands
    structure: Any = field(repr=False)
    recorded: list[bool] = field(repr=False)  # which of its tensors have a graph in eager mode
    backward: "Graphs" = field(repr=False)  # of its pullback
    holds: Callable[[list[Tensor]], bool] = field(repr=False)  # what was assumed of symbolic shapes

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """The tensors among the outputs, without a graph of their own.

        What autocast, stand-ins and a default device do is in the graph already.
        """
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with torch._C.DisableTorchFunction(), _functorch.no_autocast():
                return list(self.run(*inputs))
        finally:
            torch._C._set_grad_enabled(recording)

    def found(self, fn: Any, form: Form, tensors: list[Tensor]) -> list[Tensor] | None:
        """The tensors that the function reaches besides its arguments, as they are now; None where the
        graph is not that of such a call."""
        lifted = self.reached.now((fn, form.others))
        if lifted is None or shared(tensors, lifted) != self.shared or not self.holds(tensors):
            return None
        return lifted

    def inputs(self, tensors: list[Tensor], lifted: list[Tensor]) -> list[Tensor]:
        """What the graph is given: arguments that are not reached otherwise, and what is reached."""
        if not self.shared:
            return tensors + lifted
        also = {i for i, _ in self.shared}
        return [x for i, x in enumerate(tensors) if i not in also] + lifted

    def assembled(self, outputs: list[Tensor]) -> Any:
        """The output in the structure that the function gave it."""
        leaves = [outputs[x.index] if type(x) is Place else x for x in self.leaves]
        return _tree.unflatten(leaves, self.structure)


class Graphs:
    """The graphs of one function."""

    def __init__(self) -> None:
        self.by_signature: dict[Any, list[Captured]] = {}
        self.full = False

    def all(self) -> list[Captured]:
        return [one for found in list(self.by_signature.values()) for one in found]


_OF_FUNCTIONS: WeakKeyDictionary[Any, dict[Any, Graphs]] = WeakKeyDictionary()


def of_function(fn: Any, options: Any) -> Graphs:
    """The graphs of a function, for as long as it lives; of a method, for as long as its object."""
    holder, key = (
        (fn.__self__, (fn.__func__, options)) if isinstance(fn, MethodType) else (fn, options)
    )
    with CAPTURING:
        try:
            return _OF_FUNCTIONS.setdefault(holder, {}).setdefault(key, Graphs())
        except TypeError:  # no weak reference, or no hash
            return Graphs()


def shared(tensors: list[Tensor], lifted: list[Tensor]) -> list[tuple[int, int]]:
    """Which arguments are also reached otherwise, by their places in both lists."""
    places = {id(x): i for i, x in enumerate(tensors)}
    return [(places[id(x)], j) for j, x in enumerate(lifted) if id(x) in places]
