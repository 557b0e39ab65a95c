"""Other layouts of inputs and gradients, and other sizes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.element_differences import max_abs
from hoglib._core.source_location import format_error
from hoglib.verification import call as calls
from hoglib.verification.call import Arrange
from hoglib.verification.perturbed_point import DRAWS, REFUSED, PerturbedPoint
from hoglib.verification.report import Row

LAYOUT = (
    "Nothing may be assumed of strides: use reshape rather than view, and .contiguous() before code "
    "that reads memory."
)


def layouts(around: PerturbedPoint) -> Iterator[Row]:
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


def _relaid(
    around: PerturbedPoint, name: str, before: Arrange | None, after: Arrange | None
) -> Row:
    f = around.subject.call.map(around.subject.which, before=before, after=after)
    try:
        values = f(*around.x)
    except Exception as raised:
        advice = "Call .contiguous() first, or reshape rather than view."
        return Row(name, "warn", None, f"{REFUSED.format(error=format_error(raised))} {advice}")
    off, i = around.worst(values, around.values)
    if off > around.tolerance:
        return Row(name, "fail", off, f"{around.subject.rows[i]} is another one. {LAYOUT}")
    return around.compare(
        name, lambda: around.both(f, around.x), around.first, around.second, LAYOUT
    )


def _repeated(around: PerturbedPoint) -> Row:
    """Inputs of stride 0, against copies of them."""
    name = "layout: stride-0 inputs"
    call, which = around.subject.call, around.subject.which
    f = call.map(which, before=_stretched)
    try:
        f(*around.x)
        plain = around.both(call.map(which, before=lambda x: _stretched(x).clone()), around.x)
    except Exception as raised:
        return Row(name, "skip", None, REFUSED.format(error=format_error(raised)))
    return around.compare(name, lambda: around.both(f, around.x), *plain, LAYOUT)


def _expanded(around: PerturbedPoint) -> Row:
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


def _zero_size(around: PerturbedPoint) -> Row:
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
        return Row(name, "skip", None, REFUSED.format(error=format_error(raised)))
    try:
        u = [torch.ones_like(y) for y in values]
        grads = calls.gradient(around.f, around.n)(*x, *u)
    except Exception as raised:
        return Row(
            name,
            "warn",
            None,
            f"forward takes inputs without elements, backward {format_error(raised)}",
        )
    odd = [
        around.names[j] for j, (g, y) in enumerate(zip(grads, x, strict=True)) if g.shape != y.shape
    ]
    if odd:
        return Row(name, "warn", None, f"the gradient by {odd[0]} has another shape there.")
    return Row(name, "pass")


def _no_dimensions(around: PerturbedPoint) -> Row:
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
        return Row(name, "skip", None, REFUSED.format(error=format_error(raised)))
    try:
        grads = calls.gradient(around.f, around.n)(*x, *[torch.ones_like(y) for y in values])
    except Exception as raised:
        return Row(
            name,
            "warn",
            None,
            f"forward takes inputs without dimensions, backward {format_error(raised)}",
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


# === Values that are not finite, and that are not the same twice.


def finite(around: PerturbedPoint) -> Row:
    name = "finite"
    values, grads = around.f(*around.x), around.first
    for row, y in zip(around.subject.rows, values, strict=True):
        if bool(y.isnan().any()):
            return Row(name, "fail", None, f"{row} is NaN at the inputs. Are they in its domain?")
    for j, g in enumerate(grads):
        if bool(g.isnan().any()):
            return Row(
                name, "fail", None,
                f"the gradient by {around.names[j]} is NaN at the inputs, and the values are not. "
                "Choose the derivative there by convention, with torch.where on the argument of "
                "the function and on the result.",
            )  # fmt: skip
    second = around.second or []
    for j, g in enumerate(second):
        if bool(g.isnan().any()):
            return Row(
                name, "fail", None,
                f"the second derivative by {around.names[j]} is NaN at the inputs, and the first is "
                "not. A torch.where lets NaN through where its other branch is infinite: guard the "
                "argument, not only the result.",
            )  # fmt: skip
    for text, tensors in (
        ("a value", values),
        ("a gradient", grads),
        ("a second derivative", second),
    ):
        if any(bool(t.isinf().any()) for t in tensors):
            return Row(name, "warn", None, f"{text} is infinite at the inputs.")
    most = max((max_abs(g) for g in grads), default=0.0)
    scale = max(
        (max_abs(y) / max(max_abs(x), 1e-30) for y in values for x in around.x), default=0.0
    )
    if most > 1e8 * max(scale, 1.0):
        return Row(
            name, "warn", most,
            f"a gradient of suspicious size: {most:.3g}, at values of {max(map(max_abs, values)):.3g}.",
        )  # fmt: skip
    if most == 0.0:
        return Row(
            name, "warn", 0.0,
            "every gradient is zero at the inputs. If that is not meant, is something detached or "
            "rounded in forward?",
        )  # fmt: skip
    return Row(name, "pass")


def extremes(around: PerturbedPoint) -> Row:
    """Gradients at zeros and far out, where values are finite still."""
    name = "finite: extreme inputs"
    bad = []
    for what, x in (
        ("zeros", [torch.zeros_like(y) for y in around.x]),
        ("the inputs times 100", [100 * y for y in around.x]),
    ):
        try:
            values = around.f(*x)
            if not all(bool(y.isfinite().all()) for y in values):
                continue
            first = calls.gradient(around.f, around.n)(*x, *around.u)
            found = "gradient" if any(bool(g.isnan().any()) for g in first) else ""
            if not found and around.second is not None:
                twice = around.twice(around.f, x, around.every)
                found = "second derivative" if any(bool(g.isnan().any()) for g in twice) else ""
        except Exception:  # a function is free to refuse them
            continue
        if found:
            bad.append(f"the {found} is NaN at {what}, where the value is finite")
    if bad:
        return Row(name, "warn", None, "; ".join(bad) + ".")
    return Row(name, "pass")


def with_graph(around: PerturbedPoint) -> Row:
    """The gradient with create_graph=True is the one without."""
    name = "create_graph"
    leaves = [y.detach().clone().requires_grad_() for y in around.x]
    values = around.f(*leaves)
    u = [y.clone() for y in around.u]
    found = torch.autograd.grad(values, leaves, u, materialize_grads=True)
    off, j = around.worst(found, around.first)
    if off > around.tolerance:
        return Row(
            name, "fail", off,
            f"the gradient by {around.names[j]} with create_graph=True is not the one without it: "
            "backward asks whether gradients are on (torch.is_grad_enabled, requires_grad), and "
            "computes another thing then. Compute the same.",
        )  # fmt: skip
    return Row(name, "pass", off)


def deterministic(around: PerturbedPoint, nondet_tol: float, *, surrogate: bool) -> Row:
    name = "deterministic"
    leaves = [y.detach().clone().requires_grad_() for y in around.x]
    values = around.f(*leaves)

    def once() -> list[Tensor]:
        u = [y.clone() for y in around.u]
        return list(
            torch.autograd.grad(
                values, leaves, u, retain_graph=True, materialize_grads=True,
                create_graph=around.second is not None,
            )
        )  # fmt: skip

    a, b = once(), once()
    what = "the gradient"
    off, j = around.worst(a, b, relative=False)
    if off <= nondet_tol and around.second is not None:
        live = [(g, w) for g, w in zip(a, around.w, strict=True) if g.requires_grad]
        if live:
            twice = [
                torch.autograd.grad(
                    [g for g, _ in live], leaves, [w for _, w in live], retain_graph=True,
                    materialize_grads=True,
                )
                for _ in range(2)
            ]  # fmt: skip
            off, j = around.worst(*twice, relative=False)
            what = "the second derivative"
    if off > nondet_tol:
        text = (
            f"{what} by {around.names[j]} is not the same twice (nondeterministic), by {off:.2g}. "
            "backward draws random numbers or sums in no fixed order; draw in forward and save, or "
            "set nondet_tol."
        )
        return Row(name, "warn" if surrogate else "fail", off, text)
    if around.subject.draws:
        return Row(
            name, "warn", off,
            "forward draws random numbers; it was checked with the same ones each time.",
        )  # fmt: skip
    return Row(name, "pass", off)


def state(around: PerturbedPoint) -> Row:
    """A second call between forward and backward of a first one."""
    name = "state"
    n = around.subject.call.num_inputs
    if not n:
        return Row(name, "skip", None, "it is differentiated by its parameters only.")
    before = {f: dict(vars(f)) for f in around.subject.functions}
    try:
        leaves = [y.detach().clone().requires_grad_() for y in around.x]
        values = around.f(*leaves)
        # the same parameters: a module has one set of them at a time
        around.f(*((1.1 * y).requires_grad_() for y in around.x[:n]), *leaves[n:])
        found = torch.autograd.grad(
            values, leaves, [y.clone() for y in around.u], materialize_grads=True, create_graph=True
        )
    except Exception as raised:
        return Row(name, "skip", None, f"two calls at once raised {format_error(raised)}")
    off, j = around.worst(found, around.first)
    if off > around.tolerance:
        return Row(
            name, "fail", off,
            f"the gradient by {around.names[j]} of one call is another one after a second call: "
            f"something that backward needs is kept {_where(before)}. "
            "Save it with ctx.save_for_backward.",
        )  # fmt: skip
    return Row(name, "pass", off)


def _where(before: dict[type[Function], dict[str, Any]]) -> str:
    changed = [
        f"{function.__name__}.{name}"
        for function, was in before.items()
        for name, value in vars(function).items()
        if value is not was.get(name)
    ]
    return f"on the class, as {', '.join(changed)}" if changed else "outside of ctx, as in a global"
