"""What `hoglib.second_order()` costs: a call inside it, and the stand-ins.

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

MANY = 1000


def calls(small: bool) -> Iterator[str]:
    x = torch.randn(4)

    def outside() -> None:
        for _ in range(MANY):
            torch.sin(x)

    def inside() -> None:
        with hog.second_order():
            outside()

    seconds = interleaved({"outside": outside, "inside": inside}, 2 if small else 50)
    cells = " | ".join(f"{value / MANY * 1e6:.2f}" for value in seconds.values())
    yield f"| torch.sin of 4 numbers | {cells} |"


def stand_ins(small: bool) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Any]]:
    """name: (torch's, ours, the tensors that both take)."""
    rows, wide = (8, 16) if small else (256, 256)
    targets = torch.randint(1, 12, (rows // 8, 4))
    lengths = torch.full((rows // 8,), 16), torch.full((rows // 8,), 4)

    def of(function: Callable[..., Tensor], *more: Any, **options: Any) -> Any:
        return lambda x, *weights: function(x, *more, *weights, **options)

    def both(name: str, tensors: list[Tensor], *more: Any, **options: Any) -> Any:
        pair = (of(getattr(module, name), *more, **options) for module in (F, hog.ops))
        return (*pair, tensors)

    def attention(q: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, q, q)

    def loss(ctc: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: ctc(x.log_softmax(-1), targets, *lengths)

    points, image = torch.randn(4, 4, rows // 4, 32), torch.randn(rows // 8, 8, 16, 16)
    pair = [torch.randn(rows, 32), torch.randn(rows, 32)]
    return {
        "scaled_dot_product_attention (beside MATH)": (
            attention,
            lambda q: hog.ops.scaled_dot_product_attention(q, q, q),
            [points],
        ),
        "layer_norm": both("layer_norm", [torch.randn(rows, wide), torch.randn(wide)], (wide,)),
        "batch_norm, training": both("batch_norm", [image], None, None, training=True),
        "cdist": (torch.cdist, hog.ops.cdist, pair),
        "ctc_loss": (loss(F.ctc_loss), loss(hog.ops.ctc_loss), [torch.randn(16, rows // 8, 12)]),
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
