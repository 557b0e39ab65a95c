"""The derivative of a map, in reverse or in forward mode, against central differences.

In forward mode one direction v gives a whole vector, J v, compared element by element. In reverse mode
a covector w gives J^T w, of which <J^T w, v> is compared with <w, J v>; w is drawn so that every
element of J v counts alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
from hoglib.verification import call as calls

TRUST = 5.0  # how many times its own estimate a difference may be off


class Bounds(NamedTuple):
    """|derivative - difference| <= rtol |difference| + atol min(1, largest difference)."""

    atol: float
    rtol: float


@dataclass
class Found:
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

    def merge(self, other: "Found") -> "Found":
        """The worse of both; an unknown column is one that is unknown in both."""
        worse = other if (other.wrong and not self.wrong) or other.error > self.error else self
        if self.wrong and not other.wrong:
            worse = self
        result = Found(**vars(worse))
        result.checked = self.checked + other.checked
        result.unknown = self.unknown & other.unknown
        result.faulty = self.faulty | other.faulty
        result.problem = self.problem or other.problem
        return result


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


def sure(at: Target, random: torch.Generator) -> Target:
    """The target with its slopes looked at twice; worth it only where something seems wrong."""
    return at._replace(slopes=[recheck(at.map, at.x, one, random) for one in at.slopes])


def in_forward(
    at: Target,
    bounds: Bounds,
    push: Callable[[TensorMap, Sequence[Tensor], int, Tensor], list[Tensor]],
) -> Found:
    """J v for each direction, element by element."""
    found = Found()
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
            _take(found, at, i, one.column, difference, allowed, value, one)
    found.unknown = {one.column for one in at.slopes} - concluded
    return found


def _take(
    found: Found, at: Target, i: int, j: int, difference: Tensor, allowed: Tensor, value: Tensor,
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
        found.wrong = f"{_of(at, i, j)}{where}: expected {expected:.6g}, got {got:.6g}"
        found.row, found.column, found.got, found.expected = i, j, got, expected
        found.error = error
    elif not found.wrong:
        found.error = max(found.error, error)


def in_reverse(
    at: Target, bounds: Bounds, random: torch.Generator, *, draws: int = 2, full: bool = False,
    batched: bool = False, wanted: Sequence[int] | None = None, f: TensorMap | None = None,
) -> Found:  # fmt: skip
    """<J^T w, v> for each direction v and a few covectors w; f, if given, stands in for the map."""
    found = Found()
    f = at.map if f is None else f
    wanted = list(range(len(at.x))) if wanted is None else list(wanted)
    slopes = [one for one in at.slopes if one.column in wanted]
    covectors = [
        (i, w) for i in range(len(at.rows)) for w in _covectors(slopes, i, random, draws, full)
    ]
    try:
        pulled = calls.pull(f, at.x, covectors, wanted, batched=batched)
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
            scale = float(terms.square().sum().sqrt())  # what random signs make of the sum
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
            _weigh(found, at, i, one.column, got, expected, allowed, scale + one.floors[i] * reach)
    found.unknown = {one.column for one in slopes} - concluded
    return found


def _weigh(
    found: Found, at: Target, i: int, j: int, got: float, expected: float, allowed: float,
    scale: float,
) -> None:  # fmt: skip
    found.checked += 1
    off = abs(got - expected)
    error = off / (max(scale, abs(got)) or 1.0) if off == off else float("inf")
    if not off <= allowed:
        found.faulty.add(j)
    if not off <= allowed and not (found.wrong and found.error >= error):
        found.wrong = (
            f"{_of(at, i, j)}, along random directions: expected {expected:.6g}, got {got:.6g}"
        )
        found.row, found.column, found.got, found.expected = i, j, got, expected
        found.error = error
    elif not found.wrong:
        found.error = max(found.error, error)


def _covectors(
    slopes: Sequence[Slope], i: int, random: torch.Generator, draws: int, full: bool
) -> list[Tensor]:
    """Covectors of output i in which what is unknown has no part, and each known element its share."""
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


def _of(at: Target, i: int, j: int) -> str:
    return f"{at.rows[i]}, by {at.columns[j]}"


def _raised(error: Exception, at: Target, column: int) -> Found:
    text = f"{type(error).__name__}: {error}".rstrip()
    by = f" (by {at.columns[column]})" if column >= 0 else ""
    return Found(error=float("inf"), wrong=f"it raised{by} {text}", raised=error, column=column)
