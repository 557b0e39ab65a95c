"""Batches that are computed, not read: streams of numbered batches, and one fixed batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import lightning.pytorch as pl
import torch

from experiments.checks import at_least

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


def select(data: Data, picks: torch.Tensor) -> Data:
    """The examples with these numbers, or where a mask is true, of a NamedTuple of tensors."""
    return type(data)(*(part[picks] for part in data))


class Stream:
    """Batches, each a function of the seed and its number alone.

    Lightning stores its position (`state_dict`) in checkpoints, so a run that is resumed in the middle
    continues with the batch that would have come next.

    Args:
        batch_of: The batch that belongs to a seed.
        batches: Number of batches.
        seed: Seed of the stream.
    """

    def __init__(self, batch_of: Callable[[int], Any], batches: int, seed: int) -> None:
        self.batch_of, self.batches, self.seed = batch_of, batches, seed
        self.position = 0

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


class HeldOut:
    """The same single batch at every iteration."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch])


class StreamData(pl.LightningDataModule, ABC):
    """Data that are computed: a stream for training, and one batch for validation and for the test.

    Args:
        iterations: Batches in the run.
        seed: Seed of the stream. Default: that of the run.

    Attributes:
        options: What checkpoints must agree with, by name.
    """

    def __init__(self, iterations: int, seed: int | None = None) -> None:
        super().__init__()
        self.iterations, self.seed = at_least("iterations", iterations, 1), run_seed(seed)
        self.options: dict[str, Any] = {}

    @abstractmethod
    def batch_of(self, seed: int) -> Any:
        """The training batch that belongs to a seed."""

    @abstractmethod
    def test_batch(self) -> Any:
        """The held-out data of the test."""

    def validation_batch(self) -> Any:
        return self.test_batch()

    def train_dataloader(self) -> Any:
        return Stream(self.batch_of, self.iterations, self.seed)

    def val_dataloader(self) -> Any:
        return HeldOut(self.validation_batch())

    def test_dataloader(self) -> Any:
        return HeldOut(self.test_batch())


def subset(data: Data, count: int | None, seed: int) -> Data:
    """A random subset that belongs to a seed, without repetition; all of it for None."""
    if count is None:
        return data
    return select(data, torch.randperm(len(data[0]), generator=seeded(seed))[:count])
