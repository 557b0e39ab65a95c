"""The forward, backward and jvp of a custom Function as plain functions, with a context that records.

Autograd hides what a Function does: it sums gradients that are too large, casts those of another dtype,
and does not show what was saved. Run as plain functions, with the context below instead of autograd's,
they show it. The members of tuples, lists, dicts and plain objects that are saved are looked at one by
one, as `ctx.stuff[1]['b']`; their names are the expressions in the line that saves them:

    ctx.save_for_backward(x, 1 / x)         # "1 / x" is ctx.saved_tensors[1]
    ctx.stuff = (s, c)                      # "s" is ctx.stuff[0]
"""

import ast
import copy
import dis
import inspect
import linecache
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from inspect import isfunction
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from hoglib._core.modules.state import same
from hoglib._core.numerics.element_differences import random_like
from hoglib._core.runtime import source_location
from hoglib._core.runtime.source_location import SourceLine, is_user_code
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_internals import backward_rule

MAX_NESTING = 5
LIBRARIES = ("builtins", "torch", "numpy", "collections")  # whose objects are left whole
Key = tuple[str, Any]  # how a member is reached, "index", "key" or "attribute"; and by what
# Kinds whose attributes are none of the Function's values, or cannot be exchanged.
OPAQUE = (
    Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.dtype,
    torch.device, torch.Size, torch.Generator, torch.autograd.function.FunctionCtx, BaseException,
)  # fmt: skip


def opened(value: object, depth: int = MAX_NESTING) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """The innermost members, with the keys that lead to them; the value itself if it is no container,
    or an empty one. depth: how many levels are opened."""
    members = list(_members(value)) if depth else []
    if not members:
        yield (), value
    for key, member in members:
        yield from (((key, *keys), part) for keys, part in opened(member, depth - 1))


def exchanged(label: str, value: Any, members: Mapping[str, Any], depth: int = MAX_NESTING) -> Any:
    """The value with other members, by how they are written; new containers of its kinds."""
    own = list(_members(value)) if depth else []
    if not own:
        return members.get(label, value)
    parts = [(key, exchanged(spelled(label, [key]), x, members, depth - 1)) for key, x in own]
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


def spelled(label: str, keys: Sequence[Key]) -> str:
    """How a member is written."""
    for how, key in keys:
        label += f".{key}" if how == "attribute" else f"[{key!r}]"
    return label


def _members(value: object) -> Iterator[tuple[Key, Any]]:
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


def _is_plain(value: object) -> bool:
    """Whether it is an object of a class that a user wrote, which keeps values in attributes."""
    kind = type(value)
    own: Callable[..., Any] | None = getattr(kind, "__setattr__", None)
    plain = hasattr(value, "__dict__") and own is object.__setattr__ and not callable(value)
    return plain and kind.__module__.split(".")[0] not in LIBRARIES


MAX_NAME_LENGTH = 40  # characters of an expression that is a name
LOCAL_NESTING = 2  # levels of a local variable that are looked at


class Noted(NamedTuple):
    """Where something was put on a context, and what the code there calls it."""

    place: SourceLine | None
    name: str


@final
class SavedAt:
    """The place in user code that saves values on a context, while its frame is alive."""

    def __init__(self, frame: FrameType, target: str) -> None:
        """target: "save_for_backward", or the attribute that is set."""
        self._frame, self.place = frame, SourceLine(frame.f_code.co_filename, frame.f_lineno)
        self._expressions = _expressions(*self.place, target)

    def noted(self, value: object, position: int, keys: Sequence[Key]) -> Noted:
        """Of a saved value, or of a member of it. position: of the argument; 0 for an attribute."""
        expression = _pick(self._expressions, position, keys)
        text = "" if expression is None else _expression_text(expression)
        return Noted(self.place, text or self._local(value))

    def _local(self, value: object) -> str:
        """The local variable that is the value, or holds it, there or further out."""
        if value is None or isinstance(value, bool | int | str):
            return ""  # the same object may have any name
        frame: FrameType | None = self._frame
        while frame is not None and is_user_code(frame.f_code.co_filename):
            held = (
                (spelled(name, keys), part)
                for depth in (0, LOCAL_NESTING)
                for name, x in frame.f_locals.items()
                if name != "ctx"
                for keys, part in opened(x, depth)
            )
            if found := next((label for label, part in held if part is value), ""):
                return found
            # frames outside of forward belong to the caller, whose names mean other things
            if "ctx" in frame.f_locals and frame.f_code.co_name in ("forward", "setup_context"):
                return ""
            frame = frame.f_back
        return ""


