"""The comparer: the derivative of a map, in reverse or in forward mode, against central differences.

A direction v and a covector w give a number <w, J v> = <J^T w, v>, which is compared with <w, D v>. In
reverse mode J^T w is computed, in forward mode J v. w is drawn so that all elements of J v have equal
weight.

What computes in half precision is compared by means, over steps that are long beside its rounding:

    F(c + h v) - F(c - h v) = int_{-h}^{h} J(c + s v) v ds,    F the values, or the gradient

holds for any h, so that h need not be small, and the rounding of F, of size eps |F|, is divided by a
long step. The integral is estimated by one random point in each of a few intervals, which has no bias,
also across a kink. Around several centres c that lie close together, but many units of rounding apart,
the rounding errors differ and a fault stays what it is: the mean over the centres is compared with what
their spread allows. So the noise is measured, and not assumed from the dtype.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Generator, Tensor

from hoglib._core import validation
from hoglib._core.element_differences import (
    Slope,
    TensorMap,
    directions,
    element_scales,
    max_abs,
    random_like,
    recheck,
    slope,
)
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.verification import call as calls
from hoglib.verification.call import Numbered, Tensors
from hoglib.verification.report import MODES, ORDINALS, Row

T = TypeVar("T")
# The least tolerance in a dtype other than float64: central differences are no more accurate there.
NARROW = {torch.float32: 3e-2, torch.float16: 0.2, torch.bfloat16: 0.2}
# What central differences leave in float32 where their error was measured: no constant stands for it.
MEASURED = {torch.float32: (1e-4, 1e-3)}
# Of the gradient: an iterative solver leaves as much, and a second derivative that is less changes no
# product with it.
NATURAL = 1e-5


class Bounds(NamedTuple):
    """|derivative - difference| <= rtol |difference| + atol min(1, largest difference).

    natural: what is less than this share of the values does no harm, however much of it is missing.
    measured: whether the rounding of the derivative is that of the differences, as it was measured,
    and not a share of the largest element.
    """

    atol: float = 1e-6
    rtol: float = 1e-4
    natural: float = 0.0
    measured: bool = False

    def closer(self, dtype: torch.dtype) -> "Bounds | None":
        """The bounds for a second look in a dtype: those of `in_dtype` hide elements that are small
        beside the largest one. None where there are none."""
        if dtype not in MEASURED or self.measured:
            return None
        atol, rtol = MEASURED[dtype]
        if self.atol > NARROW[dtype]:  # asked for
            return None
        return Bounds(atol, rtol, self.natural, measured=True)


@final
@dataclass(frozen=True)
class Options:
    """What `verify` was asked for. Its arguments say what each field means."""

    orders: tuple[int, ...] = (1, 2)
    modes: tuple[str, ...] | None = None  # the keys; None: all that the function offers
    surrogate: bool = False
    full: bool = False
    eps: float | None = None
    bounds: Bounds = Bounds()  # noqa: RUF009
    nondet_tol: float = 0.0

    def __post_init__(self) -> None:
        if self.eps is not None and not 0.0 < validation.number("eps", self.eps) <= 1.0:
            raise ArgumentValueError(f"eps: expected a number in (0, 1], got {self.eps}.")
        bounds = {"atol": self.bounds.atol, "rtol": self.bounds.rtol}
        for name, value in {**bounds, "nondet_tol": self.nondet_tol}.items():
            if validation.number(name, value, minimum=0.0) == inf:
                raise ArgumentValueError(f"{name}: expected a finite number, got {value}.")

    def in_dtype(self, dtype: torch.dtype) -> "Options":
        """The options with the tolerances that differences in a dtype allow."""
        least = NARROW.get(dtype, 0.0)
        atol, rtol, natural, _ = self.bounds
        return replace(self, bounds=Bounds(max(atol, least), max(rtol, least), natural))


def some_of(what: str, value: Any, known: Mapping[Any, T], shown: Any = None) -> list[T]:
    """The values of one or several names, in the order of the table; raises for what is none of them.

    shown: the names that a message about another type lists. Default: all.
    """
    given = [value] if isinstance(value, type(next(iter(known)))) else value
    if not isinstance(given, list | tuple | range | set | frozenset) or not given:
        raise ArgumentTypeError(
            f"{what}: expected some of {', '.join(map(str, shown or known))}, got "
            f"{validation.describe(value)}."
        )
    for name in given:
        if isinstance(name, bool) or name not in list(known):  # which need not be hashable
            names = ", ".join(map(str, known))
            raise ArgumentValueError(f"{what}: expected some of {names}; got {name!r}.")
    return [*dict.fromkeys(known[name] for name in known if name in given)]


def parse_modes(value: Any) -> tuple[str, ...] | None:
    """The keys of modes, given by these or by their full names; None for all that are offered."""
    if value is None:
        return None
    known = {name: key for key, title in MODES.items() for name in (title, key)}
    return tuple(some_of("modes", value, known, MODES))


def parse_orders(value: Any) -> tuple[int, ...]:
    """The orders, ascending; first and second by default."""
    return tuple(some_of("orders", (1, 2) if value is None else value, {k: k for k in ORDINALS}))


class Target(NamedTuple):
    """A map at a point, what its outputs and inputs are called, and its slopes by differences."""

    map: TensorMap
    x: list[Tensor]
    rows: list[str]
    columns: list[str]
    slopes: Sequence[Slope] = ()
    full: bool = False  # whether these are along each element

    def with_slopes(
        self, random: Generator, *, full: bool = False, eps: float | None = None
    ) -> "Target":
        along = [(j, v) for j, x in enumerate(self.x) for v in directions(x, random, full=full)]
        slopes = [slope(self.map, self.x, j, v, eps=eps) for j, v in along]
        return self._replace(slopes=slopes, full=full)


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
        self, at: Target, i: int, j: int, got: float, expected: float, allowed: float, size: float
    ) -> None:
        """Count one number, and keep it if it is the worst."""
        off = abs(got - expected)
        error = off / (size or 1.0) if off == off else inf
        self.checked += 1
        if not off <= allowed:
            self.faulty.add(j)
            if not (self.wrong and self.error >= error):
                what = f"{at.rows[i]}, by {at.columns[j]}, along random directions"
                self.wrong = f"{what}: expected {expected:.6g}, got {got:.6g}"
                self.row, self.column, self.got, self.expected = i, j, got, expected
                self.error = error
        elif not self.wrong:
            self.error = max(self.error, error)

    @classmethod
    def of_error(cls, error: Exception) -> "Discrepancy":
        text = f"it raised {type(error).__name__}: {error}".rstrip()
        return cls(error=inf, wrong=text, raised=error)

    def merge(self, other: "Discrepancy") -> "Discrepancy":
        """The worse of both; an unknown column, or a blank row, is one in both."""
        worse = max(self, other, key=lambda one: (bool(one.wrong), one.error))
        result = Discrepancy(**vars(worse))
        result.checked = self.checked + other.checked
        result.unknown = self.unknown & other.unknown
        result.blank = self.blank & other.blank
        result.faulty = self.faulty | other.faulty
        result.problem = self.problem or other.problem
        return result


Found = Mapping[str, Discrepancy]  # by the name of the row that rests on it


def products(
    f: TensorMap, x: Tensors, vectors: Numbered, covectors: Numbered, key: str
) -> list[list[tuple[float, bool]]]:
    """<w, J v> for each covector w and each direction v of an input, and whether J^T w, or J v, is
    anything but exact zeros.

    key: the mode of the derivative: reverse ("r") or forward ("f", or "ff" by torch.func) first.
    """
    if key[0] == "r":
        return [
            [(float((grads[j] * v).sum()), bool(grads[j].any())) for j, v in vectors]
            for grads in calls.vjps(f, x, covectors)
        ]
    pushed = [calls.jvp(f, x, j, v, by_torch_func=key == "ff") for j, v in vectors]
    return [
        [(float(torch.where(w == 0, 0.0, w * t[i]).sum()), bool(t[i].any())) for t in pushed]
        for i, w in covectors
    ]


def largest_difference(
    found: Tensors, right: Tensors, floor: float | None = 0.0
) -> tuple[float, int]:
    """The largest difference between two lists of tensors, and the index of its tensor: relative to the
    size of each tensor, or the floor, if that is larger; absolute for None."""
    errors = []
    for x, y in zip(found, right, strict=True):
        x, y = x.detach(), y.detach()
        same = (x == y) | (x.isnan() & y.isnan())
        off = torch.where(same, 0.0, (x - y).abs()).nan_to_num(inf)
        size = 1.0 if floor is None else max(max_abs(y), floor, 1e-300)
        errors.append(float(off.max()) / size if bool(off.any()) else 0.0)
    j = max(range(len(errors)), key=errors.__getitem__, default=0)
    return max(errors, default=0.0), j


# What to say if they differ, by {name}; numbers that were found, and those that are right
Pair = tuple[str, Sequence[Tensor] | None, Sequence[Tensor] | None]


def agreement(
    row: str, *pairs: Pair, tolerance: float, floor: float = 0.0, names: Sequence[str] = ("",)
) -> Row:
    """Whether numbers agree that were computed in two ways, as far as both are known.

    names: those of the tensors. floor: as of `largest_difference`.
    """
    worst = 0.0
    for text, found, right in pairs:
        if found is not None and right is not None:
            off, j = largest_difference(found, right, floor)
            if not off <= tolerance:
                return Row(row, "fail", off, text.replace("{name}", names[j]))
            worst = max(worst, off)
    return Row(row, "pass", worst)


COVECTORS = 2  # covectors of an output
COARSE_ATOL = 1e-3  # a tolerance, that of a dtype narrower than float64
COARSE_GRAIN = 1e-10  # values that are coarser than this are those of a dtype narrower than float64
FEW = 30  # roundings
TRUST = 5.0  # the error of a difference may be this many times its estimate
DROWNED = "their noise exceeds the derivative"


def compared(at: Target, key: str, bounds: Bounds, random: Generator) -> Discrepancy:
    """<w, J v> along the direction v of each slope for a few covectors w of each output."""
    found = Discrepancy()
    outputs = range(len(at.rows))
    covectors = [(i, w) for i in outputs for w in _covectors(at, i, bounds, random)]
    try:
        numbers = products(at.map, at.x, [(s.column, s.v) for s in at.slopes], covectors, key)
    except Exception as error:
        return Discrepancy.of_error(error)
    concluded, rows = set(), set()
    for k, ((i, w), along) in enumerate(zip(covectors, numbers, strict=True)):
        for n, (one, (got, moves)) in enumerate(zip(at.slopes, along, strict=True)):
            known = one.known(i)
            if bool((w[~known] != 0).any()):
                found.problem = found.problem or one.problem
                continue
            # NaN beside elements that differences do not know, as at the edge of a domain, is no
            # fault; where all are known it is one, which is noted below
            if got != got and not bool(known.all()):
                found.problem = found.problem or "its gradient is NaN there"
                concluded.add(one.column)
                rows.add(i)
                continue
            terms = torch.where(known, w * one.values[i], 0.0)
            errors = torch.where(known, w.abs() * one.errors[i], 0.0)
            expected = float(terms.sum())
            scale = float(terms.square().sum().sqrt())  # size of a sum of terms with random signs
            reach, noise = _random_sum(w), TRUST * _random_sum(errors)
            rounding = allowed = noise + bounds.natural * one.scale(i) * reach
            if moves:  # an exact zero was not rounded
                coarse = bounds.atol > COARSE_ATOL or bounds.measured
                varying = float((w * (one.values[i] != 0)).norm()) if coarse else reach
                # the error that is rounding, whatever the value
                floor = FEW * one.grains[i] * one.scale(i) if bounds.measured else one.floors[i]
                rounding += bounds.atol * min(1.0, one.size(i)) * varying + floor * reach
                allowed = rounding + bounds.rtol * scale
            found.signed[one.column, k, n] = got - expected, allowed, scale
            if _is_drowned(one, i, got, expected, scale, noise, reach, rounding):
                found.problem = found.problem or DROWNED
                continue
            concluded.add(one.column)
            rows.add(i)
            size = max(scale + one.floors[i] * reach, abs(got))
            found.note(at, i, one.column, got, expected, allowed, size)
    found.unknown = {one.column for one in at.slopes} - concluded
    if key[0] == "r":
        found.blank = {at.rows[i] for i, _ in covectors if i not in rows}
    return found


def _random_sum(terms: Tensor) -> float:
    """A bound of the sum of terms with random signs: of all, or three standard deviations."""
    return min(float(terms.abs().sum()), 3.0 * float(terms.norm()))


def _is_drowned(
    one: Slope,
    i: int,
    got: float,
    expected: float,
    scale: float,
    noise: float,
    reach: float,
    rounding: float,
) -> bool:
    """Whether the noise of a difference exceeds the number, so that any number would do.

    Noise that is small beside the values is none to speak of where both numbers are zero by it; nor
    where they agree. Numbers that differ by much more than rounding do not agree, even if the noise
    allows for that.
    """
    eps, off = one.grains[i], abs(got - expected)
    natural = reach * one.scale(i)
    number = max(abs(got), scale)
    if number <= noise and noise > max(1e-3, 50 * eps) * natural:
        return True
    some = abs(got) > 100 * eps * natural
    return some and ((number <= rounding and off > 0.5 * number) or 0.1 * number < off <= rounding)


def _covectors(at: Target, i: int, bounds: Bounds, random: Generator) -> list[Tensor]:
    """Covectors of output i: zero where the difference is unknown, and of equal weight elsewhere, but
    for elements below the tolerance. With a coarse tolerance the last one weighs them by their size."""
    like = at.slopes[0].values[i]
    known = torch.ones_like(like, dtype=torch.bool)
    sizes = torch.zeros_like(like)
    for one in at.slopes:
        if bool(one.known(i).any()):
            known &= one.known(i)
            sizes += torch.where(one.known(i), one.values[i].abs(), 0.0)
    if at.full:
        eye = torch.eye(like.numel(), dtype=like.dtype, device=like.device)
        return [w for w in eye.reshape(-1, *like.shape) if bool(known[w != 0].all())]
    share = 1.0 / (sizes + max(1e-3, bounds.atol) * (max_abs(sizes) or 1.0))
    share = torch.where(known, share / share.max(), 0.0)
    draws = [random_like(like, random) * share for _ in range(COVECTORS)]
    if bounds.atol > COARSE_ATOL or any(one.grains[i] > COARSE_GRAIN for one in at.slopes):
        # what is allowed for many small elements would exceed the few that are large
        draws[-1] = random_like(like, random) * known
    return draws


MAX_NUMEL = 256  # elements that are differentiated one by one


def wrong_elements(f: TensorMap, x: Tensors, i: int, j: int, random: Generator) -> str:
    """Which elements of the gradient of output i by input j are wrong, as gradcheck says it; for an
    input of not too many."""
    if x[j].numel() > MAX_NUMEL:
        return ""
    w = random_like(f(*x)[i], random)
    got = calls.vjps(f, x, [(i, w)])[0][j].reshape(-1)
    slopes = [slope(f, x, j, v) for v in directions(x[j], random, full=True)]
    found = [float((w * one.values[i]).sum()) / float(one.v.sum()) for one in slopes]
    right = torch.tensor(found, device="cpu").to(got)
    wrong = ((got - right).abs() > 1e-4 * right.abs().max()).nonzero().reshape(-1).tolist()
    if not wrong:
        return ""
    k = wrong[0]
    return (
        f"{len(wrong)} of {got.numel()} elements of that gradient are wrong: element {k} is "
        f"{float(got[k]):.6g}, and should be {float(right[k]):.6g}."
    )


# What is wrong has to be so by slopes that are checked again, and at points around

NOISE_TEXT = "their noise in this dtype is {noise:.0%} of the derivative"
SMALL_NOISE = 0.1  # ignore relative noise below this
NUM_SHAKEN_POINTS = 4  # points around, at which what is wrong by measured tolerances is wrong, too


class Comparer(NamedTuple):
    """Compares derivatives of one function with differences, at a few points.

    dtype: the one that it is given; half: that which it computes in, if that is half precision.
    """

    options: Options
    random: Generator
    dtype: torch.dtype
    half: torch.dtype | None

    def target(self, at: Target) -> Target:
        """With the slopes that are compared; in half precision short differences are rounding."""
        if self.half is not None or at.slopes:
            return at
        return at.with_slopes(self.random, full=self.options.full, eps=self.options.eps)

    def worst(self, at: Iterable[Target], key: str) -> Discrepancy:
        """What is worst at all points."""
        result: Any = None
        for one in [self.target(one) for one in at]:
            found = self._at_one(one, key)
            result = found if result is None else result.merge(found)
            if result.raised is not None:
                break
        return result

    def _at_one(self, at: Target, key: str) -> Discrepancy:
        if self.half is not None:
            return compared_by_means(at, key, self.half, self.random)
        state = self.random.get_state()
        found = self._compared(at, key)
        if found.wrong and found.raised is None:
            # what differs from a difference is no fault where that is no slope: at a tie, or where
            # the map oscillates faster than the steps
            slopes = [recheck(at.map, at.x, one, self.random) for one in at.slopes]
            self.random.set_state(state)  # with the covectors that found it
            return self._compared(at._replace(slopes=slopes), key)
        return found if found.wrong else self._closer(at, key, found)

    def _closer(self, at: Target, key: str, found: Discrepancy) -> Discrepancy:
        """What was found right by the tolerances of a narrow dtype, by those that its differences allow
        as they were measured. What is wrong by these has to be so at points around, too; otherwise it
        is noise, and elements that are less than that are not known."""
        bounds = self.options.bounds.closer(self.dtype)
        if bounds is None:
            return found
        closer = self._compared(at, key, bounds)
        if not closer.wrong:
            return closer if closer.raised is None else found
        noise = self._noise(at, key, bounds, closer.column)
        if noise is None:
            return closer
        if noise > SMALL_NOISE:
            found.unknown |= closer.faulty
            found.checked -= 1
            found.problem = NOISE_TEXT.format(noise=noise)
        return found

    def _noise(self, at: Target, key: str, bounds: Bounds, column: int) -> float | None:
        """The noise of what was compared by an input, relative to it, if that is all that is wrong: a
        fault is off by about as much at points close by, along the same directions, and noise is
        not."""
        # a generator of its own: the covectors are drawn from the other one, and have to be the
        # same
        shaken = torch.Generator().manual_seed(10)
        state = self.random.get_state()
        runs: list[Discrepancy] = []
        for _ in range(NUM_SHAKEN_POINTS):
            self.random.set_state(state)
            x = [y * (1 + 0.01 * random_like(y, shaken)) for y in at.x]
            with suppress(Exception):  # it may refuse what the user did not pass
                runs.append(self._compared(self.target(at._replace(x=x, slopes=())), key, bounds))
        worst = 0.0
        shared = set(runs[0].signed).intersection(*(one.signed for one in runs)) if runs else set()
        for which in (one for one in shared if one[0] == column):
            seen = [one.signed[which][0] for one in runs]
            offs = torch.tensor(seen, dtype=torch.float64, device="cpu")
            allowed = sum(one.signed[which][1] for one in runs) / len(runs)
            mean, spread = float(offs.mean().abs()), float(offs.std())
            if mean > allowed and mean > 5 * spread / len(runs) ** 0.5:
                return None
            size = sum(one.signed[which][2] for one in runs) / len(runs)
            worst = max(worst, spread / (size or 1.0))
        return worst

    def _compared(self, at: Target, key: str, bounds: Bounds | None = None) -> Discrepancy:
        return compared(at, key, bounds or self.options.bounds, self.random)


# In half precision, by means

CENTRES = 16
AROUND = 0.04  # how far the centres are apart, relative to the elements
INTERVALS = 4
HALF_LENGTH = 0.25  # h
PAIRS = 3  # directions and covectors of an input and an output
SIGMAS = 6.0  # standard errors of the mean that are taken for noise
BIAS = 4.0  # units of rounding: a covector is rounded to the same number at each centre
CONCLUSIVE = 0.4  # noise of more than this share of the number hides it


def compared_by_means(at: Target, key: str, dtype: torch.dtype, random: Generator) -> Discrepancy:
    """The same for what computes in half precision, along directions of its own."""
    found = Discrepancy()
    short = str(dtype).removeprefix("torch.")
    concluded, rows = set(), set()
    try:
        values = [y.detach() for y in at.map(*at.x)]
        for j in (j for j in range(len(at.x)) for _ in range(PAIRS)):
            v = random_like(at.x[j], random) * element_scales(at.x[j])
            covectors = [(i, random_like(y, random)) for i, y in enumerate(values) if y.numel()]
            lines = [[*_integrals(at, j, v, covectors, key, random)] for _ in range(CENTRES)]
            integrals = torch.tensor(lines, dtype=torch.float64, device="cpu")
            if not bool(integrals[..., 1:].isfinite().all()):
                found.problem = found.problem or "it is not defined around the inputs"
                continue
            off = integrals[..., 0] - integrals[..., 1]
            noise = SIGMAS * off.std(0) / CENTRES**0.5
            for k, (i, _) in enumerate(covectors):
                got, expected, size = integrals[:, k].mean(0).tolist()
                size = max(size, abs(got), abs(expected))
                allowed = float(noise[k]) + BIAS * torch.finfo(dtype).eps * size
                if abs(got - expected) <= allowed and float(noise[k]) > CONCLUSIVE * size:
                    found.problem = found.problem or f"the noise of {short} exceeds the derivative"
                    continue
                found.note(at, i, j, got, expected, allowed, size)
                concluded.add(j)
                rows.add(i)
    except Exception as error:
        return Discrepancy.of_error(error)
    found.unknown = set(range(len(at.x))) - concluded
    found.blank = {row for i, row in enumerate(at.rows) if i not in rows and values[i].numel()}
    return found


def _integrals(
    at: Target, j: int, v: Tensor, covectors: Numbered, key: str, random: Generator
) -> Iterator[tuple[float, float, float]]:
    """Of each covector, along a line through a centre: the integral of <w, J v> by the derivative, and
    the difference of <w, F> at the ends, both divided by its length; and the size of a sum of its terms
    with random signs. NaN where the map refuses the ends."""
    h = HALF_LENGTH
    centre = [y + AROUND * element_scales(y) * random_like(y, random) for y in at.x]

    def point(s: float) -> list[Tensor]:
        return [*centre[:j], centre[j] + s * v, *centre[j + 1 :]]

    try:
        above, below = at.map(*point(h)), at.map(*point(-h))
    except Exception:
        yield from [(nan, nan, nan)] * len(covectors)
        return
    shares = torch.rand(INTERVALS, generator=random, dtype=torch.float64, device="cpu").tolist()
    points = [point(h * (2 * (k + share) / INTERVALS - 1)) for k, share in enumerate(shares)]
    slopes = [products(at.map, x, [(j, v)], covectors, key) for x in points]
    for k, (i, w) in enumerate(covectors):
        terms = w * (above[i].detach() - below[i].detach()) / (2 * h)
        mean = sum(one[k][0][0] for one in slopes) / INTERVALS
        yield mean, float(terms.sum()), float(terms.norm())
