"""Central differences element by element, each with an estimate of its own error.

    D(h) = (f(x + h v) - f(x - h v)) / 2h        error ~ |D(10 h) - D(h)| + eps |f| / h

`finite_differences` has the steps. Each element of f takes the step with the smallest estimated error:
a long step where f is smooth, a short step near a kink. If f is noisy, or oscillates faster than both
steps, two steps may agree by chance; so the estimate also contains the next shorter step. If no two
steps agree, the estimated error is large, and the element is inconclusive.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hoglib._core.numerics.finite_differences import steps as steps_of

TensorMap = Callable[..., list[Tensor]]
Ends = dict[float, tuple[list[Tensor], list[Tensor]]]  # h -> (f(x + h v), f(x - h v))

ROUNDINGS = 20  # allowed error of the next shorter slope, in rounding errors
LEAST = 3  # the first stage has so many steps
# Errors in units of the largest derivative in a tensor:
SETTLED = 1e-7  # with a smaller error no more steps are tried
CONCLUSIVE = 0.02  # with a larger error the element is inconclusive


class Slope(NamedTuple):
    """The derivative of a map along one direction of one input.

    column: The index of the input.
    v: The direction.
    values: The derivative of each output.
    errors: The estimated error of each element; infinite where the map is undefined.
    floors: For each output, a bound of rounding: smaller errors mean nothing.
    grains: For each output, the relative spacing of its values: eps of its dtype, or of float32.
    kinks: For each output a mask: the slopes to both sides differ.
    problem: The message of the map's exception, or "".
    """

    column: int
    v: Tensor
    values: list[Tensor]
    errors: list[Tensor]
    floors: list[float]
    grains: list[float]
    kinks: list[Tensor]
    problem: str = ""

    def size(self, i: int) -> float:
        """The largest known value of output i."""
        return max_abs(torch.where(self.errors[i].isfinite(), self.values[i], 0))

    def scale(self, i: int) -> float:
        """The magnitude of the map's values, for output i."""
        return self.floors[i] / (4 * self.grains[i] ** 0.5)

    def known(self, i: int) -> Tensor:
        """A mask of the conclusive elements of output i."""
        return self.errors[i] <= CONCLUSIVE * self.size(i) + self.floors[i]

    def settled(self, i: int) -> Tensor:
        """A mask of the elements of output i that need no more steps."""
        return self.errors[i] <= SETTLED * self.size(i)


def slope(
    f: TensorMap, x: Sequence[Tensor], j: int, v: Tensor, *, eps: float | None = None
) -> Slope:
    """The derivative along v by input j. eps: try only the steps 10 eps, eps and eps / 10."""
    dtype = x[j].dtype
    values = [y.detach() for y in f(*x)]
    steps = steps_of("element", dtype) if eps is None else (10 * eps, eps, eps / 10)
    # a stage runs only if the stages before are not precise enough
    stages = [steps[:LEAST], steps[LEAST:], steps_of("element, more", dtype) if eps is None else ()]
    ends: Ends = {}
    problem = ""
    for enough, some in zip((Slope.settled, Slope.known, Slope.known), stages, strict=True):
        found, other = _evaluate_both_sides(f, x, j, v, some)
        ends |= found
        problem = problem or other
        result = _best_slope(values, x, j, v, ends, problem)
        if all(bool(enough(result, i).all()) for i in range(len(values))):
            break
    return result


