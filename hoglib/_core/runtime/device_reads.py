"""Values of a device that checks look at, without making it wait.

A read of a value (`float(x)`, `bool(x)`) stops a GPU until all that was launched is done. A copy that
is started and read later does not: of the calls with one key the first is checked at once, each later
one when the next is made.
"""

from collections.abc import Hashable
from typing import final

import torch
from torch import Tensor


@final
class DeviceRead:
    """A copy of a few numbers to the CPU, behind which the device goes on."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.Event | None = None
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
        """The numbers, for which this waits if it must."""
        if self._event is not None and not self.has_arrived:
            self._event.synchronize()
        self._event = None
        return self._copy


_READS: dict[Hashable, list[DeviceRead]] = {}  # those that were not looked at
LIMIT = 1000  # of keys, which hold shapes


def read_late(key: Hashable, numbers: Tensor) -> Tensor | None:
    """The numbers of a call on the CPU, each at most once.

    On a device, the first call of a key waits; later ones get numbers of calls before: the first that
    are not finite among those that have arrived, else the latest, and None while none have.
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
