"""Sinusoid regression: every task is a sine wave with an amplitude and a phase of its own.

References:
    Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017, section 5.1.
"""

from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.checks import at_least
from experiments.shared.stream import StreamData, seeded

Batch = tuple[Tensor, Tensor]
AMPLITUDE = (0.1, 5.0)
PHASE = (0.0, pi)
X = (-5.0, 5.0)

# Held-out tasks are the same for every run, whatever its seed.
VALIDATION_SEED = 2**40
TEST_SEED = 0  # also that of a run's first batch, whose size differs, and so do its numbers
HELD_OUT_QUERIES = 100


class SinusoidTasks(StreamData):
    """Sinusoid tasks: a stream for training, fixed held-out sets for validation and test.

    Args:
        iterations: Meta-batches in the run.
        tasks: Tasks in a meta-batch.
        shots: Support points of a task (K).
        queries: Query points of a task in training.
        validation_tasks: Held-out tasks for validation.
        test_tasks: Held-out tasks for the test.
        seed: Seed of the training stream. Default: that of the run.
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
        super().__init__(iterations, seed)
        self.tasks = at_least("tasks", tasks, 1)
        self.shots = at_least("shots", shots, 1)
        self.queries = at_least("queries", queries, 1)
        self.validation_tasks = at_least("validation_tasks", validation_tasks, 1)
        self.test_tasks = at_least("test_tasks", test_tasks, 2)

    def batch_of(self, seed: int) -> tuple[Batch, Batch]:
        return sample_waves(self.tasks, self.shots, self.queries, seed)[:2]

    def validation_batch(self) -> tuple[Batch, Batch]:
        given = self.validation_tasks, self.shots, HELD_OUT_QUERIES, VALIDATION_SEED
        return sample_waves(*given)[:2]

    def test_batch(self) -> tuple[Batch, Batch]:
        return self.test_waves()[:2]

    def test_waves(self) -> "Waves":
        """The held-out tasks of the test, with their true parameters."""
        return sample_waves(self.test_tasks, self.shots, HELD_OUT_QUERIES, TEST_SEED)


class Waves(NamedTuple):
    """Stacked tasks: y = amplitude sin(x - phase), with x and y [tasks, shots, 1]."""

    support: Batch
    query: Batch
    amplitude: Tensor
    phase: Tensor


def sample_waves(tasks: int, shots: int, queries: int, seed: int) -> Waves:
    """The tasks that belong to a seed, on the CPU whatever the device of the run."""
    generator = seeded(seed)

    def uniform(bounds: tuple[float, float], *shape: int) -> Tensor:
        low, high = bounds
        return low + (high - low) * torch.rand(shape, generator=generator)

    # drawn before the points: a seed has the same waves for all numbers of shots
    amplitude, phase = uniform(AMPLITUDE, tasks, 1, 1), uniform(PHASE, tasks, 1, 1)

    def points(count: int) -> Batch:
        x = uniform(X, tasks, count, 1)
        return x, amplitude * torch.sin(x - phase)

    return Waves(points(shots), points(queries), amplitude, phase)
