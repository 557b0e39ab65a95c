"""The forward, backward and jvp of a custom Function as plain functions, with a context that records.

Autograd hides what a Function does: it sums gradients that are too large, casts those of another dtype,
and does not show what was saved. Run as plain functions, with the context below instead of autograd's,
they show it.
"""

import inspect
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from hoglib._core import pytree, source_location
from hoglib._core.element_differences import random_like
from hoglib._core.pytree import is_float
from hoglib._core.source_location import SourceLine, is_user_code
from hoglib._core.torch_internals import backward_rule
from hoglib.verification.call import same

SAVED = "ctx.saved_tensors"


class Noted(NamedTuple):
    """Where something was put on a context, and what the code there calls it."""

    place: SourceLine | None
    name: str


@final
@dataclass
class Record:
    """What a Function saved on its context, and what it declared there."""

    needed: tuple[bool, ...]
    saved: tuple[Any, ...] = ()
    for_forward: tuple[Any, ...] = ()
    dirty: tuple[Any, ...] = ()
    silent: tuple[Any, ...] = ()  # outputs marked non-differentiable
    materialize: bool = True
    attributes: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Noted] = field(default_factory=dict)

    def slots(self, *, in_jvp: bool = False) -> dict[str, Any]:
        """Everything backward, or jvp, may read, by how it is written."""
        saved = self.for_forward if in_jvp else self.saved
        slots = {f"{SAVED}[{k}]": value for k, value in enumerate(saved)}
        return slots | {f"ctx.{name}": value for name, value in self.attributes.items()}

    def with_slots(self, slots: dict[str, Any], *, in_jvp: bool = False) -> "Record":
        """The same with other values in the slots."""
        saved = tuple(value for label, value in slots.items() if label.startswith(SAVED))
        rest = {
            label.removeprefix("ctx."): value
            for label, value in slots.items()
            if not label.startswith(SAVED)
        }
        changed: dict[str, Any] = {"for_forward" if in_jvp else "saved": saved}
        return replace(self, attributes=rest, **changed)

    def noted(self, label: str) -> Noted:
        return self.notes.get(label, Noted(None, ""))

    def is_silent(self, output: Any) -> bool:
        return any(output is y for y in self.silent)


@final
class Context(FunctionCtx):
    """Replaces autograd's context. All its attributes are the Function's, none its own."""

    def __init__(self, record: Record, *, in_jvp: bool = False) -> None:
        self.__dict__[_RECORD] = record
        self.__dict__[_IN_JVP] = in_jvp

    def save_for_backward(self, *tensors: Any) -> None:
        _of(self).saved = tensors
        _note_all(self, tensors)

    def save_for_forward(self, *tensors: Any) -> None:
        _of(self).for_forward = tensors
        _note_all(self, tensors)

    def mark_dirty(self, *tensors: Any) -> None:
        _of(self).dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        _of(self).silent = tensors

    def set_materialize_grads(self, value: bool) -> None:
        _of(self).materialize = value

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        return _of(self).needed

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return _of(self).for_forward if self.__dict__[_IN_JVP] else _of(self).saved

    saved_variables = saved_for_forward = saved_tensors

    def __setattr__(self, name: str, value: Any) -> None:
        _of(self).attributes[name] = value
        _of(self).notes[f"ctx.{name}"] = _note(value)

    def __getattr__(self, name: str) -> Any:
        try:
            return _of(self).attributes[name]
        except KeyError:
            raise AttributeError(f"ctx has no attribute {name!r}") from None

    def __delattr__(self, name: str) -> None:
        _of(self).attributes.pop(name, None)


_RECORD, _IN_JVP = "_hoglib_record", "_hoglib_in_jvp"


def _of(context: Context) -> Record:
    record: Record = context.__dict__[_RECORD]
    return record


def _note_all(context: Context, tensors: Sequence[Any]) -> None:
    for k, tensor in enumerate(tensors):
        _of(context).notes[f"{SAVED}[{k}]"] = _note(tensor)


