"""The networks that the benchmarks differentiate, each with one batch and the vectors to multiply."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.benchmarks.workload import Point


@dataclass(frozen=True)
class Problem(Point):
    """A model with cross-entropy on one batch, at its initial weights.

    Shapes: x [N, ...]; y [N], classes; vectors [P, k] for P weights, in the order of `parameters()`.
    backend: what hoglib compiles with.
    """

    x: Tensor
    y: Tensor
    vectors: Tensor
    backend: str = "inductor"

    @cached_property
    def params(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    @cached_property
    def leaves(self) -> list[Tensor]:
        return list(self.params.values())

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A vector [P] as one tensor a parameter; columns [P, k] with k as their last dimension."""
        sizes = [p.numel() for p in self.params.values()]
        parts = zip(flat.split(sizes), self.params.values(), strict=True)
        return tuple(part.reshape(p.shape + flat.shape[1:]).contiguous() for part, p in parts)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.params, self.split(flat), strict=True))

    def vector(self, column: int = 0) -> tuple[Tensor, ...]:
        return self.split(self.vectors[:, column])


def backend(small: bool) -> str:
    """What a smoke run does not wait for is a compiler."""
    return "eager" if small else "inductor"


@contextmanager
def seeded() -> Iterator[None]:
    """Draw the same random numbers on every call, and restore the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by the formula: torch's fused kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


class Network(nn.Module):
    """4 convolutions of 3x3 with tanh, the mean over the image, one linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [3, *[channels] * 4]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.tanh(conv(x))
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """Torch's transformer encoder with GELU, the mean over the sequence, a linear layer."""

    def __init__(
        self, width: int, heads: int, hidden: int, layers: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, hidden, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def perceptron(widths: Sequence[int], act: Callable[[], nn.Module]) -> nn.Sequential:
    """Linear layers, with an activation after each but the last."""
    hidden = [m for a, b in pairwise(widths[:-1]) for m in (nn.Linear(a, b), act())]
    return nn.Sequential(*hidden, nn.Linear(widths[-2], widths[-1]))


def mlp(small: bool, width: int = 1024) -> tuple[nn.Module, Tensor]:
    a, b, rows = (12, 16, 8) if small else (784, width, 256)
    return perceptron([a, b, b, 10], nn.Tanh), torch.randn(rows, a)


def cnn(small: bool) -> tuple[nn.Module, Tensor]:
    channels, pixels, rows = (4, 8, 8) if small else (32, 32, 64)
    return Network(channels), torch.randn(rows, 3, pixels, pixels)


def transformer(small: bool) -> tuple[nn.Module, Tensor]:
    width, heads, hidden, length, rows = (8, 2, 16, 4, 4) if small else (128, 4, 512, 64, 16)
    return Encoder(width, heads, hidden), torch.randn(rows, length, width)


MODELS: dict[str, Callable[[bool], tuple[nn.Module, Tensor]]] = {
    "MLP": mlp,
    "MLP-128": partial(mlp, width=128),
    "CNN": cnn,
    "TRF": transformer,
}


def problem(name: str, vectors: int, small: bool = False) -> Problem:
    """The network of that name with its batch and k random vectors, the same on every call."""
    with seeded():
        model, x = MODELS[name](small)
        y = torch.randint(10, (len(x),))
        size = sum(p.numel() for p in model.parameters())
        return Problem(model, x, y, torch.randn(size, vectors), backend(small))
