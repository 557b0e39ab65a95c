"""Run the forward, backward and jvp of a custom Function as plain functions, on a recording context.

Autograd hides errors of a Function: it sums a gradient of too large a shape, casts a gradient to the
dtype of the input, and does not show the saved values. Plain calls, with the class Context in place of
autograd's context, show all of that. Saved tuples, lists, dicts and plain objects are opened, and each
member has a label such as `ctx.stuff[1]['b']`. Its name is the expression in the user's saving line:

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

MAX_NESTING = 5  # levels of nested containers to open
LIBRARIES = ("builtins", "torch", "numpy", "collections")  # objects of their classes are not opened
# ("index", 1), ("key", "b") or ("attribute", "scale"): one step into a container
Key = tuple[str, Any]
# Types not to open: their attributes are not values of the Function, or cannot be replaced.
OPAQUE = (
    Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.dtype,
    torch.device, torch.Size, torch.Generator, torch.autograd.function.FunctionCtx, BaseException,
)  # fmt: skip


def walk(value: object, depth: int = MAX_NESTING) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """The innermost members of a container, each with the keys that lead to it. An empty container, and
    a plain value, is its own only member. depth: how many levels to open."""
    members = list(_members(value)) if depth else []
    if not members:
        yield (), value
    for key, member in members:
        yield from (((key, *keys), part) for keys, part in walk(member, depth - 1))


def exchange(label: str, value: Any, members: Mapping[str, Any], depth: int = MAX_NESTING) -> Any:
    """A copy of a container with new values for the members with these labels."""
    own = list(_members(value)) if depth else []
    if not own:
        return members.get(label, value)
    parts = [(key, exchange(path_of(label, [key]), x, members, depth - 1)) for key, x in own]
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


def path_of(label: str, keys: Sequence[Key]) -> str:
    """The label of a member: ("ctx.stuff", [("index", 1), ("key", "b")]) -> "ctx.stuff[1]['b']"."""
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
    """Whether the value is an instance of a user's class that keeps its data in `__dict__`."""
    kind = type(value)
    own: Callable[..., Any] | None = getattr(kind, "__setattr__", None)
    plain = hasattr(value, "__dict__") and own is object.__setattr__ and not callable(value)
    return plain and kind.__module__.split(".")[0] not in LIBRARIES


MAX_NAME_LENGTH = 40  # characters; a longer expression is not used as a name
LOCAL_NESTING = 2  # levels to open of containers in local variables


class SavedName(NamedTuple):
    """Where a value was saved on a context, and its expression or variable in that line."""

    place: SourceLine | None
    name: str


@final
class SavingLine:
    """The line of user code that saves values on a context; its frame has the local variables."""

    def __init__(self, frame: FrameType, target: str) -> None:
        """target: "save_for_backward", or the name of the assigned attribute."""
        self._frame, self.place = frame, SourceLine(frame.f_code.co_filename, frame.f_lineno)
        self._expressions = _expressions(*self.place, target)

    def noted(self, value: object, position: int, keys: Sequence[Key]) -> SavedName:
        """The note on a saved value, or on its member at `keys`. position: among the arguments of
        save_for_backward; 0 for an attribute."""
        expression = _pick(self._expressions, position, keys)
        text = "" if expression is None else _expression_text(expression)
        return SavedName(self.place, text or self._local(value))

    def _local(self, value: object) -> str:
        """The local variable that is or contains the value, in this frame or in an outer one."""
        if value is None or isinstance(value, bool | int | str):
            return ""  # interned objects: any variable may hold this object
        frame: FrameType | None = self._frame
        while frame is not None and is_user_code(frame.f_code.co_filename):
            held = (
                (path_of(name, keys), part)
                for depth in (0, LOCAL_NESTING)
                for name, x in frame.f_locals.items()
                if name != "ctx"
                for keys, part in walk(x, depth)
            )
            if found := next((label for label, part in held if part is value), ""):
                return found
            # frames outside of forward belong to the caller of the Function: other names, other
            # meanings
            if "ctx" in frame.f_locals and frame.f_code.co_name in ("forward", "setup_context"):
                return ""
            frame = frame.f_back
        return ""


