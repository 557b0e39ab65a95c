"""Random vectors as rows, the same numbers whether processes share the parameters or not."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from hoglib.curvature.vector_space import Space

Draw = Callable[[int], Tensor]  # so many random numbers
# numbers that are drawn at once; a multiple of 16, by which torch draws normal numbers
AT_ONCE = 2**16
SAME = ("random numbers",)


def signs(space: Space, count: int, generator: torch.Generator | None) -> Tensor:
    """Rows [count, P] of independent signs, -1 or 1."""
    device = space.device if generator is None else generator.device

    def draw(numbers: int) -> Tensor:
        return torch.randint(2, (numbers,), generator=generator, device=device)

    return _rows(space, count, draw, device, space.dtype).mul_(2).sub_(1)


def normals(space: Space, count: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Rows [count, P] of normal numbers, drawn in float64."""
    device = generator.device

    def draw(numbers: int) -> Tensor:
        return torch.randn(numbers, generator=generator, dtype=torch.float64, device=device)

    return _rows(space, count, draw, device, dtype)


def _rows(space: Space, count: int, draw: Draw, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Rows of what is drawn; of vectors that processes share, the part of this one.

    All processes draw all numbers, one tensor of parameters after the other, and keep their part.
    """
    sharding = space.sharding
    if sharding is None:
        return draw(count * space.size).view(count, space.size).to(space.device, dtype)
    numbers = _Numbers(draw, count * space.size, device)
    rows = torch.empty(count, space.length, dtype=dtype, device=space.device)
    for row in rows:
        start = 0
        for layout in sharding.layouts:
            whole = numbers.take(layout.shape.numel()).to(space.device, dtype)
            part = layout.part_of(whole.view(layout.shape)).reshape(-1)
            row[start : start + len(part)] = part
            start += len(part)
    sharding.check_same("random vectors", SAME, [numbers.last], space.device)
    return rows


@final
class _Numbers:
    """Random numbers, of which some are drawn at a time: those that one draw of all would give.

    torch's generators of the CPU draw one number after the other, normal ones by 16, and the last 16
    of a draw anew. Of other devices all are drawn at once.
    """

    def __init__(self, draw: Draw, total: int, device: torch.device) -> None:
        self._draw, self._left = draw, total
        self._at_once = AT_ONCE if device.type == "cpu" else total
        self._drawn = torch.empty(0)
        self.last = 0.0  # of the numbers that were taken

    def take(self, count: int) -> Tensor:
        parts = [self._drawn]
        have = len(self._drawn)
        while have < count:
            several = self._left >= self._at_once + 16
            parts.append(self._draw(self._at_once if several else self._left))
            self._left -= len(parts[-1])
            have += len(parts[-1])
        every = torch.cat([part for part in parts if len(part)]) if have else parts[0]
        self._drawn = every[count:]
        if count:
            self.last = float(every[count - 1])
        return every[:count]
