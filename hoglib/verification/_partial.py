"""Partial gradients: when only some inputs require grad, or only some outputs have a gradient."""

import itertools
from typing import Any

import torch
from torch import Tensor

from hoglib.verification import _maps as maps
from hoglib.verification._around import Around, told
from hoglib.verification.report import Row

MOST_SUBSETS = 14
UNDEFINED = (
    "An incoming gradient may be None (undefined): ask `if g is not None`, or leave "
    "ctx.set_materialize_grads at True, which makes it zeros."
)


def subsets(around: Around) -> tuple[Row, tuple[int, ...]]:
    """The row, and the subset of which the second derivative is another one."""
    name = "inputs: each subset"
    if around.n < 2:
        return Row(name, "skip", None, "there is one input only."), ()
    worst, refused = 0.0, ""
    for subset in _subsets(around.n):
        only = " and ".join(around.names[j] for j in subset)
        how = f"when only {only} require{'s' if len(subset) == 1 else ''} grad"
        try:
            first = maps.gradient(around.f, around.n, subset)(*around.x, *around.u)
            off, j = around.worst(first, [around.first[j] for j in subset])
            if off > around.tolerance:
                text = (
                    f"{how}, the gradient by {around.names[subset[j]]} is another one. Does "
                    "backward mix up ctx.needs_input_grad, or forward save less?"
                )
                return Row(name, "fail", off, text), ()
            worst = max(worst, off)
            if around.second is None:
                continue
            second = around.twice(around.f, around.x, subset)
            right = around.twice(around.f, around.x, around.every, subset)
            off, j = around.worst(second, right)
            if off > around.tolerance:
                text = f"{how}, the second derivative by {around.names[subset[j]]} is another one."
                return Row(name, "fail", off, text), subset
            worst = max(worst, off)
        except Exception as raised:
            text = f"{how}, it raised {told(raised)}"
            if "does not require grad" not in str(raised):
                return Row(name, "fail", None, text), ()
            refused = refused or (
                f"{text}. backward differentiates by inputs that need no gradient: leave those out, by "
                "ctx.needs_input_grad or x.requires_grad."
            )
    return Row(name, "warn" if refused else "pass", worst, refused), ()


def outputs_alone(around: Around) -> Row:
    """No gradient comes in at all, or only that of one output."""
    name = "outputs: undefined gradients"
    if not around.subject.functions:
        return Row(name, "skip", None, "no custom Function is in it.")
    leaves = [y.detach().clone().requires_grad_() for y in around.x]
    try:
        values = [_Nothing.apply(y) for y in around.f(*leaves)]
        total = torch.stack([y.sum() for y in values]).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    except Exception as raised:
        return Row(
            name, "fail", None, f"with an undefined gradient it raised {told(raised)}. {UNDEFINED}"
        )
    usual = all(bool(g.isfinite().all()) for g in around.first)
    if usual and any(g is not None and bool((g != 0).any()) for g in grads):
        return Row(
            name, "fail", None, f"with an undefined gradient its gradient is not zero. {UNDEFINED}"
        )
    if len(around.u) < 2:
        return Row(name, "pass")
    total_of: list[Tensor] | None = None
    for k in range(len(around.u)):
        try:
            part = maps.pull(around.f, around.x, [(k, around.u[k])])[0]
        except Exception as raised:
            return Row(
                name, "fail", None,
                f"when only {around.subject.rows[k]} has a gradient it raised {told(raised)}. "
                f"{UNDEFINED}",
            )  # fmt: skip
        total_of = (
            part if total_of is None else [a + b for a, b in zip(total_of, part, strict=True)]
        )
    off, j = around.worst(total_of or [], around.first)
    if off > around.tolerance:
        return Row(
            name, "fail", off,
            f"the gradient by {around.names[j]} of all outputs is not the sum of those of each "
            f"output alone. {UNDEFINED}",
        )  # fmt: skip
    return Row(name, "pass", off)


class _Nothing(torch.autograd.Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def _subsets(count: int) -> list[tuple[int, ...]]:
    """Each proper subset; of many inputs, each alone and all but each."""
    if count <= 3:
        sizes = range(1, count)
        return [s for size in sizes for s in itertools.combinations(range(count), size)]
    singles = [(j,) for j in range(count)]
    others = [tuple(k for k in range(count) if k != j) for j in range(count)]
    return [*singles[:MOST_SUBSETS], *others[:MOST_SUBSETS]]
