"""The user's lines of code, for warnings and messages."""

import linecache
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import nn

from hoglib.errors import HoglibError

_HOGLIB = str(Path(__file__).absolute().parents[2]) + os.sep
_TORCH = os.path.dirname(os.path.abspath(str(torch.__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
# Files of hoglib with differentiable functions, which `verify` treats as user code.
_DEFINING = "ops/", "nn.py", "_core/torch_api/mixed_precision.py", "_core/remat/recomputation.py"
_DEFINES_FUNCTIONS = tuple(os.path.join(_HOGLIB, *name.split("/")) for name in _DEFINING)
# functions through which a torch call reaches a mode
_MODE_HANDLERS = ("__torch_function__", "__torch_dispatch__", "_constructor", "_constructed")
_ENTRY = r'File "(.+)", line (\d+), in (\S+)'
_MAX_QUOTED = 100  # characters of a source line in a message
Stack = FrameType | TracebackType | Sequence[str]  # strings: from `traceback.format_stack`


class SourceLine(NamedTuple):
    """A line of code; str() is "file:line: `source`"."""

    file: str
    line: int

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        path = self.file
        if not path.startswith("<"):
            relative = os.path.relpath(path)
            path = path if relative.startswith("..") else relative
        source = self.source
        if len(source) > _MAX_QUOTED:
            source = source[: _MAX_QUOTED - 3] + "..."
        code = f": `{source}`" if source else ""
        return f"{path}:{self.line}{code}"


def warn(message: str) -> None:
    """Gives a UserWarning that points at the innermost line outside hoglib and torch."""
    level = 2
    # not sys._getframe(0): a frame that holds itself keeps callers' tensors until a garbage collection
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and _is_library(caller.f_code.co_filename):
        level, caller = level + 1, caller.f_back
    warnings.warn(message, stacklevel=level)


_WARNED: set[str] = set()  # messages given, and checks made, in this process


def warn_once(message: str) -> None:
    """Gives a UserWarning, unless this process has given it before.

    Python's own filter forgets shown warnings whenever code calls `warnings.catch_warnings`.
    """
    if first_time(message):
        warn(message)


def first_time(text: str) -> bool:
    """Whether this process calls with this text for the first time; for checks before a warning."""
    new = text not in _WARNED
    _WARNED.add(text)
    return new


def forget_warned() -> None:
    """Forgets all warnings and checks of this process, so that each is given and made again."""
    _WARNED.clear()


def is_user_file(file: str) -> bool:
    """Whether a file belongs neither to hoglib nor to torch."""
    return not (file.startswith("<") or _is_library(file))


def _is_library(file: str) -> bool:
    return file.startswith((_HOGLIB, _TORCH)) or os.path.basename(file) == "contextlib.py"


def is_user_code(file: str) -> bool:
    """Whether a file may define the function to be verified: a file outside Python's standard library,
    torch and hoglib, or a file with hoglib's own differentiable functions."""
    if file.startswith(_STDLIB) and "-packages" not in file:
        return False
    return not (file.startswith((_TORCH, "<frozen")) or _is_machinery(file))


def _is_machinery(file: str) -> bool:
    """Whether a file of hoglib runs or verifies functions, instead of defining differentiable ones."""
    return file.startswith(_HOGLIB) and not file.startswith(_DEFINES_FUNCTIONS)


def torch_call_line() -> SourceLine | None:
    """The user's line with the torch call that a mode handles; None for a call by hoglib itself."""
    calls = dropwhile(lambda entry: entry[2] not in _MODE_HANDLERS, _entries(sys._getframe(1)))
    return _innermost_user_line(islice(calls, 1, None))


def caller_line() -> SourceLine | None:
    """The user's line that called hoglib; None if hoglib's machinery called itself."""
    entries = _entries(sys._getframe(1))
    return _innermost_user_line(dropwhile(lambda entry: _is_machinery(entry[0]), entries))


def entry_keywords() -> tuple[str, ...]:
    """The keyword-only arguments of the public function that the user's code called. Its decorator,
    with none, is skipped."""
    codes = [frame.f_code for frame, _ in walk_stack(sys._getframe(1))]
    inside = takewhile(lambda code: code.co_filename.startswith(_HOGLIB), codes)
    own = [code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount] for code in inside]
    return next(filter(None, reversed(own)), ())


def _entries(stack: Stack) -> Iterator[tuple[str, int, str]]:
    """(file, line, function) of each entry of a stack, innermost first."""
    if isinstance(stack, FrameType | TracebackType):
        frames = walk_stack(stack) if isinstance(stack, FrameType) else [*walk_tb(stack)][::-1]
        yield from ((at.f_code.co_filename, line, at.f_code.co_name) for at, line in frames)
    else:
        found = (re.search(_ENTRY, entry) for entry in reversed(stack))
        yield from ((one[1], int(one[2]), one[3]) for one in found if one)


def _innermost_user_line(entries: Iterable[tuple[str, int, str]]) -> SourceLine | None:
    """The first line of user code from an entry outwards; None if hoglib's machinery comes before."""
    for file, line, function in entries:
        if _is_machinery(file) and function not in _MODE_HANDLERS:
            return None
        if is_user_code(file):
            return SourceLine(file, line)
    return None


def innermost_line(stack: Sequence[str]) -> SourceLine | None:
    """`_innermost_user_line` of a stack from `traceback.format_stack`."""
    return _innermost_user_line(_entries(stack))


def user_line(stack: Stack | None = None) -> SourceLine | None:
    """The innermost line outside hoglib and torch, in a stack from `traceback.format_stack`, a
    traceback, or the caller's stack."""
    entries = _entries(sys._getframe(1) if stack is None else stack)
    return next((SourceLine(file, line) for file, line, _ in entries if is_user_file(file)), None)


def running_module(method: str = "") -> nn.Module | None:
    """The innermost module with a running method whose name begins with `method`."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    owners = (x.f_locals.get("self") for x in frames if x.f_code.co_name.startswith(method))
    return next((owner for owner in owners if isinstance(owner, nn.Module)), None)


def raising_modules(error: BaseException) -> list[nn.Module]:
    """The modules in the traceback of an error, innermost first."""
    owners = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    return [owner for owner in owners if isinstance(owner, nn.Module)][::-1]


def error_line(error: BaseException) -> SourceLine | None:
    """The innermost line of user code in the traceback of an error."""
    entries = _entries(error.__traceback__ or ())
    return next((SourceLine(file, line) for file, line, _ in entries if is_user_code(file)), None)


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """(frame, line) of the frames in the tracebacks of an error and its causes."""
    cause: BaseException | None = error
    seen = set()  # the context of a cause may be the error itself
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield from walk_tb(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def format_error(error: BaseException) -> str:
    """The type and first line of an error, and the line of user code that raised it."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300].rstrip(". ")
    line = error_line(error)
    return f"{text} (at {line})" if line else text


def error_text(error: BaseException) -> str:
    """The message of an error, with its type unless it is an error of hoglib."""
    text = str(error)
    return text if isinstance(error, HoglibError) else f"{type(error).__name__}: {text}"
