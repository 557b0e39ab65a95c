"""What the code that saves a value on a context calls it: the expression in the line that saves it.

ctx.save_for_backward(x, 1 / x)         # "1 / x" is ctx.saved_tensors[1]
ctx.stuff = (s, c)                      # "s" is ctx.stuff[0]
"""

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple, final

from hoglib._core.source_location import SourceLine, is_user_code
from hoglib.verification.containers import Key

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
    return _found(_Source(file, lines), len(lines), text, line, target)


@final
class _Source:
    """The lines of a file, which are the same as long as their number and the one in question are."""

    def __init__(self, file: str, lines: Sequence[str]) -> None:
        self._file, self.lines = file, lines

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Source) and other._file == self._file

    def __hash__(self) -> int:
        return hash(self._file)


@lru_cache(maxsize=1024)
def _found(source: _Source, count: int, text: str, line: int, target: str) -> Sequence[ast.expr]:
    calls: list[ast.Call] = []
    values: list[ast.expr] = []
    for node in _statements(_tree("".join(source.lines)), line):
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
