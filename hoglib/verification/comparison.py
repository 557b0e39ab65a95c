"""The derivative of a map, in reverse or in forward mode, against central differences and a reference.

In forward mode a direction v gives the vector J v, which is compared element by element. In reverse
mode a covector w gives J^T w, and <J^T w, v> is compared with <w, J v>; w is drawn so that all elements
of J v have equal weight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core import element_differences
from hoglib._core.element_differences import (
    Slope,
    TensorMap,
    directions,
    max_abs,
    random_like,
    recheck,
    slope,
)
from hoglib._core.pytree import is_float
from hoglib._core.source_location import format_error
from hoglib._core.tolerances import TOLERANCES
from hoglib.verification import call as calls
from hoglib.verification.call import Call
from hoglib.verification.options import Bounds
from hoglib.verification.report import Row
from hoglib.verification.subject import Subject

TRUST = 5.0  # the error of a difference may be this many times its estimate


class Target(NamedTuple):
    """A map at a point, what its outputs and inputs are called, and its slopes by differences."""

    map: TensorMap
    x: list[Tensor]
    rows: list[str]
    columns: list[str]
    slopes: list[Slope]


def target(
    f: TensorMap, x: Sequence[Tensor], rows: Sequence[str], columns: Sequence[str],
    random: torch.Generator, *, draws: int = 1, full: bool = False, eps: float | None = None,
) -> Target:  # fmt: skip
    slopes = [
        slope(f, x, j, v, eps=eps)
        for j, value in enumerate(x)
        for v in directions(value, draws, random, full=full)
    ]
    return Target(f, list(x), list(rows), list(columns), slopes)


def recheck_target(at: Target, random: torch.Generator) -> Target:
    """The target with its slopes checked again, which is worth its time only if something seems
    wrong."""
    return at._replace(slopes=[recheck(at.map, at.x, one, random) for one in at.slopes])


@final
@dataclass
class Discrepancy:
    """The worst of what was compared."""

    error: float = 0.0
    wrong: str = ""  # what is wrong, in words; empty where all is right
    row: int = -1
    column: int = -1
    got: float = 0.0
    expected: float = 0.0
    checked: int = 0
    unknown: set[int] = field(default_factory=set)  # columns that nothing was concluded from
    problem: str = ""  # what differences said there
    raised: Exception | None = None
    faulty: set[int] = field(default_factory=set)  # columns with a wrong derivative

    def merge(self, other: "Discrepancy") -> "Discrepancy":
        """The worse of both; an unknown column is one that is unknown in both."""
        worse = other if (other.wrong and not self.wrong) or other.error > self.error else self
        if self.wrong and not other.wrong:
            worse = self
        result = Discrepancy(**vars(worse))
        result.checked = self.checked + other.checked
        result.unknown = self.unknown & other.unknown
        result.faulty = self.faulty | other.faulty
        result.problem = self.problem or other.problem
        return result


def in_forward(
    at: Target,
    bounds: Bounds,
    push: Callable[[TensorMap, Sequence[Tensor], int, Tensor], list[Tensor]],
) -> Discrepancy:
    """J v for each direction, element by element."""
    found = Discrepancy()
    concluded = set()
    for one in at.slopes:
        try:
            got = push(at.map, at.x, one.column, one.v)
        except Exception as error:
            return _raised(error, at, one.column)
        for i, value in enumerate(got):
            known = one.known(i)
            if value.numel() and not bool(known.any()):
                found.problem = found.problem or one.problem
                continue
            concluded.add(one.column)
            allowed = (
                bounds.rtol * one.values[i].abs()
                + bounds.atol * min(1.0, one.size(i))
                + TRUST * one.errors[i]
                + one.floors[i]
            )
            difference = torch.where(known, (value - one.values[i]).abs(), 0.0)
            _compare_elements(found, at, i, one.column, difference, allowed, value, one)
    found.unknown = {one.column for one in at.slopes} - concluded
    return found


def _compare_elements(
    found: Discrepancy, at: Target, i: int, j: int, difference: Tensor, allowed: Tensor, value: Tensor,
    one: Slope,
) -> None:  # fmt: skip
    if not difference.numel():
        return
    found.checked += 1
    wrong = ~(difference <= allowed)
    if bool(wrong.any()):
        found.faulty.add(j)
    size = one.size(i) + one.floors[i]
    worst = int((difference.nan_to_num(torch.inf) - allowed).nan_to_num(torch.inf).argmax())
    size = max(size, abs(float(value.reshape(-1)[worst])))
    error = float(difference.reshape(-1)[worst]) / (size or 1.0)
    if bool(wrong.any()) and not (found.wrong and found.error >= error):
        where = f", element {worst}" if difference.numel() > 1 else ""
        expected, got = (float(t.reshape(-1)[worst]) for t in (one.values[i], value))
        found.wrong = f"{_label(at, i, j)}{where}: expected {expected:.6g}, got {got:.6g}"
        found.row, found.column, found.got, found.expected = i, j, got, expected
        found.error = error
    elif not found.wrong:
        found.error = max(found.error, error)


def in_reverse(
    at: Target, bounds: Bounds, random: torch.Generator, *, draws: int = 2, full: bool = False,
    batched: bool = False, wanted: Sequence[int] | None = None, f: TensorMap | None = None,
) -> Discrepancy:  # fmt: skip
    """<J^T w, v> for each direction v and a few covectors w; f, if given, replaces the map."""
    found = Discrepancy()
    f = at.map if f is None else f
    wanted = list(range(len(at.x))) if wanted is None else list(wanted)
    slopes = [one for one in at.slopes if one.column in wanted]
    covectors = [
        (i, w) for i in range(len(at.rows)) for w in _covectors(slopes, i, random, draws, full)
    ]
    try:
        pulled = calls.vjps(f, at.x, covectors, wanted, batched=batched)
    except Exception as error:
        return _raised(error, at, -1)
    concluded = set()
    for (i, w), grads in zip(covectors, pulled, strict=True):
        for one in slopes:
            known = one.known(i)
            if bool((w[~known] != 0).any()):
                found.problem = found.problem or one.problem
                continue
            concluded.add(one.column)
            terms = torch.where(known, w * one.values[i], 0.0)
            errors = torch.where(known, w.abs() * one.errors[i], 0.0)
            expected = float(terms.sum())
            scale = float(terms.square().sum().sqrt())  # size of a sum of terms with random signs
            got = float((grads[wanted.index(one.column)] * one.v).sum())
            if got != got and not bool(known.all()):
                found.problem = found.problem or "its gradient is NaN there"
                continue
            reach = float(w.abs().sum())
            allowed = (
                bounds.rtol * scale
                + bounds.atol * min(1.0, one.size(i)) * reach
                + TRUST * float(errors.sum())
                + one.floors[i] * reach
            )
            _compare_number(
                found, at, i, one.column, got, expected, allowed, scale + one.floors[i] * reach
            )
    found.unknown = {one.column for one in slopes} - concluded
    return found


def _covectors(
    slopes: Sequence[Slope], i: int, random: torch.Generator, draws: int, full: bool
) -> list[Tensor]:
    """Covectors of output i: zero where the difference is unknown, and of equal weight elsewhere."""
    if not slopes:
        return []
    like = slopes[0].values[i]
    known = torch.ones_like(like, dtype=torch.bool)
    sizes = torch.zeros_like(like)
    for one in slopes:
        if bool(one.known(i).any()) or not like.numel():
            known &= one.known(i)
            sizes += torch.where(one.known(i), one.values[i].abs(), 0.0)
    if not like.numel():
        return []
    if full:
        eye = torch.eye(like.numel(), dtype=like.dtype, device=like.device)
        return [w for w in eye.reshape(-1, *like.shape) if bool(known[w != 0].all())]
    share = 1.0 / (sizes + 1e-3 * (max_abs(sizes) or 1.0))
    share = torch.where(known, share / share.max(), 0.0)
    return [random_like(like, random) * share for _ in range(draws)]


def _compare_number(
    found: Discrepancy, at: Target, i: int, j: int, got: float, expected: float, allowed: float,
    scale: float,
) -> None:  # fmt: skip
    found.checked += 1
    off = abs(got - expected)
    error = off / (max(scale, abs(got)) or 1.0) if off == off else float("inf")
    if not off <= allowed:
        found.faulty.add(j)
    if not off <= allowed and not (found.wrong and found.error >= error):
        found.wrong = (
            f"{_label(at, i, j)}, along random directions: expected {expected:.6g}, got {got:.6g}"
        )
        found.row, found.column, found.got, found.expected = i, j, got, expected
        found.error = error
    elif not found.wrong:
        found.error = max(found.error, error)


def _label(at: Target, i: int, j: int) -> str:
    return f"{at.rows[i]}, by {at.columns[j]}"


def _raised(error: Exception, at: Target, column: int) -> Discrepancy:
    text = f"{type(error).__name__}: {error}".rstrip()
    by = f" (by {at.columns[column]})" if column >= 0 else ""
    return Discrepancy(
        error=float("inf"), wrong=f"it raised{by} {text}", raised=error, column=column
    )


VALUE, FIRST, SECOND = (
    f"reference: {what}" for what in ("value", "first derivative", "second derivative")
)


def reference_rows(
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
                off = _scaled_difference(a, b, size)
            except Exception as raised:
                yield Row(
                    VALUE, "fail", None, f"output {i} cannot be compared: {format_error(raised)}"
                )
                return
            if off > 1 and not text:
                text = f"output {i} differs from the reference: {_describe_pair(a, b)}."
            worst_value = max(worst_value, off)
    yield Row(VALUE, "fail" if text else "pass", worst_value * _rtol(subject), text)
    if text or not n:
        return
    if surrogate:
        for name in (FIRST, SECOND):
            yield Row(name, "skip", None, "declared a surrogate: it differs on purpose.")
        return

    def ours_of(*given: Tensor) -> list[Tensor]:
        return subject.map(*given, *ours_alone)

    def theirs_of(*given: Tensor) -> list[Tensor]:
        return plain.map(subject.output_indices)(*given, *theirs_alone)

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
                right = _derivative_of_order(theirs_of, x, u, w, order)
            except Exception as raised:
                worst[name] = (0.0, f"the reference raised {format_error(raised)}")
                continue
            try:
                found = _derivative_of_order(ours_of, x, u, w, order)
            except Exception as raised:
                worst[name] = (float("inf"), f"it raised {format_error(raised)}")
                continue
            for j, (a, b) in enumerate(zip(found, right, strict=True)):
                off = _scaled_difference(a, b, size)
                if off > 1 and not worst[name][1]:
                    text = f"by {subject.names[j]} it differs from the reference: "
                    text += f"{_describe_pair(a, b)}."
                    worst[name] = (off, text)
                elif not worst[name][1]:
                    worst[name] = (max(off, worst[name][0]), "")
    for name, (off, text) in worst.items():
        yield Row(name, "fail" if text else "pass", off * _rtol(subject), text)


def _derivative_of_order(
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


def _scaled_difference(a: Any, b: Any, size: float) -> float:
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


def _describe_pair(a: Any, b: Any) -> str:
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
