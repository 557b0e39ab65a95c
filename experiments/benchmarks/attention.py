"""Derivatives of attention by blocks of rows, beside the formula that holds all scores.

    python -m experiments.benchmarks.attention [--smoke]

One thread, float32, one sequence, 4 heads of 32, not causal. Times are medians of interleaved runs;
peaks are what torch's allocator had given at one time, which does not see JAX. The longest sequences
run by blocks alone: the formula needs 44 GiB for 16,384.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated
from experiments.benchmarks.timing import interleaved, program
from experiments.benchmarks.with_jax import to_jax

HEADS, WIDTH = 4, 32
LENGTHS, LONGER = (256, 512, 1024, 2048), (4096, 8192, 16384)
Attention = Callable[..., Tensor]


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def in_remat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula for chunks of queries, each recomputed in backward."""
    chunk = hog.ops.remat(formula)
    return torch.cat([chunk(part, k, v) for part in q.split(256, -2)], -2)


def by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hog.ops.scaled_dot_product_attention(q, k, v)


def gradient(attention: Attention, inputs: tuple[Tensor, ...]) -> Any:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    return torch.autograd.grad(attention(*inputs).square().sum(), inputs)


Mode = Literal["reverse-over-reverse", "forward-over-reverse"]


def hvp(attention: Attention, inputs: tuple[Tensor, ...], mode: Mode) -> Any:
    return hog.hvp(lambda inputs: attention(*inputs).square().sum(), inputs, inputs, mode=mode)[1]


def jvp(attention: Attention, inputs: tuple[Tensor, ...]) -> Any:
    return torch.func.jvp(attention, inputs, inputs)[1]


def through_jvp(attention: Attention, inputs: tuple[Tensor, ...]) -> Any:
    """The gradient of a derivative along a vector."""

    def slope(*inputs: Tensor) -> Tensor:
        return torch.func.jvp(attention, inputs, inputs)[1].square().sum()

    return torch.func.grad(slope, argnums=(0, 1, 2))(*inputs)


def hvp_in_jax(inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """The same product by JAX's attention, jitted."""
    jax = importlib.import_module("jax")
    arrays = tuple(to_jax(x.transpose(1, 2)) for x in inputs)

    def loss(inputs: Any) -> Any:
        return (jax.nn.dot_product_attention(*inputs) ** 2).sum()

    product = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1])
    return lambda: jax.block_until_ready(product(arrays))


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "gradient": gradient,
    "HVP, reverse over reverse": partial(hvp, mode="reverse-over-reverse"),
    "HVP, forward over reverse": partial(hvp, mode="forward-over-reverse"),
    "jvp": jvp,
    "gradient of a jvp": through_jvp,
}


def draw(length: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, HEADS, length, WIDTH) for _ in range(3))


def row(name: str, length: int, repeats: int) -> str:
    derivative, inputs = DERIVATIVES[name], draw(length)
    routes: dict[str, Attention] = {"formula": formula, "blocks": by_blocks}
    if name == "gradient":
        routes["fused kernel"] = F.scaled_dot_product_attention
    if name == "HVP, reverse over reverse":
        routes["chunks in ops.remat"] = in_remat
    runs: dict[str, Callable[[], Any]] = {
        route: partial(derivative, attention, inputs) for route, attention in routes.items()
    }
    for route in ("blocks", *(set(runs) - {"blocks", "formula"})):
        torch.testing.assert_close(runs[route](), runs["formula"](), rtol=1e-3, atol=1e-4)
    if name == "HVP, forward over reverse" and find_spec("jax"):
        runs["JAX jit"] = hvp_in_jax(inputs)
    seconds = interleaved(runs, repeats)
    peaks = {route: peak_allocated(run) for route, run in runs.items() if route != "JAX jit"}
    beside = {
        route: f"{seconds[route] / seconds['formula']:.2f} of the time"
        + (f", {peaks[route] / peaks['formula']:.2f} of the peak" if route in peaks else "")
        for route in runs
    }
    others = "; ".join(
        f"{route}: {beside[route]}" for route in runs if route not in ("formula", "blocks")
    )
    return (
        f"| {name} | {length} | {seconds['formula'] * 1e3:.1f} | {peaks['formula'] / 2**20:.1f} "
        f"| {beside['blocks']} | {others} |"
    )


def derivative_rows(small: bool) -> Iterator[str]:
    for name in DERIVATIVES:
        for length in (8, 600) if small else LENGTHS:
            yield row(name, length, 1 if small else 5)


def long_rows(small: bool) -> Iterator[str]:
    before = 0
    for length in (600,) if small else (LENGTHS[-1], *LONGER):
        run = partial(hvp, by_blocks, draw(length), "reverse-over-reverse")
        (seconds,) = interleaved({"blocks": run}, 1).values()
        peak = peak_allocated(run)
        ratio = f"{peak / before:.2f}" if before else ""
        yield f"| {length} | {seconds:.1f} | {peak / 2**20:.1f} | {ratio} |"
        before = peak


TABLES = {
    "| derivative | length | formula, ms | MiB | blocks, of the formula's | others |": derivative_rows,
    "| length | HVP by blocks, s | MiB | of half the length |": long_rows,
}


if __name__ == "__main__":
    program(__doc__, TABLES)
