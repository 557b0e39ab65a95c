"""The networks that are meta-learned, each with its tasks and its inner loop."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.problems import Encoder, perceptron, seeded
from experiments.benchmarks.workload import Point
from experiments.shared import networks

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Learner(Point):
    """A model at its initial weights, a stack of tasks, and the gradient descent that learns each.

    Shapes: support and query (x [B, K, ...], y [B, K, ...]), B tasks.
    """

    kind: str
    criterion: Callable[[Tensor, Tensor], Tensor]
    support: Batch
    query: Batch
    inner_lr: float
    inner_steps: int

    @property
    def count(self) -> int:
        return len(self.support[0])

    def each(self) -> Iterator[tuple[Batch, Batch]]:
        (sx, sy), (qx, qy) = self.support, self.query
        for i in range(self.count):
            yield (sx[i], sy[i]), (qx[i], qy[i])


def sinusoid(small: bool, fused: bool = False) -> Learner:
    """Waves a sin(x - b), as in experiments.few_shot."""
    tasks, shots, width = (3, 4, 8) if small else (25, 10, 40)
    widths = [1, width, width, 1]
    model = networks.mlp(widths, "tanh") if fused else perceptron(widths, nn.Tanh)
    amplitude, phase = torch.rand(tasks, 1, 1) * 4.9 + 0.1, torch.rand(tasks, 1, 1) * math.pi
    support, query = torch.rand(2, tasks, shots, 1) * 10 - 5
    batches = [(x, amplitude * torch.sin(x - phase)) for x in (support, query)]
    kind = "linear_act" if fused else "tanh"
    return Learner(model, kind, F.mse_loss, batches[0], batches[1], 0.01, 2 if small else 10)


def conv4(small: bool, channels: int = 32, tasks: int = 4, steps: int = 5) -> Learner:
    """Four blocks of convolution, batch norm of the batch itself, ReLU and max-pooling."""
    if small:
        channels, tasks, steps = 4, min(tasks, 2), min(steps, 2)
    blocks: list[nn.Module] = []
    for a, b in pairwise([1, *[channels] * 4]):
        norm = nn.BatchNorm2d(b, track_running_stats=False)
        blocks += [nn.Conv2d(a, b, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels, 5))
    batches = classes(tasks, 1, (1, 28, 28))
    return Learner(model, "conv4", F.cross_entropy, *batches, 0.01, steps)


def wide(small: bool) -> Learner:
    pixels, width, tasks = (16, 8, 2) if small else (784, 256, 4)
    model = perceptron([pixels, width, width, 5], nn.ReLU)
    batches = classes(tasks, 5, (pixels,))
    return Learner(model, "relu", F.cross_entropy, *batches, 0.05, 2 if small else 5)


def transformer(small: bool) -> Learner:
    width, length, tasks = (8, 4, 2) if small else (32, 16, 4)
    model = Encoder(width, heads=4, hidden=2 * width, layers=2, classes=5)
    batches = classes(tasks, 5, (length, width))
    return Learner(model, "transformer", F.cross_entropy, *batches, 0.05, 2 if small else 5)


def classes(tasks: int, shots: int, shape: tuple[int, ...]) -> tuple[Batch, Batch]:
    """Five classes a task, each a random image, of which every example is a noisy copy."""
    means = torch.randn(tasks, 5, *shape).repeat_interleave(shots, 1)
    y = torch.arange(5).repeat_interleave(shots).repeat(tasks, 1)
    noisy = [means + 0.5 * torch.randn_like(means) for _ in range(2)]
    return (noisy[0], y), (noisy[1], y)


LEARNERS: dict[str, Callable[[bool], Learner]] = {
    "sinusoid": sinusoid,
    "sinusoid, LinearAct": partial(sinusoid, fused=True),
    "MLP": wide,
    "transformer": transformer,
    "conv4-32": conv4,
    "conv4-64": partial(conv4, channels=64, steps=3),
}
STEPS = (5, 10, 20, 40, 80)


def learner(name: str, vectors: int = 1, small: bool = False) -> Learner:
    """The learner of that name, the same on every call; there are no vectors."""
    with seeded():
        return LEARNERS[name](small)


def long_loop(steps: str, vectors: int = 1, small: bool = False) -> Learner:
    """conv4 with so many inner steps on one task."""
    with seeded():
        return conv4(small, tasks=1, steps=int(steps))


def checked(steps: str, small: bool = False) -> Learner:
    """The learner on which methods are compared with the truth, for a long loop.

    After many steps float32 is on the other side of some kink than float64, and its meta-gradient
    another; so long loops are compared in float64, on a narrow network.
    """
    with seeded():
        count = min(int(steps), 2) if small else int(steps)
        return conv4(False, channels=4, tasks=1, steps=count).double()