def recheck(f: TensorMap, x: Sequence[Tensor], one: Slope, random: torch.Generator) -> Slope:
    """The slope, with infinite errors where f is not linear to first order, or oscillates fast.

    At a tie, as in a median or a sort, D(v) + D(w) differs from D(v + w), and often nothing else shows.
    A function that oscillates faster than all steps has a different slope at far shorter steps.
    """
    w = [random_like(y, random) * element_scales(y) for y in x]

    def along(directions: Sequence[Tensor]) -> Slope:
        def moved(t: Tensor) -> list[Tensor]:
            return f(*(y + t.to(y.dtype) * d for y, d in zip(x, directions, strict=True)))

        zero = torch.zeros((), dtype=one.v.dtype, device=one.v.device)
        return slope(moved, [zero], 0, torch.ones_like(zero))

    other = along(w)
    both = along([d + one.v if k == one.column else d for k, d in enumerate(w)])
    short = steps_of("element, short", one.v.dtype)
    fine = slope(f, x, one.column, one.v, eps=short[1]) if short else one
    errors = []
    for i, error in enumerate(one.errors):
        off = (one.values[i] + other.values[i] - both.values[i]).abs()
        doubt = other.errors[i] + both.errors[i] + error
        linear = other.known(i) & both.known(i) & (off <= 2 * doubt + one.floors[i])
        gap = (fine.values[i] - one.values[i]).abs()
        linear &= ~(gap > 2 * (fine.errors[i] + error) + one.floors[i])
        errors.append(torch.where(linear, error, torch.inf))
    return one._replace(errors=errors)


def _evaluate_both_sides(
    f: TensorMap, x: Sequence[Tensor], j: int, v: Tensor, steps: Sequence[float]
) -> tuple[Ends, str]:
    """f at both ends of each step, and the message of f's exception at some step, or ""."""
    found: Ends = {}
    problem = ""
    for h in steps:
        try:
            above, below = (f(*x[:j], x[j] + s * v, *x[j + 1 :]) for s in (h, -h))
            found[h] = ([y.detach() for y in above], [y.detach() for y in below])
        except Exception as error:  # f may refuse x + h v, though it accepts x
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, problem


def _best_slope(
    values: Sequence[Tensor], x: Sequence[Tensor], j: int, v: Tensor, ends: Ends, problem: str
) -> Slope:
    """The slope of each element at the step with the smallest estimated error."""
    steps = sorted(ends, reverse=True)
    columns = [_best_of_output(i, y, x[j], ends, steps) for i, y in enumerate(values)]
    slopes, errors, floors, grains, kinks = zip(*columns, strict=True) if columns else ((),) * 5
    return Slope(j, v, list(slopes), list(errors), list(floors), list(grains), list(kinks), problem)


def _best_of_output(
    i: int, y: Tensor, x: Tensor, ends: Ends, steps: Sequence[float]
) -> tuple[Tensor, Tensor, float, float, Tensor]:
    """The values, errors, floor, grain and kinks of one output, from descending steps."""
    best = torch.zeros_like(y)
    error = torch.full_like(best, torch.inf)
    kinked = torch.zeros_like(best, dtype=torch.bool)
    eps = _spacing([y, *(end[i] for h in steps for end in ends[h])])
    size = max(max_abs(y), 1e-3 * max_abs(x))
    slopes = {h: (ends[h][0][i] - ends[h][1][i]) / (2 * h) for h in steps}
    # the difference of the slopes to both sides: it falls with the step, except at a kink
    bends = {h: (ends[h][0][i] - 2 * y + ends[h][1][i]).abs() / h for h in steps}
    for k, (longer, shorter) in enumerate(pairwise(steps)):
        near, rounding = slopes[shorter], 4 * eps * size / shorter
        guess = (slopes[longer] - near).abs() + rounding
        if k + 2 < len(steps):
            allowed = ROUNDINGS * 4 * eps * size / steps[k + 2]
            guess = guess + ((slopes[steps[k + 2]] - near).abs() - allowed).clamp(min=0.0)
        kink = (bends[shorter] > 0.5 * bends[longer]) & (bends[shorter] > 1e-5 * near.abs())
        kink &= bends[shorter] > 100 * rounding
        guess = torch.where(kink, guess + bends[shorter], guess)
        better = guess < error  # False for NaN
        best = torch.where(better, near, best)
        error = torch.where(better, guess, error)
        kinked = torch.where(better, kink, kinked)
    if bool(kinked.any()):
        # at a kink, some elements may have equal slopes to both sides by chance
        error = error + max_abs(torch.where(kinked, error, 0.0))
    grain = float(eps.max()) if eps.numel() else torch.finfo(y.dtype).eps
    return best, error, 4 * grain**0.5 * size, grain, kinked


