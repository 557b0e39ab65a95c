"""What `hoglib.second_order()` costs: a call inside it, the look at the graph, the stand-ins.

    python -m experiments.benchmarks.stand_ins [--smoke]

The first table is the time of one call beside the same outside of the context; the second, forward and
backward of stand-ins beside torch's own functions. One thread, float32, medians of interleaved runs.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hoglib as hog
from experiments.benchmarks.timing import interleaved, program

# What each node of a graph costs to check is internal to `hvp`, and is timed alone here.
from hoglib._core.substrate.gradient_graph import graph_summary

MANY = 1000


def many(call: Callable[[], object], inside: bool) -> None:
    if inside:
        with hog.second_order():
            for _ in range(MANY):
                call()
    else:
        for _ in range(MANY):
            call()


def calls(small: bool) -> list[str]:
    repeats = 2 if small else 50
    x = torch.randn(4)
    lines = []
    timed: dict[str, Callable[[], object]] = {
        "torch.sin": lambda: torch.sin(x),
        "x.shape": lambda: x.shape,
    }
    for name, call in timed.items():
        seconds = interleaved(
            {"outside": partial(many, call, False), "inside": partial(many, call, True)}, repeats
        )
        lines.append(
            f"| {name} of 4 numbers | {seconds['outside'] / MANY * 1e6:.2f} "
            f"| {seconds['inside'] / MANY * 1e6:.2f} |"
        )
    value = x.clone().requires_grad_()
    for _ in range(MANY):
        value = torch.sin(value)
    value = value.sum()
    seconds = interleaved({"walk": partial(graph_summary, value)}, repeats)
    lines.append(f"| the walk over one node of a graph | | {seconds['walk'] / MANY * 1e6:.2f} |")
    return lines


def attention(q: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


def stand_ins(small: bool) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Any]]:
    """name: (torch's, ours, the tensors that both take)."""
    rows, wide = (8, 16) if small else (256, 256)
    image = torch.randn(rows // 8, 8, 16, 16)
    logits = torch.randn(16, rows // 8, 12)
    targets = torch.randint(1, 12, (rows // 8, 4))
    lengths = torch.full((rows // 8,), 16), torch.full((rows // 8,), 4)
    grid = torch.rand(rows // 8, 16, 16, 2) * 2 - 1
    bags = torch.randint(rows, (rows, 4))
    ours = hog.ops
    return {
        "scaled_dot_product_attention (beside MATH)": (
            attention,
            lambda q: ours.scaled_dot_product_attention(q, q, q),
            [torch.randn(4, 4, rows // 4, 32)],
        ),
        "layer_norm": (
            lambda x, w: F.layer_norm(x, x.shape[-1:], w),
            lambda x, w: ours.layer_norm(x, x.shape[-1:], w),
            [torch.randn(rows, wide), torch.randn(wide)],
        ),
        "batch_norm, training": (
            lambda x: F.batch_norm(x, None, None, training=True),
            lambda x: ours.batch_norm(x, None, None, training=True),
            [image],
        ),
        "mse_loss": (
            lambda x: F.mse_loss(x, torch.zeros_like(x)),
            lambda x: ours.mse_loss(x, torch.zeros_like(x)),
            [torch.randn(rows, wide)],
        ),
        "linalg.solve": (
            lambda a: torch.linalg.solve(a, a.sum(0)),
            lambda a: ours.solve(a, a.sum(0)),
            [torch.eye(wide) + 0.01 * torch.randn(wide, wide)],
        ),
        "cdist": (torch.cdist, ours.cdist, [torch.randn(rows, 32), torch.randn(rows, 32)]),
        "embedding_bag": (
            lambda w: F.embedding_bag(bags, w),
            lambda w: ours.embedding_bag(bags, w),
            [torch.randn(rows, 32)],
        ),
        "ctc_loss": (
            lambda x: F.ctc_loss(x.log_softmax(-1), targets, *lengths),
            lambda x: ours.ctc_loss(x.log_softmax(-1), targets, *lengths),
            [logits],
        ),
        "grid_sample": (
            lambda x: F.grid_sample(x, grid, align_corners=False),
            lambda x: ours.grid_sample(x, grid, align_corners=False),
            [image],
        ),
    }


def step(function: Callable[..., Tensor], tensors: list[Tensor]) -> Any:
    return torch.autograd.grad(function(*tensors).square().sum(), tensors)


def beside_torch(small: bool) -> Iterator[str]:
    for name, (theirs, ours, tensors) in stand_ins(small).items():
        for tensor in tensors:
            tensor.requires_grad_()
        torch.testing.assert_close(step(ours, tensors), step(theirs, tensors), rtol=1e-3, atol=1e-4)
        runs = {"torch": partial(step, theirs, tensors), "ours": partial(step, ours, tensors)}
        seconds = interleaved(runs, 2 if small else 40)
        ratio = seconds["ours"] / seconds["torch"]
        yield f"| {name} | {seconds['torch'] * 1e3:.2f} | {ratio:.2f} |"


TABLES = {
    "| us a call | outside | inside `second_order()` |": calls,
    "| forward and backward | torch, ms | stand-in, to torch |": beside_torch,
}


if __name__ == "__main__":
    program(__doc__, TABLES)
