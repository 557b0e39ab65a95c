"""Other layouts of inputs and gradients, and other sizes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hoglib.verification import _maps as maps
from hoglib.verification._around import DRAWS, REFUSED, Around, told
from hoglib.verification._call import Arrange
from hoglib.verification.report import Row

LAYOUT = (
    "Nothing may be assumed of strides: use reshape rather than view, and .contiguous() before code "
    "that reads memory."
)


def layouts(around: Around) -> Iterator[Row]:
    """The same numbers in another layout, or none of them."""
    if around.subject.draws:
        for name in ("layout: non-contiguous inputs", "layout: stride-0 inputs"):
            yield Row(name, "skip", None, DRAWS)
    else:
        yield _relaid(around, "layout: non-contiguous inputs", strided, None)
        yield _repeated(around)
    yield _relaid(around, "layout: non-contiguous gradients", None, strided)
    yield _expanded(around)
    yield _zero_size(around)
    yield _no_dimensions(around)


def _relaid(around: Around, name: str, before: Arrange | None, after: Arrange | None) -> Row:
    f = around.subject.call.map(around.subject.which, before=before, after=after)
    try:
        values = f(*around.x)
    except Exception as raised:
        advice = "Call .contiguous() first, or reshape rather than view."
        return Row(name, "warn", None, f"{REFUSED.format(error=told(raised))} {advice}")
    off, i = around.worst(values, around.values)
    if off > around.tolerance:
        return Row(name, "fail", off, f"{around.subject.rows[i]} is another one. {LAYOUT}")
    return around.compare(
        name, lambda: around.both(f, around.x), around.first, around.second, LAYOUT
    )


def _repeated(around: Around) -> Row:
    """Inputs of stride 0, against copies of them."""
    name = "layout: stride-0 inputs"
    call, which = around.subject.call, around.subject.which
    f = call.map(which, before=_stretched)
    try:
        f(*around.x)
        plain = around.both(call.map(which, before=lambda x: _stretched(x).clone()), around.x)
    except Exception as raised:
        return Row(name, "skip", None, REFUSED.format(error=told(raised)))
    return around.compare(name, lambda: around.both(f, around.x), *plain, LAYOUT)


def _expanded(around: Around) -> Row:
    """The gradient of a sum is one number, expanded; that of the other sum is contiguous."""
    name = "layout: stride-0 gradients"
    call, which = around.subject.call, around.subject.which

    def run(after: Arrange) -> tuple[list[Tensor], list[Tensor] | None]:
        f = call.map(which, after=after)
        leaves = [y.detach().clone().requires_grad_() for y in around.x]
        total = torch.stack([y.sum() for y in f(*leaves)]).sum()
        first = torch.autograd.grad(
            total, leaves, create_graph=around.second is not None, materialize_grads=True
        )
        live = [(g, w) for g, w in zip(first, around.w, strict=True) if g.requires_grad]
        if not live:
            return list(first), None
        second = torch.autograd.grad(
            [g for g, _ in live], leaves, [w for _, w in live], materialize_grads=True
        )
        return list(first), list(second)

    right, twice = run(lambda y: (y * torch.ones_like(y)).sum())
    return around.compare(name, lambda: run(torch.sum), right, twice, LAYOUT)


def _zero_size(around: Around) -> Row:
    name = "layout: zero size"
    if not around.subject.functions:  # kernels of torch itself may stop the process
        return Row(name, "skip", None, "it is made of torch's own functions.")
    batch = around.x[0].shape[0] if around.x[0].dim() else None
    if batch is None:
        return Row(name, "skip", None, "its inputs have no dimensions.")
    x = [y[:0] if y.dim() and y.shape[0] == batch else y for y in around.x]
    try:
        values = around.f(*x)
    except Exception as raised:
        return Row(name, "skip", None, REFUSED.format(error=told(raised)))
    try:
        u = [torch.ones_like(y) for y in values]
        grads = maps.gradient(around.f, around.n)(*x, *u)
    except Exception as raised:
        return Row(
            name, "warn", None, f"forward takes inputs without elements, backward {told(raised)}"
        )
    odd = [
        around.names[j] for j, (g, y) in enumerate(zip(grads, x, strict=True)) if g.shape != y.shape
    ]
    if odd:
        return Row(name, "warn", None, f"the gradient by {odd[0]} has another shape there.")
    return Row(name, "pass")


def _no_dimensions(around: Around) -> Row:
    name = "layout: 0-d"
    if not around.subject.functions:  # kernels of torch itself may stop the process
        return Row(name, "skip", None, "it is made of torch's own functions.")
    shapes = {tuple(y.shape) for y in around.x}
    if len(shapes) > 1 or shapes == {()} or any(around.subject.call.complex_variables):
        return Row(name, "skip", None, "its inputs are not of one shape with dimensions.")
    x = [y.reshape(-1)[0].clone() for y in around.x]
    try:
        values = around.f(*x)
    except Exception as raised:
        return Row(name, "skip", None, REFUSED.format(error=told(raised)))
    try:
        grads = maps.gradient(around.f, around.n)(*x, *[torch.ones_like(y) for y in values])
    except Exception as raised:
        return Row(
            name, "warn", None, f"forward takes inputs without dimensions, backward {told(raised)}"
        )
    odd = [around.names[j] for j, g in enumerate(grads) if g.dim()]
    if odd:
        return Row(name, "warn", None, f"the gradient by {odd[0]} has dimensions there.")
    return Row(name, "pass")


def strided(x: Tensor) -> Tensor:
    """x stored with its dimensions reversed and gaps between elements; its gradient too."""
    order = tuple(reversed(range(x.dim())))
    turned = x.permute(order)
    return torch.stack([turned, torch.zeros_like(turned)], -1)[..., 0].permute(order)


def _stretched(x: Tensor) -> Tensor:
    """One entry of the first dimension, repeated without a copy."""
    return x[:1].expand_as(x) if x.dim() else x
