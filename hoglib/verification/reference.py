"""Agreement with a reference of plain torch operations: values, gradients, second derivatives."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib._core import element_differences
from hoglib._core.element_differences import max_abs, random_like
from hoglib._core.pytree import is_float
from hoglib._core.source_location import format_error
from hoglib._core.tolerances import TOLERANCES
from hoglib.verification import call as calls
from hoglib.verification.call import Call
from hoglib.verification.report import Row
from hoglib.verification.subject import Subject

VALUE, FIRST, SECOND = (
    f"reference: {what}" for what in ("value", "first derivative", "second derivative")
)


def rows(
    subject: Subject, reference: Callable[..., Any], points: Sequence[list[Tensor]], *,
    surrogate: bool,
) -> Iterator[Row]:  # fmt: skip
    """Values and derivatives by the inputs; parameters have no counterpart in the reference."""
    n = subject.call.num_inputs
    dtype = subject.dtype if subject.refused == "" else None
    plain = Call(reference, subject.inputs, dtype)
    ours_alone, theirs_alone = subject.x[n:], plain.point[n:]
    try:
        values = [
            (
                subject.call.leaves(*x[:n], *ours_alone),
                plain.leaves(*x[:n], *theirs_alone),
                max(map(max_abs, x), default=0.0),
            )
            for x in points
        ]
    except Exception as raised:
        yield Row(VALUE, "fail", None, f"the reference raised {format_error(raised)}")
        return
    worst_value, text = 0.0, ""
    for ours, theirs, size in values:
        if len(ours) != len(theirs):
            yield Row(
                VALUE, "fail", None,
                f"the reference gives {len(theirs)} outputs, the function {len(ours)}.",
            )  # fmt: skip
            return
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            try:
                off = _off(a, b, size)
            except Exception as raised:
                yield Row(
                    VALUE, "fail", None, f"output {i} cannot be compared: {format_error(raised)}"
                )
                return
            if off > 1 and not text:
                text = f"output {i} is another value than the reference's: {_pair(a, b)}."
            worst_value = max(worst_value, off)
    yield Row(VALUE, "fail" if text else "pass", worst_value * _rtol(subject), text)
    if text or not n:
        return
    if surrogate:
        for name in (FIRST, SECOND):
            yield Row(name, "skip", None, "declared a surrogate: its gradient is its own.")
        return

    def ours_of(*given: Tensor) -> list[Tensor]:
        return subject.map(*given, *ours_alone)

    def theirs_of(*given: Tensor) -> list[Tensor]:
        return plain.map(subject.which)(*given, *theirs_alone)

    there = [x.detach().clone().requires_grad_() for x in points[0][:n]]
    if not any(y.requires_grad for y in theirs_of(*there)):
        for name in (FIRST, SECOND):
            yield Row(name, "skip", None, "the reference has no gradient: it leaves torch.")
        return
    worst = {FIRST: (0.0, ""), SECOND: (0.0, "")}
    for point in points:
        x = point[:n]
        u = [random_like(y, subject.random) for y in ours_of(*x)]
        w = [random_like(y, subject.random) for y in x]
        size = max(max(map(max_abs, ours_of(*x))), 1e-3 * max(map(max_abs, x)))
        for name, order in ((FIRST, 1), (SECOND, 2)):
            try:
                right = _derivative(theirs_of, x, u, w, order)
            except Exception as raised:
                worst[name] = (0.0, f"the reference raised {format_error(raised)}")
                continue
            try:
                found = _derivative(ours_of, x, u, w, order)
            except Exception as raised:
                worst[name] = (float("inf"), f"it raised {format_error(raised)}")
                continue
            for j, (a, b) in enumerate(zip(found, right, strict=True)):
                off = _off(a, b, size)
                if off > 1 and not worst[name][1]:
                    text = f"that by {subject.names[j]} is not the reference's: {_pair(a, b)}."
                    worst[name] = (off, text)
                elif not worst[name][1]:
                    worst[name] = (max(off, worst[name][0]), "")
    for name, (off, text) in worst.items():
        yield Row(name, "fail" if text else "pass", off * _rtol(subject), text)


def _derivative(
    f: element_differences.TensorMap,
    x: Sequence[Tensor],
    u: Sequence[Tensor],
    w: Sequence[Tensor],
    order: int,
) -> list[Tensor]:
    leaves = [y.detach().clone().requires_grad_() for y in x]
    grads = calls.gradient(f, len(x))(*leaves, *u)
    if order == 1:
        return [g.detach() for g in grads]
    live = [(g, c) for g, c in zip(grads, w, strict=True) if g.requires_grad]
    if not live:
        return [torch.zeros_like(y) for y in x]
    return list(
        torch.autograd.grad(
            [g for g, _ in live], leaves, [c for _, c in live], materialize_grads=True
        )
    )


def _off(a: Any, b: Any, size: float) -> float:
    """The difference in units of what is allowed."""
    if not is_float(a):
        return 0.0 if bool(torch.equal(a, b) if isinstance(a, Tensor) else a == b) else 2.0
    if a.shape != b.shape:
        return float("inf")
    atol, rtol = TOLERANCES[a.dtype]
    same = (a == b) | (a.isnan() & b.isnan())
    allowed = atol * min(1.0, max(max_abs(b), size)) + rtol * max_abs(b)
    off = torch.where(same, 0.0, (a - b).abs())
    return float(off.nan_to_num(torch.inf).max()) / max(allowed, 1e-300) if off.any() else 0.0


def _rtol(subject: Subject) -> float:
    return TOLERANCES[subject.dtype].rtol


def _pair(a: Any, b: Any) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return f"{a!r}, expected {b!r}"
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    k = (
        int((a - b).abs().nan_to_num(torch.inf).argmax())
        if is_float(a)
        else int((a != b).int().argmax())
    )
    return f"element {k} is {a.reshape(-1)[k].item():.8g}, expected {b.reshape(-1)[k].item():.8g}"
