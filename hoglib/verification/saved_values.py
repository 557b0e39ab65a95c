"""What a Function keeps on its context, and what its code calls that.

The members of tuples, lists, dicts and plain objects are looked at one by one:

opened("ctx.stuff", (a, {"b": c}))      # {"ctx.stuff[0]": a, "ctx.stuff[1]['b']": c}

Their names are the expressions in the line that saves them:

ctx.save_for_backward(x, 1 / x)         # "1 / x" is ctx.saved_tensors[1]
ctx.stuff = (s, c)                      # "s" is ctx.stuff[0]
"""

import ast
import copy
import linecache
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hoglib._core.source_location import SourceLine, is_user_code

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


LONGEST = 40  # characters of an expression that is a name


class Noted(NamedTuple):
    """Where something was put on a context, and what the code there calls it."""

    place: SourceLine | None
    name: str


@final
class SavedAt:
    """The place in user code that saves values on a context, while its frame is alive."""

    def __init__(self, frame: FrameType, target: str) -> None:
        """target: "save_for_backward", or the attribute that is set."""
        self._frame: FrameType | None = frame
        self._target = target
        code = frame.f_code
        self.place = SourceLine(code.co_filename, frame.f_lineno)
        self._expressions = _expressions(code.co_filename, frame.f_lineno, target)

    def noted(self, value: Any, position: int, keys: Sequence[Key]) -> Noted:
        """Of a saved value, or of a member of it. position: of the argument; 0 for an attribute."""
        expression, rest = _at(self._expressions, position, keys)
        named = expression is not None and not rest and not isinstance(expression, ast.Starred)
        text = _text(expression) if named and expression is not None else ""
        if text:
            return Noted(self.place, text)
        if local := self._local(value):
            return Noted(self.place, local)
        return Noted(self.place, _indexed(expression, rest))

    def _local(self, value: Any) -> str:
        """The name of a local variable that is the value, there or further out."""
        frame = self._frame
        if value is None or isinstance(value, bool | int | str):
            return ""  # the same object may have any name
        while frame is not None and is_user_code(frame.f_code.co_filename):
            for name, local in frame.f_locals.items():
                if local is value and name != "ctx":
                    return name
            if "ctx" in frame.f_locals and frame.f_code.co_name in ("forward", "setup_context"):
                return ""
            frame = frame.f_back
        return ""

    def forget(self) -> None:
        """Let the frame go, and what it holds."""
        self._frame = None


def _expressions(file: str, line: int, target: str) -> Sequence[ast.expr]:
    """The arguments of the call that saves, or the value that is assigned; none without a source."""
    lines = linecache.getlines(file)
    text = lines[line - 1] if line <= len(lines) else ""
    return _found(file, len(lines), text, line, target)


@lru_cache(maxsize=1024)
def _found(file: str, count: int, text: str, line: int, target: str) -> Sequence[ast.expr]:
    """count, text: the number of lines, and the one in question: a file is the same as long as they
    are."""
    calls: list[ast.Call] = []
    values: list[ast.expr] = []
    for node in _statements(_tree("".join(linecache.getlines(file))), line):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == target:
                calls.append(node)
        elif isinstance(node, ast.Assign):
            for one in node.targets:
                values += _assigned(one, node.value, target)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            values += _assigned(node.target, node.value, target)
    return calls[-1].args if calls else values[:1]


def _statements(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """The nodes that contain a line, from the outermost."""
    for node in ast.iter_child_nodes(tree):
        first = getattr(node, "lineno", None)
        if first is None or first <= line <= (getattr(node, "end_lineno", None) or first):
            yield node
            yield from _statements(node, line)


def _assigned(to: ast.expr, value: ast.expr, target: str) -> list[ast.expr]:
    if isinstance(to, ast.Attribute):
        return [value] if to.attr == target else []
    if not isinstance(to, ast.Tuple | ast.List) or not isinstance(value, ast.Tuple | ast.List):
        return []
    if len(to.elts) != len(value.elts):
        return []
    pairs = zip(to.elts, value.elts, strict=True)
    return [found for t, v in pairs for found in _assigned(t, v, target)]


@lru_cache(maxsize=16)
def _tree(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _at(
    expressions: Sequence[ast.expr], position: int, keys: Sequence[Key]
) -> tuple[ast.expr | None, list[Key]]:
    """The expression for a member, and the keys that lead from it to the member."""
    starred = next((i for i, e in enumerate(expressions) if isinstance(e, ast.Starred)), None)
    if starred is not None and position >= starred:
        if starred + 1 < len(expressions):  # how many of them the starred one gives is not known
            return None, []
        return expressions[starred], [("index", position - starred), *keys]
    if position >= len(expressions):
        return None, []
    found, rest = expressions[position], list(keys)
    while rest and (inner := _member(found, rest[0])) is not None:
        found, rest = inner, rest[1:]
    return found, rest


def _member(expression: ast.expr, key: Key) -> ast.expr | None:
    how, which = key
    if how == "index" and isinstance(expression, ast.Tuple | ast.List):
        starred = any(isinstance(e, ast.Starred) for e in expression.elts)
        return None if starred or which >= len(expression.elts) else expression.elts[which]
    if how == "key" and isinstance(expression, ast.Dict):
        for name, value in zip(expression.keys, expression.values, strict=True):
            if isinstance(name, ast.Constant) and name.value == which:
                return value
    if how == "key" and isinstance(expression, ast.Call):  # dict(a=x)
        return next((k.value for k in expression.keywords if k.arg == which), None)
    return None


def _text(expression: ast.expr) -> str:
    """The expression as code; empty for a long one, a plain number and a function."""
    if isinstance(expression, ast.Constant | ast.Lambda):
        return ""
    text = ast.unparse(expression)
    return text if len(text) <= LONGEST else ""


def _indexed(expression: ast.expr | None, keys: Sequence[Key]) -> str:
    """How a member of a variable is written: `things[1]`."""
    inner = expression.value if isinstance(expression, ast.Starred) else expression
    if inner is None or not isinstance(inner, ast.Name | ast.Attribute | ast.Subscript):
        return ""
    text = _text(inner)
    for how, which in keys:
        text += f".{which}" if how == "attribute" else f"[{which!r}]"
    return text
