"""`python -m experiments.benchmarks.audit`: what an audit of a whole model takes.

Networks of ten million parameters, right ones; and a deep one, right and with a fault in its middle,
which is looked for module by module.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.problems import Encoder, perceptron
from experiments.benchmarks.timing import program

Problem = tuple[nn.Module, tuple[Tensor, Tensor], bool]  # model, batch, stand_ins
CLASSES = 10


def normed(inner: int, outer: int, kernel: int, stride: int) -> list[nn.Module]:
    """A convolution with batch norm."""
    conv = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outer)]


class Residual(nn.Module):
    """x + f(x), by convolutions with batch norm."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        layers = [*normed(inner, outer, 3, stride), nn.ReLU(), *normed(outer, outer, 3, 1)]
        self.body = nn.Sequential(*layers)
        self.short = nn.Sequential(*(normed(inner, outer, 1, stride) if inner != outer else ()))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Cached(torch.autograd.Function):
    """Its backward takes from ctx what forward made, without a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        slope: Tensor = ctx.slope
        return g * slope


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Cached.apply(x)


def labelled(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.randint(CLASSES, (len(x),))


def wide(small: bool) -> Problem:
    width, rows = (32, 8) if small else (2048, 64)
    model = perceptron([784, width, width, width, CLASSES], nn.ReLU)
    return model, labelled(torch.randn(rows, 784)), False


def transformer(small: bool) -> Problem:
    width, depth, tokens, rows, length = (12, 1, 20, 2, 4) if small else (384, 5, 5000, 4, 64)
    encoder = Encoder(width, 6, 4 * width, depth, CLASSES)
    model = nn.Sequential(nn.Embedding(tokens, width), encoder)
    return model, labelled(torch.randint(tokens, (rows, length))), True


def resnet(small: bool) -> Problem:
    widths, rows, pixels = ([4, 8], 2, 8) if small else ([64, 128, 256, 512], 8, 32)
    blocks = []
    for inner, outer in zip([widths[0], *widths], widths, strict=False):
        blocks += [Residual(inner, outer, 1 if inner == outer else 2), Residual(outer, outer, 1)]
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)
    model = nn.Sequential(*normed(3, widths[0], 3, 1), nn.ReLU(), *blocks, *end)
    return model, labelled(torch.randn(rows, 3, pixels, pixels)), False


def deep(small: bool, fault: bool) -> Problem:
    depth, width = (4, 8) if small else (34, 64)
    model = perceptron([*[width] * (depth + 1), CLASSES], nn.Tanh)
    if fault:
        model[2 * (depth // 2) + 1] = Sine()
    return model, labelled(torch.randn(16, width)), False


MODELS: dict[str, Callable[[bool], Problem]] = {
    "perceptron 784-2048-2048-2048-10 with ReLU, 64 rows": wide,
    "`nn.TransformerEncoder`, 5 layers of width 384, 4 sequences of 64 tokens, `stand_ins=True`": (
        transformer
    ),
    "ResNet-18 with batch norm in train mode, 8 images of 32x32": resnet,
    "34 layers of width 64 with tanh, 16 rows": partial(deep, fault=False),
    "the same with a fault in the middle": partial(deep, fault=True),
}


def rows(small: bool) -> Iterator[str]:
    hog.audit(lambda params, batch: params.square().sum(), torch.ones(2), None)  # imports
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, batch, stand_ins = make(small)
        loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
        start = time.perf_counter()
        report = hog.audit(loss, params, batch, stand_ins=stand_ins)
        seconds = time.perf_counter() - start
        millions = sum(p.numel() for p in params.values()) / 1e6
        what = "right" if report.ok else f"wrong in {', '.join(report.culprits)}"
        yield f"| {name} | {millions:.1f} | {what} | {seconds:.1f} |"


TABLES = {"| model, batch | million parameters | found | seconds |": rows}


if __name__ == "__main__":
    program(__doc__, TABLES)