def _spacing(values: Sequence[Tensor]) -> Tensor:
    """The relative spacing of the values of each element: eps of float32 if all are float32 numbers.

    A map may round to float32 inside: its values then move in jumps. At steps h shorter than the jumps
    all slopes are zero: they agree, and are wrong. Numbers with few digits, such as zeros, small
    integers and results of cancellation, tell nothing about rounding.
    """
    dtype = values[0].dtype
    eps = torch.full_like(values[0], torch.finfo(dtype).eps)
    if dtype != torch.float64:
        return eps
    rounded, short = torch.ones_like(eps, dtype=torch.bool), torch.ones_like(eps, dtype=torch.bool)
    for y in values:
        rounded &= y == y.float().double()
        short &= y == y.bfloat16().double()
    return torch.where(rounded & ~short, torch.finfo(torch.float32).eps, eps)


def directions(x: Tensor, random: torch.Generator, *, full: bool) -> list[Tensor]:
    """A random direction without zeros; if full, one direction for each element instead."""
    scale = element_scales(x)
    if full:
        eye = torch.eye(x.numel(), dtype=x.dtype, device=x.device).reshape(-1, *x.shape)
        return [one * scale for one in eye]
    return [random_like(x, random) * scale]


def element_scales(x: Tensor) -> Tensor:
    """The unit of steps for each element: its magnitude, at least a thousandth of the largest, and at
    most 1, in `units_of(x)`: functions such as sin oscillate on this scale."""
    units = units_of(x)
    size = x.detach().abs() / units
    most = max_abs(size) or 1.0
    return size.clamp(min=1e-3 * most, max=1.0) * units


ORDINARY = 64.0  # sizes from 1 / 64 to 64 get the unit 1
SMALL = 1e-3  # elements below this fraction of the largest are near zero, or in another unit


def units_of(x: Tensor) -> Tensor | float:
    """Powers of two near the size of x, so that x / units has elements near one without rounding.

    One unit for the whole tensor, 1 for an ordinary size. If at least a quarter of the nonzero elements
    are small, the tensor holds quantities in several units: then one unit for each element.
    """
    size = x.detach().abs().double()
    most = max_abs(size)
    if not most:
        return 1.0
    is_zero = ~(size > torch.finfo(torch.float64).eps * most)  # or NaN
    small = ~is_zero & (size < SMALL * most)
    if 4 * int(small.sum()) >= int((~is_zero).sum()):
        size = torch.where(is_zero | size.isinf(), most, size)
        return (size / torch.frexp(size).mantissa / 2).to(x.dtype.to_real())
    return unit_of(most)


def unit_of(size: float) -> float:
    """A power of two near a size, which may be zero; 1 if the size is ordinary."""
    if not size or 1 / ORDINARY <= size <= ORDINARY:
        return 1.0
    return math.ldexp(1.0, math.frexp(size)[1] - 1)


def random_like(like: Tensor, random: torch.Generator) -> Tensor:
    """Random numbers of either sign and absolute value in [0.5, 1.5], so that each element counts."""
    size = 0.5 + torch.rand(like.shape, dtype=torch.float64, generator=random, device="cpu")
    sign = torch.randint(2, like.shape, generator=random, device="cpu") * 2 - 1
    return (size * sign).to(like.device, like.dtype)


def max_abs(tensor: Tensor) -> float:
    """The largest absolute value among the finite elements; 0 if there are none."""
    size = tensor.detach().abs()
    most = float(size.max()) if size.numel() else 0.0
    return most if math.isfinite(most) else float(size.where(size.isfinite(), 0.0).max())
