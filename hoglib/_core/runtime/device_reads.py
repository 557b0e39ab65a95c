"""Values that checks read from a device without making it wait.

A read (`float(x)`, `bool(x)`) waits for all kernels that were launched on a GPU. A copy that is started
now and read later does not. `read_late` checks the first call of a key at once, later calls from
copies.
"""

from collections.abc import Hashable
from typing import final

import torch
from torch import Tensor


@final
class DeviceRead:
    """A copy of a few numbers to the CPU that does not block the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.Event | None = None  # recorded behind the copy; None on the CPU
        self._copy = numbers
        if numbers.device.type != "cpu":
            self._copy = numbers.to("cpu", non_blocking=True)  # into pinned memory
            self._event = torch.Event(device=numbers.device)
            self._event.record()

    @property
    def has_arrived(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> Tensor:
        """The numbers; waits if the copy has not arrived."""
        if self._event is not None and not self.has_arrived:
            self._event.synchronize()
        self._event = None
        return self._copy


_READS: dict[Hashable, list[DeviceRead]] = {}  # key -> copies that were not read, oldest first
LIMIT = 1000  # keys: they contain shapes, so their number may grow


def read_late(key: Hashable, numbers: Tensor) -> Tensor | None:
    """The numbers of a call, on the CPU; the numbers of one call are returned at most once.

    On a device, the first call of a key waits and returns its own numbers. A later call returns the
    numbers of an earlier one that have arrived: the first that are not finite (or False), else the
    latest; None if none have arrived.
    """
    if numbers.device.type == "cpu":
        return numbers
    if key not in _READS:
        if len(_READS) >= LIMIT:
            _READS.clear()
        _READS[key] = []
        return numbers.cpu()
    waiting = _READS[key]
    arrived = []
    while waiting and waiting[0].has_arrived:
        arrived.append(waiting.pop(0).numbers())
    waiting.append(DeviceRead(numbers))
    bad = (x for x in arrived if not bool((x if x.dtype is torch.bool else x.isfinite()).all()))
    return next(bad, arrived[-1] if arrived else None)
