"""The forward, backward and jvp of a custom Function as plain functions, with a context that records.

Autograd hides what a Function does: it sums gradients that are too large, casts those of another dtype,
and does not show what was saved. Run as plain functions, with the context below instead of autograd's,
they show it.
"""

import dis
import inspect
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import isfunction
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from hoglib._core import pytree, source_location
from hoglib._core.element_differences import random_like
from hoglib._core.pytree import is_float
from hoglib._core.source_location import is_user_code
from hoglib._core.state import same
from hoglib._core.torch_internals import backward_rule
from hoglib.verification.saved_values import Noted, SavedAt, exchanged, opened, steps_to

SAVED = "ctx.saved_tensors"


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
    # by attribute; saved tensors by SAVED
    written: dict[str, SavedAt] = field(default_factory=dict)
    notes: dict[str, Noted] = field(default_factory=dict)

    def held(self, *, in_jvp: bool = False) -> dict[str, Any]:
        """Everything backward, or jvp, may read, by how it is written."""
        saved = self.for_forward if in_jvp else self.saved
        held = {f"{SAVED}[{k}]": value for k, value in enumerate(saved)}
        return held | {f"ctx.{name}": value for name, value in self.attributes.items()}

    def slots(self, *, in_jvp: bool = False) -> dict[str, Any]:
        """The same, with the members of containers instead of these."""
        slots: dict[str, Any] = {}
        for label, value in self.held(in_jvp=in_jvp).items():
            slots |= opened(label, value)
        return slots

    def with_slots(self, slots: dict[str, Any], *, in_jvp: bool = False) -> "Record":
        """The same with other values in the slots."""
        held = {
            label: exchanged(label, value, slots)
            for label, value in self.held(in_jvp=in_jvp).items()
        }
        saved = tuple(value for label, value in held.items() if label.startswith(SAVED))
        rest = {name: held[f"ctx.{name}"] for name in self.attributes}
        changed: dict[str, Any] = {"for_forward" if in_jvp else "saved": saved}
        return replace(self, attributes=rest, **changed)

    def describe(self) -> None:
        """Note what the code calls each slot, as long as its variables are there."""
        for k, value in enumerate(self.saved or self.for_forward):
            self._describe(f"{SAVED}[{k}]", value, k, SAVED)
        for name, value in self.attributes.items():
            self._describe(f"ctx.{name}", value, 0, name)
        for at in self.written.values():
            at.forget()

    def _describe(self, label: str, value: Any, position: int, written: str) -> None:
        at = self.written.get(written)
        if at is None:
            return
        self.notes[label] = at.noted(value, position, ())
        for member, part in opened(label, value).items():
            self.notes[member] = at.noted(part, position, steps_to(label, value, member) or ())

    def noted(self, label: str) -> Noted:
        return self.notes.get(label, Noted(None, ""))

    def is_silent(self, output: Any) -> bool:
        return any(output is y for y in self.silent)


