"""Sinusoid regression: every task is a sine wave with an amplitude and a phase of its own.

Source: Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017, section 5.1.
"""

from math import pi
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from experiments.data.stream import HeldOut, Stream, seeded
from hoglib._core import validation

Batch = tuple[Tensor, Tensor]
AMPLITUDE = (0.1, 5.0)
PHASE = (0.0, pi)
X = (-5.0, 5.0)

# Held-out tasks are the same ones for every run, whatever its seed.
VALIDATION_SEED = 2**40
TEST_SEED = 0  # also that of a run's first batch, whose size is another, and so are its numbers


class Waves(NamedTuple):
    """Stacked tasks: y = amplitude sin(x - phase), x and y [tasks, shots, 1]."""

    support: Batch
    query: Batch
    amplitude: Tensor
    phase: Tensor


def sample(tasks: int, shots: int, queries: int, seed: int) -> Waves:
    """The tasks that belong to a seed, on the CPU whatever the device of the run."""
    generator = seeded(seed)

    def uniform(bounds: tuple[float, float], *shape: int) -> Tensor:
        low, high = bounds
        return low + (high - low) * torch.rand(shape, generator=generator)

    amplitude, phase = uniform(AMPLITUDE, tasks, 1, 1), uniform(PHASE, tasks, 1, 1)

    def points(count: int) -> Batch:
        x = uniform(X, tasks, count, 1)
        return x, amplitude * torch.sin(x - phase)

    return Waves(points(shots), points(queries), amplitude, phase)


class TaskStream(Stream):
    """Meta-batches (support, query)."""

    def __init__(self, batches: int, tasks: int, shots: int, queries: int, seed: int) -> None:
        super().__init__(batches, seed)
        self.tasks, self.shots, self.queries = tasks, shots, queries

    def batch_of(self, seed: int) -> tuple[Batch, Batch]:
        return pair(sample(self.tasks, self.shots, self.queries, seed))


def pair(waves: Waves) -> tuple[Batch, Batch]:
    return waves.support, waves.query


class SinusoidTasks(pl.LightningDataModule):
    """Sinusoid tasks: a stream for training, fixed held-out sets for validation and test.

    iterations: meta-batches in the run; tasks: tasks in a meta-batch; shots: support points a task
    (K); queries: query points a task in training; seed: of the training stream, the run's by default.
    """

    def __init__(
        self,
        iterations: int = 6000,
        tasks: int = 25,
        shots: int = 10,
        queries: int = 10,
        validation_tasks: int = 100,
        test_tasks: int = 600,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.iterations = validation.at_least("iterations", iterations, 1)
        self.tasks = validation.at_least("tasks", tasks, 1)
        self.shots = validation.at_least("shots", shots, 1)
        self.queries = validation.at_least("queries", queries, 1)
        self.validation_tasks = validation.at_least("validation_tasks", validation_tasks, 1)
        self.test_tasks = validation.at_least("test_tasks", test_tasks, 2)
        self.seed = torch.initial_seed() % 2**20 if seed is None else seed

    def train_dataloader(self) -> TaskStream:
        return TaskStream(self.iterations, self.tasks, self.shots, self.queries, self.seed)

    def val_dataloader(self) -> HeldOut:
        return HeldOut(pair(sample(self.validation_tasks, self.shots, 100, VALIDATION_SEED)))

    def test_dataloader(self) -> HeldOut:
        return HeldOut(pair(self.test_waves()))

    def test_waves(self) -> Waves:
        """The held-out tasks of the test, with 100 query points each and their true parameters."""
        return sample(self.test_tasks, self.shots, 100, TEST_SEED)
