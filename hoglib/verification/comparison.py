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

DRAWS = 2  # covectors of an output
COARSE = 1e-3  # a tolerance, that of a dtype narrower than float64
GRAIN = 1e-10  # values that are coarser than this are those of a dtype narrower than float64
MANY = 256  # elements that are differentiated one by one
FEW = 30  # roundings
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
    random: torch.Generator, *, full: bool = False, eps: float | None = None,
) -> Target:  # fmt: skip
    slopes = [
        slope(f, x, j, v, eps=eps)
        for j, value in enumerate(x)
        for v in directions(value, random, full=full)
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
    blank: set[str] = field(default_factory=set)  # rows, likewise
    problem: str = ""  # what differences said there
    raised: Exception | None = None
    faulty: set[int] = field(default_factory=set)  # columns with a wrong derivative
    # by column and what was compared: what a number is off, with its sign; what is allowed; its size
    signed: dict[tuple[int, ...], tuple[float, float, float]] = field(default_factory=dict)

    def note(
        self, at: Target, i: int, j: int, where: str, wrong: bool, error: float, got: float,
        expected: float,
    ) -> None:  # fmt: skip
        """Count one comparison, and keep it if it is the worst."""
        self.checked += 1
        if wrong:
            self.faulty.add(j)
            if not (self.wrong and self.error >= error):
                what = f"{at.rows[i]}, by {at.columns[j]}{where}"
                self.wrong = f"{what}: expected {expected:.6g}, got {got:.6g}"
                self.row, self.column, self.got, self.expected = i, j, got, expected
                self.error = error
        elif not self.wrong:
            self.error = max(self.error, error)

    def merge(self, other: "Discrepancy") -> "Discrepancy":
        """The worse of both; an unknown column, or a blank row, is one in both."""
        worse = other if (other.wrong and not self.wrong) or other.error > self.error else self
        if self.wrong and not other.wrong:
            worse = self
        result = Discrepancy(**vars(worse))
        result.checked = self.checked + other.checked
        result.unknown = self.unknown & other.unknown
        result.blank = self.blank & other.blank
        result.faulty = self.faulty | other.faulty
        result.problem = self.problem or other.problem
        return result


def in_forward(at: Target, bounds: Bounds, *, by_torch_func: bool) -> Discrepancy:
    """J v for each direction, element by element."""
    found = Discrepancy()
    concluded = set()
    for n, one in enumerate(at.slopes):
        try:
            results = calls.jvp(at.map, at.x, one.column, one.v, by_torch_func=by_torch_func)
        except Exception as error:
            return _raised(error, at, one.column)
        for i, value in enumerate(results):
            known = one.known(i)
            if value.numel() and not bool(known.any()):
                found.problem = found.problem or one.problem
                continue
            concluded.add(one.column)
            errors = one.errors[i]
            if bounds.measured:  # of many elements some have equal slopes at two steps by chance
                errors = torch.where(known, errors, 0.0).max().expand_as(errors)
            allowed = (
                bounds.rtol * one.values[i].abs()
                + bounds.atol * min(1.0, one.size(i))
                + TRUST * errors
                + _floor(one, i, bounds)
                + bounds.natural * one.scale(i)
            )
            if not value.numel():
                continue
            off = torch.where(known, (value - one.values[i]).abs(), 0.0)
            weights = random_like(off, torch.Generator().manual_seed(i))
            total = (torch.where(known, value - one.values[i], 0.0) * weights).sum()
            size = float(torch.where(known, one.values[i], 0.0).norm())
            found.signed[one.column, i, n] = float(total), _random_sum(allowed), size
            worst = int((off.nan_to_num(torch.inf) - allowed).nan_to_num(torch.inf).argmax())
            numbers = (float(t.reshape(-1)[worst]) for t in (off, value, one.values[i]))
            distance, got, expected = numbers
            share = distance / (max(one.size(i) + one.floors[i], abs(got)) or 1.0)
            noise = TRUST * max_abs(torch.where(known, one.errors[i], 0.0))
            if _is_drowned(one, i, max_abs(value), one.size(i), float(off.max()), noise):
                concluded.discard(one.column)
                found.problem = found.problem or DROWNED
                continue
            where = f", element {worst}" if off.numel() > 1 else ""
            wrong = not bool((off <= allowed).all())
            found.note(at, i, one.column, where, wrong, share, got, expected)
    found.unknown = {one.column for one in at.slopes} - concluded
    return found


def in_reverse(
    at: Target, bounds: Bounds, random: torch.Generator, *, full: bool = False
) -> Discrepancy:
    """<J^T w, v> for each direction v and a few covectors w."""
    found = Discrepancy()
    covectors = [
        (i, w) for i in range(len(at.rows)) for w in _covectors(at.slopes, i, bounds, random, full)
    ]
    try:
        pulled = calls.vjps(at.map, at.x, covectors)
    except Exception as error:
        return _raised(error, at, -1)
    concluded, rows = set(), set()
    for k, ((i, w), grads) in enumerate(zip(covectors, pulled, strict=True)):
        for n, one in enumerate(at.slopes):
            known = one.known(i)
            if bool((w[~known] != 0).any()):
                found.problem = found.problem or one.problem
                continue
            terms = torch.where(known, w * one.values[i], 0.0)
            errors = torch.where(known, w.abs() * one.errors[i], 0.0)
            expected = float(terms.sum())
            scale = float(terms.square().sum().sqrt())  # size of a sum of terms with random signs
            grad = grads[one.column]
            got = float((grad * one.v).sum())
            if got != got and not bool(known.all()):
                found.problem = found.problem or "its gradient is NaN there"
                concluded.add(one.column)
                rows.add(i)
                continue
            floor = _floor(one, i, bounds)
            reach, noise = _random_sum(w), TRUST * _random_sum(errors)
            rounding = allowed = noise + bounds.natural * one.scale(i) * reach
            if bool(grad.any()):  # an exact zero was not rounded
                coarse = bounds.atol > COARSE or bounds.measured
                varying = float((w * (one.values[i] != 0)).norm()) if coarse else reach
                rounding += bounds.atol * min(1.0, one.size(i)) * varying + floor * reach
                allowed = rounding + bounds.rtol * scale
            off = abs(got - expected)
            found.signed[one.column, k, n] = got - expected, allowed, scale
            if _is_drowned(one, i, abs(got), scale, off, noise, reach, rounding):
                found.problem = found.problem or DROWNED
                continue
            concluded.add(one.column)
            rows.add(i)
            size = max(scale + one.floors[i] * reach, abs(got)) or 1.0
            share = off / size if off == off else float("inf")
            where = ", along random directions"
            found.note(at, i, one.column, where, not off <= allowed, share, got, expected)
    found.unknown = {one.column for one in at.slopes} - concluded
    found.blank = {at.rows[i] for i, _ in covectors if i not in rows}
    return found


def _floor(one: Slope, i: int, bounds: Bounds) -> float:
    """The error that is rounding, whatever the value."""
    return FEW * one.grains[i] * one.scale(i) if bounds.measured else one.floors[i]


DROWNED = "their noise exceeds the derivative"


def _random_sum(terms: Tensor) -> float:
    """A bound of the sum of terms with random signs: of all, or three standard deviations."""
    return min(float(terms.abs().sum()), 3.0 * float(terms.norm()))


def _is_drowned(
    one: Slope, i: int, got: float, expected: float, off: float, noise: float, reach: float = 1.0,
    rounding: float | None = None,
) -> bool:  # fmt: skip
    """Whether the noise of a difference exceeds the number, so that any number would do.

    Noise that is small beside the values is none to speak of where both numbers are zero by it; nor
    where they agree. Numbers that differ by much more than rounding do not agree, even if the noise
    allows for that.
    """
    eps = one.grains[i]
    natural = reach * one.scale(i)
    number = max(got, expected)
    if number <= noise and noise > max(1e-3, 50 * eps) * natural:
        return True
    some = got > 100 * eps * natural
    least = noise + reach * one.floors[i] if rounding is None else rounding
    return some and ((number <= least and off > 0.5 * number) or 0.1 * number < off <= least)


def wrong_elements(
    f: TensorMap, x: Sequence[Tensor], i: int, j: int, random: torch.Generator
) -> str:
    """Which elements of the gradient of output i by input j are wrong, as gradcheck says it; for an
    input of not too many."""
    if x[j].numel() > MANY:
        return ""
    w = random_like(f(*x)[i], random)
    got = calls.vjps(f, x, [(i, w)])[0][j].reshape(-1)
    slopes = [slope(f, x, j, v) for v in directions(x[j], random, full=True)]
    found = [float((w * one.values[i]).sum()) / float(one.v.sum()) for one in slopes]
    right = torch.tensor(found).to(got)
    wrong = ((got - right).abs() > 1e-4 * right.abs().max()).nonzero().reshape(-1).tolist()
    if not wrong:
        return ""
    k = wrong[0]
    return (
        f"{len(wrong)} of {got.numel()} elements of that gradient are wrong: element {k} is "
        f"{float(got[k]):.6g}, and should be {float(right[k]):.6g}."
    )


def _covectors(
    slopes: Sequence[Slope], i: int, bounds: Bounds, random: torch.Generator, full: bool
) -> list[Tensor]:
    """Covectors of output i: zero where the difference is unknown, and of equal weight elsewhere, but
    for elements below the tolerance. With a coarse tolerance the last one weighs them by their size."""
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
    share = 1.0 / (sizes + max(1e-3, bounds.atol) * (max_abs(sizes) or 1.0))
    share = torch.where(known, share / share.max(), 0.0)
    draws = [random_like(like, random) * share for _ in range(DRAWS)]
    if bounds.atol > COARSE or any(one.grains[i] > GRAIN for one in slopes):
        # what is allowed for many small elements would exceed the few that are large
        draws[-1] = random_like(like, random) * known
    return draws


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
    theirs = Call(reference, subject.inputs, subject.dtype if subject.refused == "" else None)
    for order, name in enumerate((VALUE, FIRST, SECOND)):
        worst, text = 0.0, ""
        for x in points:
            off, wrong = _at_point(subject, theirs, x[:n], order)
            worst, text = max(worst, off), text or wrong
        yield Row(name, "fail" if text else "pass", worst * TOLERANCES[subject.dtype].rtol, text)
        if order:
            continue
        if text or not n:
            return
        why = "declared a surrogate: it differs on purpose." if surrogate else ""
        there = [x.detach().clone().requires_grad_() for x in theirs.point]
        if not any(y.requires_grad for y in theirs.map(subject.output_indices)(*there)):
            why = why or "the reference has no gradient: it leaves torch."
        if why:
            yield from (Row(other, "skip", None, why) for other in (FIRST, SECOND))
            return


def _at_point(
    subject: Subject, reference: Call, x: Sequence[Tensor], order: int
) -> tuple[float, str]:
    """The largest difference of values or derivatives in units of what is allowed, and what is
    wrong."""
    seed = int(torch.randint(2**31, (), generator=subject.random))
    found = []
    for call, who in ((reference, "the reference"), (subject.call, "it")):
        try:
            own = [*x, *call.point[len(x) :]]
            random = torch.Generator().manual_seed(seed)
            found.append(_derivative(call, subject.output_indices, own, len(x), order, random))
        except Exception as raised:
            return float("inf"), f"{who} raised {format_error(raised)}"
    right, ours = found
    if len(ours) != len(right):
        return float("inf"), f"the reference gives {len(right)} outputs, the function {len(ours)}."
    size = max(map(max_abs, x), default=0.0)
    if order:
        size = max(1e-3 * size, *(max_abs(y) for y in subject.map(*x, *subject.x[len(x) :])))
    worst = 0.0
    for i, (a, b) in enumerate(zip(ours, right, strict=True)):
        what = f"by {subject.names[i]} it" if order else f"output {i}"
        try:
            off = _scaled_difference(a, b, size)
        except Exception as raised:
            return float("inf"), f"{what} cannot be compared: {format_error(raised)}"
        if off > 1:
            return off, f"{what} differs from the reference: {_describe_pair(a, b)}."
        worst = max(worst, off)
    return worst, ""


def _derivative(
    call: Call, which: Sequence[int], x: Sequence[Tensor], n: int, order: int,
    random: torch.Generator,
) -> list[Any]:  # fmt: skip
    """All outputs, or the gradients G of some by the first n variables, or d<w, G>/dx."""
    if not order:
        return call.leaves(*x)
    leaves = [y.detach().clone().requires_grad_() for y in x[:n]]

    def f(*given: Tensor) -> list[Tensor]:
        return call.map(which)(*given, *x[n:])

    u = [random_like(y, random) for y in f(*x[:n])]
    w = [random_like(y, random) for y in leaves]
    grads = calls.gradient(f, n)(*leaves, *u)
    return grads if order == 1 else calls.grad(grads, leaves, w)


def _scaled_difference(a: Any, b: Any, size: float) -> float:
    """The difference in units of what is allowed."""
    if not is_float(a):
        return 0.0 if bool(torch.equal(a, b) if isinstance(a, Tensor) else a == b) else 2.0
    if a.shape != b.shape:
        return float("inf")
    atol, rtol = TOLERANCES[a.dtype]
    same = (a == b) | (a.isnan() & b.isnan())
    allowed = atol * min(1.0, max(max_abs(b), size)) + rtol * max_abs(b)
    off = torch.where(same, 0.0, (a - b).abs()).detach()
    return float(off.nan_to_num(torch.inf).max()) / max(allowed, 1e-300) if off.any() else 0.0


def _describe_pair(a: Any, b: Any) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return f"{a!r}, expected {b!r}"
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    off = (a - b).abs().nan_to_num(torch.inf) if is_float(a) else (a != b).int()
    k = int(off.argmax())
    return f"element {k} is {a.reshape(-1)[k].item():.8g}, expected {b.reshape(-1)[k].item():.8g}"