def _note(value: Any) -> Noted:
    """The line of user code that saves a value, and the name of the local variable there."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if not is_user_code(frame.f_code.co_filename):
        return Noted(None, "")
    names = [name for name, local in frame.f_locals.items() if local is value and name != "ctx"]
    place = SourceLine(frame.f_code.co_filename, frame.f_lineno)
    return Noted(place, names[0] if names and value is not None else "")


class Run(NamedTuple):
    """One forward pass."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    record: Record

    def incoming(self, random: torch.Generator | None = None) -> list[Tensor | None]:
        """A gradient for each output, as autograd gives them."""
        random = random or torch.Generator().manual_seed(2)
        grads: list[Tensor | None] = []
        for y in self.outputs:
            if not isinstance(y, Tensor):
                grads.append(None)
            elif is_float(y) and not self.record.is_silent(y):
                grads.append(random_like(y, random))
            else:
                grads.append(torch.zeros_like(y) if self.record.materialize else None)
        return grads


def forward(function: type[Function], args: Sequence[Any], needed: Sequence[bool]) -> Run:
    """forward, and setup_context where there is one, as autograd runs them: without a graph."""
    record = Record(tuple(needed))
    context = Context(record)
    with torch.no_grad():
        if is_classic(function):
            output = function.forward(context, *args)
        else:
            bound = inspect.signature(function.forward).bind(*args)
            bound.apply_defaults()
            args = bound.args
            output = function.forward(*args)
            function.setup_context(context, tuple(args), output)
    return Run(tuple(args), as_tuple(output), record)


def backward(
    function: type[Function], record: Record, grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    return as_tuple(backward_rule(function)(Context(record), *grads))


def changed_by_backward(app: Any) -> list[str]:
    """The labels of what backward changes on the context or on the class."""
    run = app.seeded()
    before = _state(run.record, app.function)
    with suppress(Exception), torch.no_grad():
        backward(app.function, run.record, run.incoming())
    after = _state(run.record, app.function)
    return [label for label in after if before.get(label) != after[label]]


def _state(record: Record, function: type[Function]) -> dict[str, Any]:
    """What is on the context and on the class, by label, in a form that can be compared later."""
    own = {f"{function.__name__}.{n}": v for n, v in vars(function).items() if n[:2] != "__"}
    held = record.slots() | {label: v for label, v in own.items() if not callable(v)}
    return {
        label: (id(value), value._version) if isinstance(value, Tensor) else repr(value)
        for label, value in held.items()
    }


def jvp(
    function: type[Function], record: Record, tangents: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    return as_tuple(function.jvp(Context(record, in_jvp=True), *tangents))


def is_classic(function: type[Function]) -> bool:
    """Whether its forward takes the context."""
    return function.setup_context is Function.setup_context


def offers_jvp(function: type[Function]) -> bool:
    return function.jvp is not Function.jvp


def offers_vmap(function: type[Function]) -> bool:
    own = function.generate_vmap_rule or function.vmap is not Function.vmap
    return bool(own) and not is_classic(function)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def tensors(value: Any) -> list[Tensor]:
    """The tensors inside anything that a context may hold."""
    return [leaf for leaf in pytree.leaves(value) if isinstance(leaf, Tensor)]


@final
@dataclass
class Slot:
    """One thing that backward reads."""

    label: str  # "ctx.saved_tensors[0]"
    kind: str  # "input", "output", "copy", "intermediate" or "gradient"
    what: str  # "input `x`"
    name: str = ""  # of the local variable that was saved
    place: source_location.SourceLine | None = None
    type: str = "Tensor"
    lost: float = 0.0
    share: float = 0.0
    graphed: bool = False  # it has a graph, which forward built


def kind_of(value: Any, run: Run, names: tuple[str, ...]) -> tuple[str, str]:
    """What a slot holds: an input, an output, a copy of one of them, or something forward made."""
    found = tensors(value)
    for i, x in enumerate(run.inputs):
        if any(t is x for t in found):
            return "input", f"input {_named(names, i)}"
    for k, y in enumerate(run.outputs):
        if any(t is y for t in found):
            if run.record.is_silent(y):
                return "intermediate", f"output {k}, which is marked non-differentiable"
            return "output", f"output {k}"
    for t in found:
        for i, x in enumerate(run.inputs):
            if t.numel() and same(t, x):
                return "copy", f"a copy of input {_named(names, i)}"
        for k, y in enumerate(run.outputs):
            if t.numel() and same(t, y):
                return "copy", f"a copy of output {k}"
    return "intermediate", "an intermediate that forward made"


def _named(names: tuple[str, ...], i: int) -> str:
    return names[i] if i < len(names) else str(i)