def _expressions(file: str, line: int, target: str) -> Sequence[ast.expr]:
    """The arguments of the saving call, or the assigned value; empty if there is no source code."""
    lines = linecache.getlines(file)
    return _find_expressions(file, len(lines), "".join(lines[line - 1 : line]), line, target)


@lru_cache(maxsize=1024)
def _find_expressions(file: str, n: int, text: str, line: int, target: str) -> Sequence[ast.expr]:
    """Cached `_expressions`. n, text: number of lines of the file, and the saving line. Both are part
    of the cache key only: an edited file is parsed again."""
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
    """The nodes of the syntax tree that contain a line, the outermost first."""
    for node in ast.iter_child_nodes(tree):
        first = getattr(node, "lineno", None)
        if first is None or first <= line <= (getattr(node, "end_lineno", None) or first):
            yield node
            yield from _enclosing_nodes(node, line)


def _assigned_expressions(to: ast.expr, value: ast.expr, target: str) -> list[ast.expr]:
    """The values that a (tuple) assignment gives to the attribute `target`."""
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
    """The expression of a member; None if unknown, e.g. behind a starred argument."""
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
    """The source code of an expression; empty for a long one, a constant and a lambda."""
    if isinstance(expression, ast.Constant | ast.Lambda):
        return ""
    text = ast.unparse(expression)
    return text if len(text) <= MAX_NAME_LENGTH else ""


SAVED = "ctx.saved_tensors"


@final
@dataclass
class Record:
    """What one run of a Function saved and declared on its context."""

    needed: tuple[bool, ...]  # ctx.needs_input_grad
    saved: tuple[Any, ...] = ()  # arguments of save_for_backward
    for_forward: tuple[Any, ...] = ()  # arguments of save_for_forward
    dirty: tuple[Any, ...] = ()  # arguments of mark_dirty
    silent: tuple[Any, ...] = ()  # arguments of mark_non_differentiable
    materialize: bool = True  # set_materialize_grads
    attributes: dict[str, Any] = field(default_factory=dict)  # all other attributes of ctx
    # the saving line of each attribute; of save_for_backward under the key SAVED
    written: dict[str, SavingLine] = field(default_factory=dict)
    notes: dict[str, SavedName] = field(default_factory=dict)  # by label; see describe()

    def held(self, *, in_jvp: bool = False) -> dict[str, Any]:
        """All values that backward (or jvp) may read, by label."""
        saved = self.for_forward if in_jvp else self.saved
        held = {f"{SAVED}[{k}]": value for k, value in enumerate(saved)}
        return held | {f"ctx.{name}": value for name, value in self.attributes.items()}

    def slots(self, *, in_jvp: bool = False) -> dict[str, Any]:
        """Like held(), but containers are opened: a label for each innermost member."""
        held = self.held(in_jvp=in_jvp).items()
        return {path_of(label, keys): part for label, value in held for keys, part in walk(value)}

    def with_slots(self, slots: dict[str, Any], *, in_jvp: bool = False) -> "Record":
        """A copy of the record with new values for the slots with these labels."""
        own = self.held(in_jvp=in_jvp)
        held = {label: exchange(label, value, slots) for label, value in own.items()}
        saved = tuple(value for label, value in held.items() if label.startswith(SAVED))
        rest = {name: held[f"ctx.{name}"] for name in self.attributes}
        changed: dict[str, Any] = {"for_forward" if in_jvp else "saved": saved}
        return replace(self, attributes=rest, **changed)

    def describe(self) -> None:
        """Fill `notes`, while the frames with the user's local variables are alive."""
        for k, value in enumerate(self.saved or self.for_forward):
            self._describe(f"{SAVED}[{k}]", value, k, SAVED)
        for name, value in self.attributes.items():
            self._describe(f"ctx.{name}", value, 0, name)
        self.written.clear()  # the frames would keep all local variables alive

    def _describe(self, label: str, value: object, position: int, place: str) -> None:
        at = self.written.get(place)
        if at is not None:
            for keys, part in (((), value), *walk(value)):
                self.notes[path_of(label, keys)] = at.noted(part, position, keys)

    def noted(self, label: str) -> SavedName:
        return self.notes.get(label, SavedName(None, ""))

    def is_silent(self, output: object) -> bool:
        return any(output is y for y in self.silent)


