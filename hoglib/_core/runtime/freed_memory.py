"""Freed memory, returned to the operating system.

glibc keeps memory that was freed below memory in use. Work in pieces (recomputed blocks, replayed
steps, chunks of rows) leaves results between freed temporaries, and the process held up to three
times the memory of its tensors. Each piece calls `return_freed_memory` before it allocates.
"""

import ctypes
import os
import sys
from functools import cache
from typing import Any

import torch

# The resident pages at which memory is returned next, by process: a child of a fork has its own size.
_LIMITS: dict[int, float] = {}
RISE = 1 / 256  # of the resident size: a return at each new peak would cost a third of the time


def return_freed_memory() -> None:
    """Return freed memory to the operating system if the process is larger than it ever was here.

    Below an earlier peak nothing is returned: pages that are used again cost time. Does nothing
    without glibc (macOS, Windows, musl) or /proc. Changes no setting of the process.
    """
    if torch.compiler.is_dynamo_compiling() or (trim := _malloc_trim()) is None:
        return
    process = os.getpid()
    try:
        pages = int(os.pread(_memory_sizes(process), 64, 0).split()[1])
    except (OSError, ValueError, IndexError):
        # no /proc, no further file may be opened, or a daemon has closed all files of its parent
        return
    if pages > _LIMITS.get(process, 0):
        trim(0)
        _LIMITS[process] = pages * (1 + RISE)


@cache
def _malloc_trim() -> Any:
    """glibc's malloc_trim; None where it is missing."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


@cache
def _memory_sizes(process: int) -> int:
    """An open /proc/PID/statm: to open the file takes ten times as long as to read it."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
