"""The ops beside what they replace: `python -m experiments.benchmarks.ops` (about a minute).

Two tables. The first is what a call costs on a small tensor: an op made by `hoglib.ops.define`, the
same Function written by hand with setup_context, and the composite of plain torch
operations. The second is a first- and a second-order step of a network of `linear_act` layers and of
`softmax_cross_entropy` beside the composites, with the memory that the graph holds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hoglib as hog
from experiments.benchmarks.timing import interleaved, program


class ByHand(torch.autograd.Function):
    """Swish with setup_context, as a careful author would write it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, beta: Tensor) -> Tensor:
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, beta = ctx.saved_tensors
        by_x = by_beta = None
        if ctx.needs_input_grad[0]:
            s = torch.sigmoid(beta * x)
            by_x = grad * (s * (1 + beta * x * (1 - s)))
        if ctx.needs_input_grad[1]:
            s = torch.sigmoid(beta * x)
            by_beta = (grad * (x * (x * (s * (1 - s))))).sum_to_size(beta.shape)
        return by_x, by_beta

    @staticmethod
    def jvp(ctx: Any, by_x: Tensor, by_beta: Tensor) -> Any:
        x, beta = ctx.saved_tensors
        s = torch.sigmoid(beta * x)
        return by_x * s * (1 + beta * x * (1 - s)) + by_beta * x * x * s * (1 - s)


def _swish_composite(x: Tensor, beta: Tensor) -> Tensor:
    return x * torch.sigmoid(beta * x)


def swishes() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """One formula four times; each is checked against the composite before it is timed."""
    by_define = hog.ops.define(
        _swish_composite,
        [
            lambda x, beta, _: (s := torch.sigmoid(beta * x)) * (1 + beta * x * (1 - s)),
            lambda x, beta, _: x * (x * ((s := torch.sigmoid(beta * x)) * (1 - s))),
        ],
        reference=_swish_composite,
        keep="inputs",
    )
    return {
        "ops.define": by_define,
        "by hand, setup_context": ByHand.apply,
        "torch composite": _swish_composite,
    }


def overhead(small: bool) -> list[str]:
    x = torch.randn(32, 32, requires_grad=True)
    beta = torch.ones(32, requires_grad=True)

    def step(f: Callable[..., Tensor]) -> Any:
        return torch.autograd.grad(f(x, beta).sum(), [x, beta])

    functions = swishes()
    expected = step(_swish_composite)
    for function in functions.values():
        torch.testing.assert_close(step(function), expected)
    calls = {name: partial(_many, partial(step, f)) for name, f in functions.items()}
    seconds = interleaved(calls, 3 if small else 200)
    base = seconds["by hand, setup_context"]
    return [
        f"| {name} | {value / MANY * 1e6:.0f} | {value / base:.2f} |"
        for name, value in seconds.items()
    ]


MANY = 20


def _many(step: Callable[[], object]) -> None:
    for _ in range(MANY):
        step()


def mlp_loss(layer: Callable[..., Tensor], weights: list[Tensor], x: Tensor) -> Tensor:
    for weight in weights:
        x = layer(x, weight, None)
    return x.square().mean()


def cross_entropy_loss(loss: Callable[..., Tensor], weights: list[Tensor], x: Tensor) -> Tensor:
    return loss(F.linear(x, weights[0]), torch.arange(len(x)) % weights[0].shape[0])


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "swish": F.silu,
    "relu": torch.relu,
}


def workloads(small: bool) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Any]]:
    """name: (ours, composite, the weights and input that both take)."""
    sizes = {"32 units": 32} if small else {"32 units": 32, "512 units": 512}
    found: dict[str, Any] = {}
    for size, width in sizes.items():
        weights = [torch.randn(width, width) / width**0.5 for _ in range(4)]
        for act, function in ACTS.items():
            found[f"linear_act {act}, 4 layers of {size}"] = (
                partial(mlp_loss, partial(hog.ops.linear_act, act=act)),
                partial(mlp_loss, partial(_composite, function)),
                (weights, torch.randn(64, width)),
            )
    for classes in (10,) if small else (10, 5000):
        found[f"softmax_cross_entropy, {classes} classes"] = (
            partial(cross_entropy_loss, hog.ops.softmax_cross_entropy),
            partial(cross_entropy_loss, F.cross_entropy),
            ([torch.randn(classes, 64) / 8], torch.randn(256, 64)),
        )
    return found


def _composite(act: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return act(F.linear(x, w, b))


def first_order(loss: Callable[..., Tensor], weights: list[Tensor], x: Tensor) -> Any:
    return torch.autograd.grad(loss(weights, x), weights)


def second_order(loss: Callable[..., Tensor], weights: list[Tensor], x: Tensor) -> Any:
    grads = torch.autograd.grad(loss(weights, x), weights, create_graph=True)
    return torch.autograd.grad(torch.stack([(g * g).sum() for g in grads]).sum(), weights)


def held_bytes(loss: Callable[..., Tensor], weights: list[Tensor], x: Tensor) -> int:
    """What the graph of a loss and of its gradient keeps for backward, each storage once."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        torch.autograd.grad(loss(weights, x), weights, create_graph=True)
    return sum(storages.values())


def fused(small: bool) -> Iterator[str]:
    for name, (ours, composite, (weights, x)) in workloads(small).items():
        for weight in weights:
            weight.requires_grad_()
        cells = []
        for order in (first_order, second_order):
            torch.testing.assert_close(
                order(ours, weights, x), order(composite, weights, x), rtol=1e-3, atol=1e-5
            )
            both = {"ours": ours, "composite": composite}
            runs = {name: partial(order, loss, weights, x) for name, loss in both.items()}
            seconds = interleaved(runs, 2 if small else 60)
            ratio = seconds["ours"] / seconds["composite"]
            cells.append(f"{seconds['ours'] * 1e3:.2f} ms, {ratio:.2f}")
        memory = held_bytes(ours, weights, x) / held_bytes(composite, weights, x)
        yield f"| {name} | {cells[0]} | {cells[1]} | {memory:.2f} |"


TABLES = {
    "| forward and backward of a 32x32 swish | us | to by hand, setup_context |": overhead,
    "| op | first order: time, to composite | second order | memory of both graphs |": fused,
}


if __name__ == "__main__":
    program(__doc__, TABLES)