@final
class Context(FunctionCtx):
    """Stands in for autograd's context. Its `__dict__` holds the Function's attributes only."""

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
    """Record the line of user code that saves something on the context."""
    # skip the methods of Context, which lie between the user's frame and this one
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if is_user_code(frame.f_code.co_filename):
        context._hoglib_record.written[written] = SavingLine(frame, target)


class Run(NamedTuple):
    """One forward pass: its arguments, its results, and its context."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    record: Record

    def incoming(self, random: torch.Generator | None = None) -> list[Tensor | None]:
        """Random gradients for the outputs; zeros or None where autograd would pass these."""
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
    """Run forward, and setup_context if defined, as autograd does: under no_grad, with requires_grad
    set on the inputs that need a gradient, because forward may read that flag."""
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
            with suppress(RuntimeError):  # forward changed it in place, so it is no leaf any more
                x.requires_grad_(False)
    record.describe()
    return Run(tuple(args), as_tuple(output), record)


# Methods that read or replace the memory of a tensor.
MEMORY = frozenset({"storage", "untyped_storage", "data_ptr", "resize_", "set_"})


def handles_memory(function: type[Function]) -> bool:
    """Whether forward or backward calls such a method: `x.storage().resize_(0)`."""
    rules = map(inspect.unwrap, (function.forward, backward_rule(function)))
    return any(MEMORY.intersection(rule.__code__.co_names) for rule in rules if isfunction(rule))


def is_classic(function: type[Function]) -> bool:
    """Whether forward takes ctx as its first argument (there is no setup_context)."""
    return function.setup_context is Function.setup_context


def is_surrogate(function: object) -> bool:
    """Whether the class declares by `surrogate = True` that its gradient is no derivative on
    purpose."""
    return getattr(function, "surrogate", False) is True


def offers_jvp(function: type[Function]) -> bool:
    return function.jvp is not Function.jvp and not is_stub(function.jvp)


# Bytecode that does nothing of its own.
_NO_WORK = ("RESUME", "NOP", "PUSH_NULL", "CACHE", "COPY_FREE_VARS")


def is_stub(rule: Any) -> bool:
    """Whether a rule is declared without a formula: its body is only a docstring, `pass` or `return
    None`, or raises NotImplementedError, as the default of torch.autograd.Function does."""
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
    # torch refuses vmap of a Function without setup_context
    own = function.generate_vmap_rule or function.vmap is not Function.vmap
    return bool(own) and not is_classic(function)


def as_tuple(value: object) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@final
@dataclass
class Slot:
    """A value that backward reads from its context."""

    label: str  # e.g. "ctx.saved_tensors[0]"
    kind: str  # "input", "output", "copy", "intermediate" or "gradient"
    what: str  # kind_of()'s description, e.g. "input `x`"
    name: str = ""  # the expression or variable in the saving line
    place: source_location.SourceLine | None = None  # the saving line
    type: str = "Tensor"  # name of the type, as in messages
    share: float = 0.0  # its fraction of the lost second-order term
    graphed: bool = False  # the tensor has a graph, built by forward


def kind_of(value: object, run: Run, names: tuple[str, ...]) -> tuple[str, str]:
    """The kind of a slot and its description: an input, an output, a copy, or an intermediate."""
    found = pytree.tensors(value)
    labels = [*names, *range(len(names), len(run.inputs))]
    inputs = [(f"input {label}", x) for label, x in zip(labels, run.inputs, strict=False)]
    outputs = [(f"output {k}", y) for k, y in enumerate(run.outputs)]
    # identity first: an equal tensor counts as a copy only if no input or output is the saved object
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
