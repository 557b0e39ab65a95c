"""Batches that are computed, not read: streams of numbered ones, and one that stays."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for every seed below 2^64.

    On the CPU torch seeds with the lower 32 bits alone: 0 and 2^40 would give the same numbers.
    """
    return torch.Generator().manual_seed((seed ^ (seed >> 32) * 2654435761) % 2**32)


class Stream(ABC):
    """Batches, each a function of the seed and its number alone.

    It tells Lightning its position (`state_dict`), so a run that is resumed in the middle goes on
    with the batch that would have come next.
    """

    def __init__(self, batches: int, seed: int) -> None:
        self.batches, self.seed = batches, seed
        self.position = 0

    @abstractmethod
    def batch_of(self, seed: int) -> Any:
        """The batch that belongs to a seed."""

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.position % self.batches, self.batches):
            number, self.position = self.position, self.position + 1
            yield self.batch_of(self.seed * 2**20 + number)

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.position = state["seed"], state["position"]


class HeldOut:
    """The same batch at every visit."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch])
