"""The critics whose training steps are compared, each with real and generated samples."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.benchmarks.problems import backend, perceptron, seeded
from experiments.benchmarks.workload import Point

SEED = 0  # of the points between real and generated ones, which every method draws anew


@dataclass(frozen=True)
class Critics(Point):
    """A critic at its initial weights, and one batch: real and fake [N, ...].

    backend: what hoglib compiles with.
    """

    real: Tensor
    fake: Tensor
    backend: str = "inductor"

    def drawn(self) -> Tensor:
        """e_n ~ U(0, 1) [N], as every method draws it; in float32, of which float64 has a copy."""
        torch.manual_seed(SEED)
        return torch.rand(len(self.real), device=self.device).to(self.real)


def small(tiny: bool) -> tuple[nn.Module, Tensor]:
    width, rows = (8, 4) if tiny else (128, 256)
    return perceptron([2, width, width, width, 1], nn.SiLU), torch.randn(rows, 2)


def mlp(tiny: bool) -> tuple[nn.Module, Tensor]:
    inputs, width, rows = (12, 16, 4) if tiny else (784, 1024, 64)
    return perceptron([inputs, width, width, 1], nn.Tanh), torch.randn(rows, inputs)


def cnn(tiny: bool, act: Callable[[], nn.Module] = nn.SiLU) -> tuple[nn.Module, Tensor]:
    channels, pixels, rows = (4, 8, 2) if tiny else (32, 32, 64)
    pairs = itertools.pairwise([3, *[channels] * 4])
    layers = [m for i, o in pairs for m in (nn.Conv2d(i, o, 3, padding=1), act())]
    end = nn.Linear(channels * pixels**2, 1)
    return nn.Sequential(*layers, nn.Flatten(), end), torch.randn(rows, 3, pixels, pixels)


CRITICS: dict[str, Callable[[bool], tuple[nn.Module, Tensor]]] = {
    "small": small,
    "MLP": mlp,
    "CNN": cnn,
    "CNN, softplus": partial(cnn, act=nn.Softplus),
}


def critics(name: str, vectors: int = 1, tiny: bool = False) -> Critics:
    """The critic of that name with its batch, the same on every call; there are no vectors."""
    with seeded():
        model, real = CRITICS[name](tiny)
        return Critics(model, real, torch.randn_like(real), backend(tiny))


def taken(value: Tensor, model: nn.Module) -> tuple[Any, ...]:
    """The value and the gradients that lie in `.grad`, which is empty afterwards."""
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return value, *grads
