"""Where in the user's code something happens."""

import linecache
import os
import sys
import sysconfig
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import nn

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WATCHES = ("__torch_function__", "__torch_dispatch__")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_HOGLIB = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_VERIFIED = tuple(os.path.join(_HOGLIB, name) for name in ("ops" + os.sep, "nn.py"))


LONGEST = 100  # characters of a line that are quoted


class Place(NamedTuple):
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


def foreign(file: str) -> bool:
    """Whether a file belongs neither to Python, nor to torch, nor to hoglib."""
    if file.startswith(_STDLIB) and "-packages" not in file:
        return False
    return not (file.startswith((_TORCH, "<frozen")) or _ours(file))


def _ours(file: str) -> bool:
    """hoglib, but for the ops, which are verified like anyone's."""
    return file.startswith(_HOGLIB) and not file.startswith(_VERIFIED)


def here() -> Place | None:
    """The line that made a torch call, for a watch on it; None if verification itself made it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _WATCHES:
        frame = frame.f_back
    return _innermost(frame.f_back if frame is not None else None)


def caller() -> Place | None:
    """The line of the user's that led here; None if verification itself did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back
    return _innermost(frame)


def owner() -> nn.Module | None:
    """The module whose method is running, the innermost one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module):
            return found
        frame = frame.f_back
    return None


def _innermost(frame: FrameType | None) -> Place | None:
    while frame is not None:
        file = frame.f_code.co_filename
        if _ours(file) and frame.f_code.co_name not in _WATCHES:
            return None
        if foreign(file):
            return Place(file, frame.f_lineno)
        frame = frame.f_back
    return None


def of_error(error: BaseException) -> Place | None:
    """The innermost line of the user's that an error went through."""
    trace: TracebackType | None = error.__traceback__
    found = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if foreign(file):
            found = Place(file, trace.tb_lineno)
        trace = trace.tb_next
    return found