@final
class Context(FunctionCtx):
    """Replaces autograd's context. What is in its `__dict__` is the Function's, and nothing else."""

    __slots__ = ("_hoglib_in_jvp", "_hoglib_record")

    def __init__(self, record: Record, *, in_jvp: bool = False) -> None:
        object.__setattr__(self, "_hoglib_record", record)
        object.__setattr__(self, "_hoglib_in_jvp", in_jvp)
        object.__setattr__(self, "__dict__", record.attributes)

    def save_for_backward(self, *tensors: Any) -> None:
        _of(self).saved = tensors
        _note(self, SAVED, "save_for_backward")

    def save_for_forward(self, *tensors: Any) -> None:
        _of(self).for_forward = tensors
        if SAVED not in _of(self).written:
            _note(self, SAVED, "save_for_forward")

    def mark_dirty(self, *tensors: Any) -> None:
        _of(self).dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        _of(self).silent = tensors

    def set_materialize_grads(self, value: bool) -> None:
        _of(self).materialize = value

    def name(self) -> str:
        return "Backward"

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        return _of(self).needed

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        in_jvp: bool = object.__getattribute__(self, "_hoglib_in_jvp")
        return _of(self).for_forward if in_jvp else _of(self).saved

    saved_variables = saved_for_forward = saved_tensors

    def __setattr__(self, name: str, value: Any) -> None:
        _of(self).attributes[name] = value
        _note(self, name, name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ctx has no attribute {name!r}")


def _of(context: Context) -> Record:
    record: Record = object.__getattribute__(context, "_hoglib_record")
    return record


def _note(context: Context, written: str, target: str) -> None:
    """The line of user code that saves."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if is_user_code(frame.f_code.co_filename):
        _of(context).written[written] = SavedAt(frame, target)


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
    """forward, and setup_context where there is one, as autograd runs them: without a graph, on inputs
    that require grad where it is needed, which forward may ask for."""
    record = Record(tuple(needed))
    context = Context(record)
    own = [
        x for x, is_wanted in zip(args, needed, strict=False)
        if is_wanted and is_float(x) and not x.requires_grad
    ]  # fmt: skip
    try:
        for x in own:
            x.requires_grad_()
        with torch.no_grad():
            if is_classic(function):
                output = function.forward(context, *args)
            else:
                bound = inspect.signature(function.forward).bind(*args)
                bound.apply_defaults()
                args = bound.args
                output = function.forward(*args)
                function.setup_context(context, tuple(args), output)
    finally:
        for x in own:
            with suppress(RuntimeError):  # it was changed in place, and has a graph
                x.requires_grad_(False)
    record.describe()
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
    held = record.held() | {label: v for label, v in own.items() if not callable(v)}
    return {
        label: (id(value), value._version) if isinstance(value, Tensor) else repr(value)
        for label, value in held.items()
    }


MEMORY = frozenset({"storage", "untyped_storage", "data_ptr", "resize_", "set_"})


def handles_memory(function: type[Function]) -> bool:
    """Whether forward or backward handles the memory of tensors itself (`x.storage().resize_(0)`)."""
    rules = map(inspect.unwrap, (function.forward, backward_rule(function)))
    return any(MEMORY.intersection(rule.__code__.co_names) for rule in rules if isfunction(rule))


def is_classic(function: type[Function]) -> bool:
    """Whether its forward takes the context."""
    return function.setup_context is Function.setup_context


def offers_jvp(function: type[Function]) -> bool:
    return function.jvp is not Function.jvp and not is_stub(function.jvp)


def is_stub(rule: Any) -> bool:
    """Whether a rule is declared without a formula: its body is a docstring, `pass` or `return None`,
    or raises NotImplementedError, as that of torch.autograd.Function does."""
    code = getattr(inspect.unwrap(rule), "__code__", None)
    if code is None:
        return False
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _NO_WORK]
    does = {one.opname for one in instructions}
    if does <= {"LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}:
        return all(x.argval is None for x in instructions if x.opname.endswith("_CONST"))
    first = instructions[0]
    raises = first.opname == "LOAD_GLOBAL" and first.argval == "NotImplementedError"
    return raises and does.isdisjoint({"RETURN_VALUE", "RETURN_CONST"})


_NO_WORK = ("RESUME", "NOP", "PUSH_NULL", "CACHE", "COPY_FREE_VARS")


def offers_vmap(function: type[Function]) -> bool:
    own = function.generate_vmap_rule or function.vmap is not Function.vmap
    return bool(own) and not is_classic(function)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


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
    share: float = 0.0
    graphed: bool = False  # it has a graph, which forward built


def kind_of(value: Any, run: Run, names: tuple[str, ...]) -> tuple[str, str]:
    """What a slot holds: an input, an output, a copy of one of them, or something forward made."""
    found = pytree.tensors(value)
    labels = [*names, *range(len(names), len(run.inputs))]
    inputs = [(f"input {label}", x) for label, x in zip(labels, run.inputs, strict=False)]
    outputs = [(f"output {k}", y) for k, y in enumerate(run.outputs)]
    for what, x in inputs:
        if any(t is x for t in found):
            return "input", what
    for what, y in outputs:
        if any(t is y for t in found):
            if run.record.is_silent(y):
                return "intermediate", f"{what}, which is marked non-differentiable"
            return "output", what
    for t in found:
        for what, x in (*inputs, *outputs):
            if t.numel() and same(t, x):
                return "copy", f"a copy of {what}"
    return "intermediate", "an intermediate that forward made"
