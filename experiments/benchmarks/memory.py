"""Peak memory of a computation: as torch's allocator gave it, or of the process."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")


def peak_allocated(run: Callable[[], Any], device: torch.device = CPU) -> int:
    """The most bytes that torch's allocator of a device had given to `run` at one time.

    Sees what compiled code allocates, of which no operation of torch tells; and torch's own workspace.
    Only of what leaves nothing behind: memory from before that is freed inside is subtracted.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    # acc_events=True because torch 2.11 warns without it; there is only one cycle of events
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        run()
    results: Any = profiler.profiler.kineto_results
    now = peak = 0
    for event in results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def peak_resident(run: Callable[[], Any]) -> int | None:
    """The most bytes that the process held during `run` beyond what it held before; None but on Linux.

    Counts what compiled code allocates, too. Call `run` before: what stays of a first call is no peak.
    """
    try:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present one
        before = _status("VmRSS")
        kept = run()
        found = _status("VmHWM") - before
        del kept
    except OSError:
        return None
    return found


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
