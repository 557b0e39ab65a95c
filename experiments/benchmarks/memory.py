"""Peak memory of a computation: in tensors, the same number on every run, or of the process."""

import ctypes
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most bytes of tensors made by `run` that were alive at one time.

    On a GPU the allocator is asked; elsewhere every operation is watched.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with _Watch() as watch:
        run()
    return watch.peak


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


def peak_allocated(run: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator on a processor had given to `run` at one time.

    Sees what compiled code allocates, of which no operation of torch tells; and torch's own workspace.
    Only of what leaves nothing behind: memory from before that is freed inside is subtracted.
    """
    # acc_events=True because torch 2.11 warns without it; there is only one cycle of events
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        run()
    results: Any = profiler.profiler.kineto_results
    now = peak = 0
    for event in results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._note_known(leaf.untyped_storage())
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return output

    def _note_known(self, storage: torch.UntypedStorage) -> None:
        """A storage from before does not count; a later one with its id, once it is gone, does."""
        key = id(storage)
        if key not in self.alive and key not in self.known:
            self.known.add(key)
            weakref.finalize(storage, self.known.discard, key)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.alive or key in self.known:
            return
        self.alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.alive.pop(key)
