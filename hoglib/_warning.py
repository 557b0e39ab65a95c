"""Warnings that point at the user's line, however deep in hoglib they are given."""

import os
import sys
import warnings
from types import FrameType

import torch

_NOT_THE_USERS = tuple(
    os.path.dirname(os.path.abspath(str(file))) + os.sep for file in (__file__, torch.__file__)
)


def warn(message: str) -> None:
    """A UserWarning at the innermost line that belongs neither to hoglib nor to torch."""
    level, frame = 1, sys._getframe()
    caller: FrameType | None = frame
    while caller is not None and _ours(caller.f_code.co_filename):
        level, caller = level + 1, caller.f_back
    warnings.warn(message, stacklevel=level)


def is_users(file: str) -> bool:
    """Whether a file belongs neither to hoglib nor to torch."""
    return not (
        file.startswith((*_NOT_THE_USERS, "<")) or os.path.basename(file) == "contextlib.py"
    )


def _ours(file: str) -> bool:
    return file.startswith(_NOT_THE_USERS) or os.path.basename(file) == "contextlib.py"