def _expressions(file: str, line: int, target: str) -> Sequence[ast.expr]:
    """The arguments of the call that saves, or the value that is assigned; none without a source."""
    lines = linecache.getlines(file)
    return _find_expressions(file, len(lines), "".join(lines[line - 1 : line]), line, target)


@lru_cache(maxsize=1024)
def _find_expressions(file: str, n: int, text: str, line: int, target: str) -> Sequence[ast.expr]:
    """n, text: the number of lines, and the one in question: a file is the same as long as they
    are."""
    saved: list[ast.expr] = []
    assigned: list[ast.expr] = []
    for node in _enclosing_nodes(_parse_source("".join(linecache.getlines(file))), line):
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if name == target:
                saved = node.args
            case ast.Assign(value=value):
                for one in node.targets:
                    assigned += _assigned_expressions(one, value, target)
            case ast.AnnAssign(target=one, value=ast.expr() as value):
                assigned += _assigned_expressions(one, value, target)
    return saved or assigned[:1]


def _enclosing_nodes(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """The nodes that contain a line, from the outermost."""
    for node in ast.iter_child_nodes(tree):
        first = getattr(node, "lineno", None)
        if first is None or first <= line <= (getattr(node, "end_lineno", None) or first):
            yield node
            yield from _enclosing_nodes(node, line)


def _assigned_expressions(to: ast.expr, value: ast.expr, target: str) -> list[ast.expr]:
    if isinstance(to, ast.Attribute):
        return [value] if to.attr == target else []
    if not isinstance(to, ast.Tuple | ast.List) or not isinstance(value, ast.Tuple | ast.List):
        return []
    pairs = zip(to.elts, value.elts, strict=True) if len(to.elts) == len(value.elts) else ()
    return [found for t, v in pairs for found in _assigned_expressions(t, v, target)]


@lru_cache(maxsize=16)
def _parse_source(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _pick(expressions: Sequence[ast.expr], position: int, keys: Sequence[Key]) -> ast.expr | None:
    """The expression for a member; None where there is none, or where a starred one is before it."""
    before = expressions[: position + 1]
    if len(before) <= position or any(isinstance(e, ast.Starred) for e in before):
        return None
    found: ast.expr | None = before[position]
    for key in keys:
        found = None if found is None else _member(found, key)
    return found


def _member(expression: ast.expr, key: Key) -> ast.expr | None:
    how, which = key
    match expression:
        case ast.Tuple(elts=members) | ast.List(elts=members) if how == "index":
            starred = any(isinstance(e, ast.Starred) for e in members)
            return None if starred or which >= len(members) else members[which]
        case ast.Dict() if how == "key":
            pairs = zip(expression.keys, expression.values, strict=True)
            named = (x for n, x in pairs if isinstance(n, ast.Constant) and n.value == which)
            return next(named, None)
        case ast.Call() if how == "key":  # dict(a=x)
            return next((k.value for k in expression.keywords if k.arg == which), None)
    return None


def _expression_text(expression: ast.expr) -> str:
    """The expression as code; empty for a long one, a plain number and a function."""
    if isinstance(expression, ast.Constant | ast.Lambda):
        return ""
    text = ast.unparse(expression)
    return text if len(text) <= MAX_NAME_LENGTH else ""


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
        held = self.held(in_jvp=in_jvp).items()
        return {spelled(label, keys): part for label, value in held for keys, part in opened(value)}

    def with_slots(self, slots: dict[str, Any], *, in_jvp: bool = False) -> "Record":
        """The same with other values in the slots."""
        own = self.held(in_jvp=in_jvp)
        held = {label: exchanged(label, value, slots) for label, value in own.items()}
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
        self.written.clear()  # which lets the frames go, and what they hold

    def _describe(self, label: str, value: object, position: int, place: str) -> None:
        at = self.written.get(place)
        if at is not None:
            for keys, part in (((), value), *opened(value)):
                self.notes[spelled(label, keys)] = at.noted(part, position, keys)

    def noted(self, label: str) -> Noted:
        return self.notes.get(label, Noted(None, ""))

    def is_silent(self, output: object) -> bool:
        return any(output is y for y in self.silent)


@final
class Context(FunctionCtx):
    """Replaces autograd's context. What is in its `__dict__` is the Function's, and nothing else."""

    __slots__ = ("_hoglib_in_jvp", "_hoglib_record")
    _hoglib_in_jvp: bool
    _hoglib_record: Record

    def __init__(self, record: Record, *, in_jvp: bool = False) -> None:
        object.__setattr__(self, "_hoglib_record", record)
        object.__setattr__(self, "_hoglib_in_jvp", in_jvp)
        object.__setattr__(self, "__dict__", record.attributes)

    def save_for_backward(self, *tensors: Any) -> None:
        self._hoglib_record.saved = tensors
        _note_saving_line(self, SAVED, "save_for_backward")

    def save_for_forward(self, *tensors: Any) -> None:
        self._hoglib_record.for_forward = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        self._hoglib_record.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._hoglib_record.silent = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._hoglib_record.materialize = value

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        return self._hoglib_record.needed

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        record = self._hoglib_record
        return record.for_forward if self._hoglib_in_jvp else record.saved

    saved_variables = saved_for_forward = saved_tensors

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "needs_input_grad":
            self._hoglib_record.needed = value
            return
        self._hoglib_record.attributes[name] = value
        _note_saving_line(self, name, name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ctx has no attribute {name!r}")


def _note_saving_line(context: Context, written: str, target: str) -> None:
    """The line of user code that saves."""
    # the methods of this context are between the user's line and here, as many as there may be
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if is_user_code(frame.f_code.co_filename):
        context._hoglib_record.written[written] = SavedAt(frame, target)


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
    wanted = (x for x, needs in zip(args, needed, strict=False) if needs and is_float(x))
    own = [x for x in wanted if not x.requires_grad]
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


MEMORY = frozenset({"storage", "untyped_storage", "data_ptr", "resize_", "set_"})


def handles_memory(function: type[Function]) -> bool:
    """Whether forward or backward handles the memory of tensors itself (`x.storage().resize_(0)`)."""
    rules = map(inspect.unwrap, (function.forward, backward_rule(function)))
    return any(MEMORY.intersection(rule.__code__.co_names) for rule in rules if isfunction(rule))


def is_classic(function: type[Function]) -> bool:
    """Whether its forward takes the context."""
    return function.setup_context is Function.setup_context


def is_surrogate(function: object) -> bool:
    """Whether its class says that its gradient differs from the derivative on purpose."""
    return getattr(function, "surrogate", False) is True


def offers_jvp(function: type[Function]) -> bool:
    return function.jvp is not Function.jvp and not is_stub(function.jvp)


_NO_WORK = ("RESUME", "NOP", "PUSH_NULL", "CACHE", "COPY_FREE_VARS")


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


def offers_vmap(function: type[Function]) -> bool:
    own = function.generate_vmap_rule or function.vmap is not Function.vmap
    return bool(own) and not is_classic(function)


def as_tuple(value: object) -> tuple[Any, ...]:
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


def kind_of(value: object, run: Run, names: tuple[str, ...]) -> tuple[str, str]:
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
