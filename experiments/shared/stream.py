"""Batches that are computed, not read: streams of numbered batches, and one fixed batch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch

Data = TypeVar("Data", bound=NamedTuple)


def seeded(seed: int) -> torch.Generator:
    """A generator whose numbers differ for every seed below 2^64.

    On the CPU torch seeds with the lower 32 bits alone: 0 and 2^40 would give the same numbers.
    """
    return torch.Generator().manual_seed((seed ^ (seed >> 32) * 2654435761) % 2**32)


def run_seed(seed: int | None) -> int:
    """The seed of a data set: that of the run by default."""
    # less than 2^20, so that no batch has the seed of held-out data, 2^40 and more
    return torch.initial_seed() % 2**20 if seed is None else seed


def random_subset(data: Data, count: int, generator: torch.Generator) -> Data:
    """Some examples of a NamedTuple of tensors [n, ...], without repetition."""
    return select(data, torch.randperm(len(data[0]), generator=generator)[:count])


def select(data: Data, picks: torch.Tensor) -> Data:
    """The examples with these numbers, or where a mask is true, of a NamedTuple of tensors."""
    return type(data)(*(part[picks] for part in data))


class Stream(ABC):
    """Batches, each a function of the seed and its number alone.

    Lightning stores its position (`state_dict`) in checkpoints, so a run that is resumed in the middle
    continues with the batch that would have come next.
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
            # counted before the batch is handed out: a checkpoint written then goes on with the
            # next one
            number, self.position = self.position, self.position + 1
            # runs of fewer than 2^20 batches share none with a run of another seed
            yield self.batch_of(self.seed * 2**20 + number)

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.position = state["seed"], state["position"]


class SubsetStream(Stream):
    """Random subsets of the data, without repetition within a batch; or all of it, in every batch.

    Args:
        data: A NamedTuple of tensors [n, ...].
        batches: Number of batches.
        batch: Examples in a batch; None for all.
        seed: Seed of the stream.
    """

    def __init__(self, data: Any, batches: int, batch: int | None, seed: int) -> None:
        super().__init__(batches, seed)
        self.data, self.batch = data, batch

    def batch_of(self, seed: int) -> Any:
        if self.batch is None:
            return self.data
        return random_subset(self.data, self.batch, seeded(seed))


class HeldOut:
    """The same single batch at every iteration."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch])
