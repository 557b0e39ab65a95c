"""Peak memory in tensors that operations make, the same number on every run."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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
    with Watch() as watch:
        run()
    return watch.peak


class Watch(TorchDispatchMode):
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
