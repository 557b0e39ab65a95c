"""`python -m experiments.benchmarks.audit`: what an audit of a whole model takes.

Networks of ten million parameters, right ones; and a deep one, right and with a fault in its middle,
which is looked for module by module.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.timing import machine, smoke

Problem = tuple[nn.Module, tuple[Tensor, Tensor], bool]  # model, batch, stand_ins
CLASSES = 10


class Residual(nn.Module):
    """x + f(x), by convolutions with batch norm."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.short = (
            nn.Identity()
            if inner == outer
            else nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Encoder(nn.Module):
    """A transformer that tells a class of a sequence by its first token."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.embedding(x))[:, 0])
        return y


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
        y: Tensor = Cached.apply(x)
        return y


def perceptron(small: bool) -> Problem:
    width, rows = (32, 8) if small else (2048, 64)
    model = nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES),
    )  # fmt: skip
    return model, (torch.randn(rows, 784), torch.randint(CLASSES, (rows,))), False


def transformer(small: bool) -> Problem:
    width, layers, tokens, rows, length = (12, 1, 20, 2, 4) if small else (384, 5, 5000, 4, 64)
    batch = torch.randint(tokens, (rows, length)), torch.randint(CLASSES, (rows,))
    return Encoder(width, layers, tokens), batch, True


def resnet(small: bool) -> Problem:
    widths, rows, pixels = ([4, 8], 2, 8) if small else ([64, 128, 256, 512], 8, 32)
    blocks = []
    for inner, outer in zip([widths[0], *widths], widths, strict=False):
        blocks += [Residual(inner, outer, 1 if inner == outer else 2), Residual(outer, outer, 1)]
    model = nn.Sequential(
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES),
    )  # fmt: skip
    return model, (torch.randn(rows, 3, pixels, pixels), torch.randint(CLASSES, (rows,))), False


def deep(small: bool, fault: bool) -> Problem:
    depth, width = (4, 8) if small else (34, 64)
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(width, width), Sine() if fault and i == depth // 2 else nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, CLASSES))
    return model, (torch.randn(16, width), torch.randint(CLASSES, (16,))), False


MODELS: dict[str, Callable[[bool], Problem]] = {
    "perceptron 784-2048-2048-2048-10 with ReLU, 64 rows": perceptron,
    "`nn.TransformerEncoder`, 5 layers of width 384, 4 sequences of 64 tokens, `stand_ins=True`": (
        transformer
    ),
    "ResNet-18 with batch norm in train mode, 8 images of 32x32": resnet,
    "34 layers of width 64 with tanh, 16 rows": partial(deep, fault=False),
    "the same with a fault in the middle": partial(deep, fault=True),
}


def rows(small: bool) -> list[str]:
    lines = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, batch, stand_ins = make(small)
        loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
        start = time.perf_counter()
        report = hog.audit(loss, params, batch, stand_ins=stand_ins)
        seconds = time.perf_counter() - start
        millions = sum(p.numel() for p in params.values()) / 1e6
        what = "right" if report.ok else f"wrong in {', '.join(report.culprits)}"
        lines.append(f"| {name} | {millions:.1f} | {what} | {seconds:.1f} |")
    return lines


def main() -> None:
    small = smoke(__doc__)
    hog.audit(lambda params, batch: params.square().sum(), torch.ones(2), None)  # imports
    print(f"{machine()}\n")
    print("| model, batch | million parameters | found | seconds |")
    print("|---|---|---|---|")
    for line in rows(small):
        print(line, flush=True)


if __name__ == "__main__":
    main()
