"""Warnings that point at the user's line, however deep in hoglib they are given."""

import linecache
import os
import sys
import sysconfig
import warnings
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import nn

from hoglib.errors import HoglibError

_NOT_THE_USERS = tuple(
    folder + os.sep
    for folder in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        os.path.dirname(os.path.abspath(str(torch.__file__))),
    )
)


def warn(message: str) -> None:
    """A UserWarning at the innermost line that belongs neither to hoglib nor to torch."""
    level, frame = 1, sys._getframe()
    caller: FrameType | None = frame
    while caller is not None and _is_hoglib_or_torch(caller.f_code.co_filename):
        level, caller = level + 1, caller.f_back
    warnings.warn(message, stacklevel=level)


def is_user_file(file: str) -> bool:
    """Whether a file belongs neither to hoglib nor to torch."""
    return not (
        file.startswith((*_NOT_THE_USERS, "<")) or os.path.basename(file) == "contextlib.py"
    )


def _is_hoglib_or_torch(file: str) -> bool:
    return file.startswith(_NOT_THE_USERS) or os.path.basename(file) == "contextlib.py"


# === Where in the user's code something happens.

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WATCHES = ("__torch_function__", "__torch_dispatch__")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_HOGLIB = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_VERIFIED = tuple(
    os.path.join(_HOGLIB, *name.split("/"))
    for name in (
        "ops/", "nn.py", "testing/opinfo/", "_core/mixed_precision.py", "_core/norms.py",
        "_core/recomputation.py", "_core/torch_errors.py",
    )
)  # fmt: skip


LONGEST = 100  # characters of a line that are quoted


class SourceLine(NamedTuple):
    """A line of code."""

    file: str
    line: int

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        path = self.file
        if not path.startswith("<"):
            near = os.path.relpath(path)
            path = path if near.startswith("..") else near
        source = self.source if len(self.source) <= LONGEST else self.source[: LONGEST - 3] + "..."
        code = f": `{source}`" if source else ""
        return f"{path}:{self.line}{code}"


def is_user_code(file: str) -> bool:
    """Whether a file belongs neither to Python, nor to torch, nor to hoglib."""
    if file.startswith(_STDLIB) and "-packages" not in file:
        return False
    return not (file.startswith((_TORCH, "<frozen")) or _ours(file))


def _ours(file: str) -> bool:
    """hoglib, but for the ops, which are verified like anyone's."""
    return file.startswith(_HOGLIB) and not file.startswith(_VERIFIED)


def torch_call_line() -> SourceLine | None:
    """The line that made a torch call, for a watch on it; None if verification itself made it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _WATCHES:
        frame = frame.f_back
    return _innermost(frame.f_back if frame is not None else None)


def caller_line() -> SourceLine | None:
    """The line of the user's that led here; None if verification itself did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back
    return _innermost(frame)


def running_module() -> nn.Module | None:
    """The module whose method is running, the innermost one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module):
            return found
        frame = frame.f_back
    return None


def _innermost(frame: FrameType | None) -> SourceLine | None:
    while frame is not None:
        file = frame.f_code.co_filename
        if _ours(file) and frame.f_code.co_name not in _WATCHES:
            return None
        if is_user_code(file):
            return SourceLine(file, frame.f_lineno)
        frame = frame.f_back
    return None


def error_line(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's that an error went through."""
    trace: TracebackType | None = error.__traceback__
    found = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user_code(file):
            found = SourceLine(file, trace.tb_lineno)
        trace = trace.tb_next
    return found


def format_error(error: BaseException) -> str:
    """The first line of an error, and where the user's code raised it."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300].rstrip(". ")
    place = error_line(error)
    return f"{text} (at {place})" if place else text


def error_text(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, HoglibError) else f"{type(error).__name__}: {text}"
