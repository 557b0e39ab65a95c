"""Derivatives of attention by blocks of rows, beside the formula that holds all scores.

    python -m experiments.benchmarks.attention [--smoke]

One thread, float32, one sequence, 4 heads of 32, not causal. Times are medians of interleaved runs;
peaks are what torch's allocator had given at one time. The longest sequences run by blocks alone: the
formula needs 44 GiB for 16,384.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated
from experiments.benchmarks.timing import interleaved, program

HEADS, WIDTH = 4, 32
LENGTHS, LONGER = (256, 512, 1024, 2048), (4096, 8192, 16384)
Attention = Callable[..., Tensor]
by_blocks: Attention = hog.ops.scaled_dot_product_attention
Inputs = tuple[Tensor, ...]


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def gradient(attention: Attention, inputs: Inputs) -> Any:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    return torch.autograd.grad(attention(*inputs).square().sum(), inputs)


def hvp(attention: Attention, inputs: Inputs, mode: Any = "reverse-over-reverse") -> Any:
    return hog.hvp(lambda inputs: attention(*inputs).square().sum(), inputs, inputs, mode=mode)[1]


def through_jvp(attention: Attention, inputs: Inputs) -> Any:
    """The gradient of a derivative along a vector."""

    def slope(*inputs: Tensor) -> Tensor:
        return torch.func.jvp(attention, inputs, inputs)[1].square().sum()

    return torch.func.grad(slope, argnums=(0, 1, 2))(*inputs)


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "gradient": gradient,
    "HVP, reverse over reverse": hvp,
    "HVP, forward over reverse": partial(hvp, mode="forward-over-reverse"),
    "gradient of a jvp": through_jvp,
}


def draw(length: int) -> Inputs:
    return tuple(torch.randn(1, HEADS, length, WIDTH) for _ in range(3))


def row(name: str, length: int, repeats: int) -> str:
    inputs = draw(length)
    runs = [partial(DERIVATIVES[name], attention, inputs) for attention in (formula, by_blocks)]
    torch.testing.assert_close(runs[1](), runs[0](), rtol=1e-3, atol=1e-4)
    theirs, ours = interleaved(dict(zip("ab", runs, strict=True)), repeats).values()
    most, blocks = map(peak_allocated, runs)
    return (
        f"| {name} | {length} | {theirs * 1e3:.1f} | {most / 2**20:.1f} | {ours / theirs:.2f} of the "
        f"time, {blocks / most:.2f} of the peak |"
    )


def derivative_rows(small: bool) -> Iterator[str]:
    for name in DERIVATIVES:
        for length in (8, 600) if small else LENGTHS:
            yield row(name, length, 1 if small else 5)


def long_rows(small: bool) -> Iterator[str]:
    for length in (600,) if small else (LENGTHS[-1], *LONGER):
        run = partial(hvp, by_blocks, draw(length))
        (seconds,) = interleaved({"blocks": run}, 1).values()
        yield f"| {length} | {seconds:.1f} | {peak_allocated(run) / 2**20:.1f} |"


TABLES = {
    "| derivative | length | formula, ms | MiB | blocks, of the formula's |": derivative_rows,
    "| length | HVP by blocks, s | MiB |": long_rows,
}


if __name__ == "__main__":
    program(__doc__, TABLES)
