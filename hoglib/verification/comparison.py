"""Compare a map's derivative, in reverse or forward mode, with central differences.

Autograd gives J, differences give D. A direction v and a covector w make numbers of both:

    <w, J v> = <J^T w, v>        <w, D v>        |<w, J v> - <w, D v>| <= error of differences

Reverse mode computes J^T w, forward mode J v. w is drawn so that all elements of J v have equal weight.
`compare` compares the numbers at one point; `Comparer` decides on points, repetitions and tolerances.

A function that computes in half precision is compared by means over steps much longer than rounding:

    F(c + h v) - F(c - h v) = int_{-h}^{h} J(c + s v) v ds,    F the values, or the gradient

holds for any h. So h need not be small, and the rounding of F, of size eps |F|, is divided by a long
step. The integral is estimated at one random point in each of a few intervals, without bias even across
a kink. This is repeated around several centres c, close together but many units of rounding apart: the
rounding errors differ, a fault stays. The mean over the centres is compared with a bound from their
spread. So the noise is measured, and not assumed from the dtype.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, nan
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Generator, Tensor

from hoglib._core.messages import validation
from hoglib._core.numerics.element_differences import (
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
from hoglib.verification import maps
from hoglib.verification.maps import Map, Numbered, Tensors
from hoglib.verification.report import MODES, ORDINALS, Row

T = TypeVar("T")
# The least tolerance in other dtypes than float64, where central differences are less accurate.
NARROW = {torch.float32: 3e-2, torch.float16: 0.2, torch.bfloat16: 0.2}
# (atol, rtol) of central differences in float32, for `Bounds.measured`.
MEASURED = {torch.float32: (1e-4, 1e-3)}
# `Bounds.natural` for examinations inside a user's model, and for other values: an iterative solver
# leaves such errors in the gradient, and a smaller second derivative affects no product.
NATURAL = 1e-5


class Bounds(NamedTuple):
    """|derivative - difference| <= rtol |difference| + atol min(1, largest difference)."""

    atol: float = 1e-6
    rtol: float = 1e-4
    natural: float = 0.0  # errors below this fraction of the map's values are ignored
    # Estimate rounding of each difference by the spacing of the map's values, not as a fraction of the
    # largest element.
    measured: bool = False

    def closer(self, dtype: torch.dtype) -> "Bounds | None":
        """Tighter bounds for a second comparison: the bounds of `in_dtype` hide elements much smaller
        than the largest one. None if the dtype has no such bounds, or the user gave a larger atol."""
        if dtype not in MEASURED or self.measured:
            return None
        atol, rtol = MEASURED[dtype]
        if self.atol > NARROW[dtype]:  # chosen by the user
            return None
        return Bounds(atol, rtol, self.natural, measured=True)


@final
@dataclass(frozen=True)
class Options:
    """The checked arguments of `hoglib.verify`; its docstring describes them."""

    orders: tuple[int, ...] = (1, 2)
    modes: tuple[str, ...] | None = None  # keys of MODES; None means all that the function offers
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


def look_up(what: str, value: object, known: Mapping[Any, T], shown: Any = None) -> list[T]:
    """The table's values for one name or several, in the order of the table; raises for unknown names.

    shown: names listed in the message about a wrong type. Default: all.
    """
    given = [value] if isinstance(value, type(next(iter(known)))) else value
    if not isinstance(given, list | tuple | range | set | frozenset) or not given:
        raise ArgumentTypeError(
            f"{what}: expected some of {', '.join(map(str, shown or known))}, got "
            f"{validation.describe(value)}."
        )
    for name in given:
        if isinstance(name, bool) or name not in list(known):  # names may be unhashable
            names = ", ".join(map(str, known))
            raise ArgumentValueError(f"{what}: expected some of {names}; got {name!r}.")
    return [*dict.fromkeys(known[name] for name in known if name in given)]


def parse_modes(value: object) -> tuple[str, ...] | None:
    """The keys of MODES for keys or full names; None means all that the function offers."""
    if value is None:
        return None
    known = {name: key for key, title in MODES.items() for name in (title, key)}
    return tuple(look_up("modes", value, known, MODES))


def parse_orders(value: object) -> tuple[int, ...]:
    """The orders, ascending; first and second by default."""
    return tuple(look_up("orders", (1, 2) if value is None else value, {k: k for k in ORDINALS}))


class Target(NamedTuple):
    """A map at a point, and its slopes by differences."""

    map: TensorMap
    x: list[Tensor]
    rows: list[str]  # names of the outputs
    columns: list[str]  # names of the inputs
    slopes: Sequence[Slope] = ()  # D v for directions v
    full: bool = False  # there is a slope along each element

    def place(self, i: int, j: int) -> str:
        return f"{self.rows[i]}, by {self.columns[j]}"

    def with_slopes(
        self, random: Generator, *, full: bool = False, eps: float | None = None
    ) -> "Target":
        along = [(j, v) for j, x in enumerate(self.x) for v in directions(x, random, full=full)]
        slopes = [slope(self.map, self.x, j, v, eps=eps) for j, v in along]
        return self._replace(slopes=slopes, full=full)


class Number(NamedTuple):
    """<w, J v> by autograd (got) and <w, D v> by differences (expected)."""

    row: int = -1  # index of the output
    column: int = -1  # index of the input
    got: float = 0.0
    expected: float = 0.0
    allowed: float = 0.0  # bound of their difference
    size: float = 1.0  # denominator of `error`
    scale: float = 0.0  # size of `expected` if its terms had random signs
    # the noise of differences is larger than the number: nothing is concluded
    drowned: bool = False
    place: str = ""  # names of row and column
    draw: tuple[int, ...] = ()  # indices of covector and slope

    @property
    def off(self) -> float:
        return self.got - self.expected

    @property
    def wrong(self) -> bool:
        return not abs(self.off) <= self.allowed  # also for NaN

    @property
    def error(self) -> float:
        return inf if self.off != self.off else abs(self.off) / (self.size or 1.0)


@final
@dataclass(frozen=True)
class Discrepancy:
    """The result of a comparison."""

    numbers: Sequence[Number] = ()
    checked: int = 0  # the count of numbers that are not drowned
    unknown: Set[int] = frozenset()  # columns without any conclusion
    blank: Set[str] = frozenset()  # names of rows without any conclusion
    problem: str = ""  # why nothing was concluded
    raised: Exception | None = None  # the error of the derivative
    missing: str = ""  # why there is no derivative

    @cached_property
    def worst(self) -> Number:
        """The number with the largest relative error, among the wrong ones if there are any."""
        known = [one for one in self.numbers if not (one.drowned or self.missing)]
        wrong = [one for one in known if one.wrong]
        return max(wrong or known, key=lambda one: one.error, default=Number())

    @property
    def wrong(self) -> str:
        """A sentence on the worst number, if it is wrong; else `missing`."""
        one = self.worst
        if not one.wrong:
            return self.missing
        numbers = f"expected {one.expected:.6g}, got {one.got:.6g}"
        return f"{one.place}, along random directions: {numbers}"

    @property
    def error(self) -> float:
        return self.worst.error if self.raised is None else inf

    @property
    def faulty(self) -> set[int]:
        """The columns with a wrong derivative."""
        return {one.column for one in self.numbers if one.wrong and not one.drowned}

    @classmethod
    def of_error(cls, error: Exception) -> "Discrepancy":
        text = f"it raised {type(error).__name__}: {error}".rstrip()
        return cls(missing=text, raised=error)

    def merge(self, other: "Discrepancy") -> "Discrepancy":
        """The result at both points: a column is unknown, or a row blank, if it is so at each point."""
        # a NaN at this point is reported, rather than an exception at the other point
        raised, missing = (None, "") if self.error == inf else (other.raised, other.missing)
        unknown, blank = self.unknown & other.unknown, self.blank & other.blank
        numbers, checked = [*self.numbers, *other.numbers], self.checked + other.checked
        problem = self.problem or other.problem
        return Discrepancy(numbers, checked, unknown, blank, problem, raised, missing)


Discrepancies = Mapping[str, Discrepancy]  # by the name of the report's row


def products(
    f: TensorMap, x: Tensors, vectors: Numbered, covectors: Numbered, key: str
) -> list[list[tuple[float, bool]]]:
    """<w, J v> for each covector w and each direction v of an input; and whether J^T w by this input
    (reverse mode), or J v in this output (forward mode), has any nonzero element.

    key: the mode. Its first letter is the outermost level: reverse ("r") or forward ("f"; torch.func
    computes "ff").
    """
    if key[0] == "r":
        return [
            [(float((grads[j] * v).sum()), bool(grads[j].any())) for j, v in vectors]
            for grads in maps.vjps(f, x, covectors)
        ]
    pushed = [maps.jvp(f, x, j, v, by_torch_func=key == "ff") for j, v in vectors]
    return [
        [(float(torch.where(w == 0, 0.0, w * t[i]).sum()), bool(t[i].any())) for t in pushed]
        for i, w in covectors
    ]


def largest_difference(
    found: Tensors, right: Tensors, floor: float | None = 0.0
) -> tuple[float, int]:
    """The largest difference between two lists of tensors, and the index of the tensor with it.

    floor: differences are relative to the largest element of each tensor in `right`, or to the floor if
    that is larger. None: absolute differences.
    """
    errors = []
    for x, y in zip(found, right, strict=True):
        x, y = x.detach(), y.detach()
        same = (x == y) | (x.isnan() & y.isnan())
        off = torch.where(same, 0.0, (x - y).abs()).nan_to_num(inf)
        size = 1.0 if floor is None else max(max_abs(y), floor, 1e-300)
        errors.append(float(off.max()) / size if bool(off.any()) else 0.0)
    j = max(range(len(errors)), key=errors.__getitem__, default=0)
    return max(errors, default=0.0), j


# (text on a difference, with {name} for the tensor; found numbers; right numbers)
Pair = tuple[str, Sequence[Tensor] | None, Sequence[Tensor] | None]


def agreement(
    row: str, *pairs: Pair, tolerance: float, floor: float = 0.0, names: Sequence[str] = ("",)
) -> Row:
    """The row on whether numbers computed in two ways agree; a pair with None is left out.

    names: the names of the tensors. floor: see `largest_difference`.
    """
    worst = 0.0
    for text, found, right in pairs:
        if found is not None and right is not None:
            off, j = largest_difference(found, right, floor)
            if not off <= tolerance:
                return Row(row, "fail", off, text.replace("{name}", names[j]))
            worst = max(worst, off)
    return Row(row, "pass", worst)


COVECTORS = 2  # covectors for each output
COARSE_ATOL = 1e-3  # a larger tolerance belongs to a dtype narrower than float64
COARSE_GRAIN = 1e-10  # a larger relative spacing of values shows a dtype narrower than float64
FEW = 30  # rounding errors that a number may accumulate
TRUST = 5.0  # a difference may be off by this many times its estimated error
DROWNED = "their noise exceeds the derivative"


def compare(at: Target, key: str, bounds: Bounds, random: Generator) -> Discrepancy:
    """Compare J with D at one point: <w, J v> with <w, D v>, for the direction v of each slope and a
    few covectors w of each output. key: as for `products`."""
    covectors = [(i, w) for i in range(len(at.rows)) for w in _covectors(at, i, bounds, random)]
    try:
        along = products(at.map, at.x, [(s.column, s.v) for s in at.slopes], covectors, key)
    except Exception as error:
        return Discrepancy.of_error(error)
    numbers, concluded, problems = [], set[tuple[int, int]](), [""]
    for k, (i, w) in enumerate(covectors):
        for n, (D, (got, moves)) in enumerate(zip(at.slopes, along[k], strict=True)):
            known, element = D.known(i), (i, D.column)
            if bool((w[~known] != 0).any()):
                problems.append(D.problem)
            # NaN is a fault only if the differences know all elements; at the edge of a domain some
            # are unknown
            elif got != got and not bool(known.all()):
                problems.append("its gradient is NaN there")
                concluded.add(element)
            else:
                one = _number(i, w, D, got, moves, bounds)
                numbers.append(one._replace(place=at.place(i, D.column), draw=(k, n)))
                problems += [DROWNED] * one.drowned
                concluded |= set() if one.drowned else {element}
    unknown = {D.column for D in at.slopes} - {j for _, j in concluded}
    judged = {i for i, _ in covectors if key[0] == "r"}
    blank = {at.rows[i] for i in judged - {i for i, _ in concluded}}
    checked = sum(not one.drowned for one in numbers)
    return Discrepancy(numbers, checked, unknown, blank, next(filter(None, problems), ""))


def _number(i: int, w: Tensor, D: Slope, got: float, moves: bool, bounds: Bounds) -> Number:
    """The Number for <w, J v> = got: its counterpart <w, D v>, and a bound of their difference.

    moves: J v, or J^T w, has a nonzero element. An exact zero has no rounding error.
    """
    known = D.known(i)
    terms = torch.where(known, w * D.values[i], 0.0)
    errors = torch.where(known, w.abs() * D.errors[i], 0.0)
    expected = float(terms.sum())
    scale = float(terms.square().sum().sqrt())  # size of a sum of terms with random signs
    reach, noise = _random_sum(w), TRUST * _random_sum(errors)
    rounding = allowed = noise + bounds.natural * D.scale(i) * reach
    if moves:
        coarse = bounds.atol > COARSE_ATOL or bounds.measured
        varying = float((w * (D.values[i] != 0)).norm()) if coarse else reach
        # an absolute error from rounding, independent of the derivative's size
        floor = FEW * D.grains[i] * D.scale(i) if bounds.measured else D.floors[i]
        rounding += bounds.atol * min(1.0, D.size(i)) * varying + floor * reach
        allowed = rounding + bounds.rtol * scale
    # Drowned: the noise exceeds the number, so that any number would pass. Two cases do not count as
    # drowned: noise that is small beside the values, if both numbers are zero up to this noise; and
    # numbers that agree. A difference of a large part of the size is no agreement, whatever the noise.
    eps, natural = D.grains[i], reach * D.scale(i)
    off, size = abs(got - expected), max(abs(got), scale)
    drowned = size <= noise and noise > max(1e-3, 50 * eps) * natural
    if abs(got) > 100 * eps * natural:
        drowned |= (size <= rounding and off > 0.5 * size) or 0.1 * size < off <= rounding
    size = max(scale + D.floors[i] * reach, abs(got))
    return Number(i, D.column, got, expected, allowed, size, scale, drowned)


def _random_sum(terms: Tensor) -> float:
    """A bound of a sum of terms with random signs: the sum of sizes, or three standard deviations."""
    return min(float(terms.abs().sum()), 3.0 * float(terms.norm()))


def _covectors(at: Target, i: int, bounds: Bounds, random: Generator) -> list[Tensor]:
    """Covectors of output i. They are zero where differences are unknown, and give equal weight to all
    other elements of J v above the tolerance. With a coarse tolerance the last one has no weights."""
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
        # the allowed errors of many small elements would hide an error in a few large ones
        draws[-1] = random_like(like, random) * known
    return draws


MAX_NUMEL = 256  # `wrong_elements` differentiates smaller inputs element by element


def wrong_elements(f: Map, x: Tensors, i: int, j: int, random: Generator) -> str:
    """A sentence on the wrong elements of the gradient of output i by input j, as gradcheck reports
    them; "" if none is wrong, or the input is large."""
    if x[j].numel() > MAX_NUMEL:
        return ""
    w = random_like(f(*x)[i], random)
    got = maps.vjps(f, x, [(i, w)])[0][j].reshape(-1)
    slopes = [slope(f, x, j, v) for v in directions(x[j], random, full=True)]
    found = [float((w * one.values[i]).sum()) / float(one.v.sum()) for one in slopes]
    right = torch.tensor(found, device="cpu").to(got)
    wrong = ((got - right).abs() > 1e-4 * right.abs().max()).nonzero().reshape(-1).tolist()
    if not wrong:
        return ""
    got, right = (f.in_given_units(g, i, j) for g in (got, right))
    k = wrong[0]
    return (
        f"{len(wrong)} of {got.numel()} elements of that gradient are wrong: element {k} is "
        f"{float(got[k]):.6g}, and should be {float(right[k]):.6g}."
    )


# A fault is confirmed with rechecked slopes and, under measured tolerances, at points around

NOISE_TEXT = "their noise in this dtype is {noise:.0%} of the derivative"
SMALL_NOISE = 0.1  # relative noise up to this is ignored
NUM_SHAKEN_POINTS = 4  # points around


class Comparer(NamedTuple):
    """Compares J, the derivative of a map by autograd, with D, its differences, at a few points."""

    options: Options
    random: Generator  # for directions and covectors
    dtype: torch.dtype  # of the inputs
    half: torch.dtype | None  # the function's working dtype, if it is half precision

    def with_differences(self, at: Target) -> Target:
        """The target with slopes D v along random directions v; unchanged in half precision, where
        short differences are rounding errors."""
        if self.half is not None or at.slopes:
            return at
        return at.with_slopes(self.random, full=self.options.full, eps=self.options.eps)

    def compared(self, at: Iterable[Target], key: str) -> Discrepancy:
        """Compare J with D at all points, in the mode `key`; stops if the derivative raises."""
        result: Any = None
        for one in [self.with_differences(one) for one in at]:
            found = self._at_one(one, key)
            result = found if result is None else result.merge(found)
            if result.raised is not None:
                break
        return result

    def _at_one(self, at: Target, key: str) -> Discrepancy:
        """Compare J with D at one point. A wrong result is confirmed with rechecked slopes; a correct
        float32 result is compared again under measured tolerances."""
        if self.half is not None:
            return compare_by_means(at, key, self.half, self.random)
        state, asked = self.random.get_state(), self.options.bounds
        found = compare(at, key, asked, self.random)
        if found.raised is not None:
            return found
        if found.wrong:
            # no fault if the difference is no slope: at a tie, or if the map oscillates faster than
            # the steps
            slopes = [
                recheck(at.map, at.x, one, self.random) if one.column in found.faulty else one
                for one in at.slopes
            ]
            self.random.set_state(state)  # draw the covectors that found the fault
            return compare(at._replace(slopes=slopes), key, asked, self.random)
        if (bounds := asked.closer(self.dtype)) is None:
            return found
        closer = compare(at, key, bounds, self.random)
        # a fault under these bounds must also show at points around; otherwise it is noise, and nothing
        # is known about elements smaller than the noise
        if closer.raised is not None or not closer.faulty:
            return found if closer.raised is not None else closer
        noise, faults = self._noise(at, key, bounds, closer.faulty)
        if faults:
            noisy = closer.faulty - faults
            return replace(closer, numbers=[x for x in closer.numbers if x.column not in noisy])
        if noise <= SMALL_NOISE:
            return found
        unknown, problem = found.unknown | closer.faulty, NOISE_TEXT.format(noise=noise)
        return replace(found, checked=found.checked - 1, unknown=unknown, problem=problem)

    def _noise(
        self, at: Target, key: str, bounds: Bounds, columns: Set[int]
    ) -> tuple[float, set[int]]:
        """The relative noise of numbers by these columns, and the columns with a real fault. At points
        close by, along equal directions, a fault has nearly equal errors, and noise has not."""
        # a second generator: each point must draw equal covectors from self.random
        shaken = torch.Generator().manual_seed(10)
        state = self.random.get_state()
        runs: list[dict[tuple[int, ...], Number]] = []
        for _ in range(NUM_SHAKEN_POINTS):
            self.random.set_state(state)
            x = [y * (1 + 0.01 * random_like(y, shaken)) for y in at.x]
            with suppress(Exception):  # fn may refuse inputs that the user did not pass
                near = self.with_differences(at._replace(x=x, slopes=()))
                numbers = compare(near, key, bounds, self.random).numbers
                runs.append({one.draw: one for one in numbers if one.column in columns})
        worst, faults = 0.0, set()
        for draw in set(runs[0]).intersection(*runs) if runs else ():
            seen = [run[draw] for run in runs]
            offs = torch.tensor([one.off for one in seen], dtype=torch.float64, device="cpu")
            mean, spread = float(offs.mean().abs()), float(offs.std())
            allowed = sum(one.allowed for one in seen) / len(runs)
            if mean > allowed and mean > 5 * spread / len(runs) ** 0.5:
                faults.add(seen[0].column)
            worst = max(worst, spread / (sum(one.scale for one in seen) / len(runs) or 1.0))
        return worst, faults


# Functions in half precision: comparison by means

CENTRES = 16
AROUND = 0.04  # distance of the centres, relative to the elements
INTERVALS = 4  # of the line from -h to h, with one random point in each
HALF_LENGTH = 0.25  # h, in the integral at the top of this file
PAIRS = 3  # directions for each input, each with a covector for each output
SIGMAS = 6.0  # standard errors of the mean up to which a difference is noise
BIAS = 4.0  # allowed units of rounding: a covector is rounded alike at each centre
HIDING = 0.4  # noise above this fraction of a number hides it


def compare_by_means(at: Target, key: str, dtype: torch.dtype, random: Generator) -> Discrepancy:
    """`compare` for a function that computes in half precision; draws its own directions."""
    short = str(dtype).removeprefix("torch.")
    numbers, problems = [], [""]
    try:
        values = [y.detach() for y in at.map(*at.x)]
        for j in (j for j in range(len(at.x)) for _ in range(PAIRS)):
            v = random_like(at.x[j], random) * element_scales(at.x[j])
            covectors = [(i, random_like(y, random)) for i, y in enumerate(values) if y.numel()]
            lines = [[*_integrals(at, j, v, covectors, key, random)] for _ in range(CENTRES)]
            integrals = torch.tensor(lines, dtype=torch.float64, device="cpu")
            if not bool(integrals[..., 1:].isfinite().all()):
                problems.append("it is not defined around the inputs")
                continue
            off = integrals[..., 0] - integrals[..., 1]
            noise = SIGMAS * off.std(0) / CENTRES**0.5
            for k, (i, _) in enumerate(covectors):
                got, expected, size = integrals[:, k].mean(0).tolist()
                size = max(size, abs(got), abs(expected))
                allowed = float(noise[k]) + BIAS * torch.finfo(dtype).eps * size
                if abs(got - expected) <= allowed and float(noise[k]) > HIDING * size:
                    problems.append(f"the noise of {short} exceeds the derivative")
                    continue
                one = Number(i, j, got, expected, allowed, size, place=at.place(i, j))
                numbers.append(one)
    except Exception as error:
        return Discrepancy.of_error(error)
    unknown = {*range(len(at.x))} - {one.column for one in numbers}
    judged = {i for i, y in enumerate(values) if y.numel()}
    blank = {at.rows[i] for i in judged - {one.row for one in numbers}}
    return Discrepancy(numbers, len(numbers), unknown, blank, next(filter(None, problems), ""))


def _integrals(
    at: Target, j: int, v: Tensor, covectors: Numbered, key: str, random: Generator
) -> Iterator[tuple[float, float, float]]:
    """Along a line through a random centre, for each covector w: the mean of <w, J v>; the difference
    of <w, F> at the ends, divided by the length; and the norm of the terms of this difference. NaN if
    the map raises at the ends."""
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
