"""Derivatives by central differences, each with an estimate of its own error.

    D(h) = (f(x + h v) - f(x - h v)) / 2h        error ~ |D(10 h) - D(h)| + eps |f| / h

The step is chosen for each element of f by itself, as the one whose estimate is smallest: a smooth
element takes a long step, one with a kink nearby a short one. Two steps may agree by chance, where f
oscillates faster than both or is noisy inside; so the next shorter one has its say in the estimate.
Where no steps agree the error says so, and nothing is concluded from that element.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Map = Callable[..., list[Tensor]]

# Unitless: they multiply directions that have the size of the inputs.
STEPS = {
    torch.float64: (1e-3, 1e-4, 1e-5, 1e-6),
    torch.float32: (1e-1, 3e-2, 1e-2, 3e-3),
    torch.float16: (5e-1, 2e-1, 1e-1),
    torch.bfloat16: (5e-1, 2e-1, 1e-1),
}
MORE = {torch.float64: (1e-2, 1e-7, 1e-8), torch.float32: (1e-3,)}
AGREE = 20  # how many times its rounding the next slope may be off
FINE = 1e-8
CONCLUSIVE = 0.02  # of the largest derivative in a tensor; an error above it concludes nothing


class Slope(NamedTuple):
    """The derivative of a map along one direction of one input."""

    column: int
    v: Tensor
    values: list[Tensor]
    errors: list[Tensor]  # element by element; infinite where the map is not defined
    floors: list[float]  # an error below it is no error, whatever the value
    kinks: list[Tensor]  # where the slopes to either side differ
    problem: str = ""  # what the map said where it raised

    def size(self, i: int) -> float:
        """The largest value of output i that is known."""
        return largest(torch.where(self.errors[i].isfinite(), self.values[i], 0))

    def known(self, i: int) -> Tensor:
        """Which elements of output i one can conclude from."""
        return self.errors[i] <= CONCLUSIVE * self.size(i) + self.floors[i]


def scales(x: Tensor) -> Tensor:
    """How far each element may move: by its size, but neither by next to nothing nor across periods."""
    size = x.detach().abs()
    most = largest(size) or 1.0
    return torch.maximum(size.clamp(max=1.0), 1e-4 * size).clamp(min=min(1e-3 * most, 1.0))


def directions(x: Tensor, draws: int, random: torch.Generator, *, full: bool) -> list[Tensor]:
    """Random directions in which every element moves; or one an element."""
    scale = scales(x)
    if full:
        eye = torch.eye(x.numel(), dtype=x.dtype, device=x.device).reshape(-1, *x.shape)
        return [one * scale for one in eye]
    return [uniform(x, random) * scale for _ in range(draws)]


def uniform(like: Tensor, random: torch.Generator) -> Tensor:
    """Numbers of either sign between 0.5 and 1.5: none of them hides its element."""
    size = 0.5 + torch.rand(like.shape, dtype=torch.float64, generator=random)
    sign = torch.randint(2, like.shape, generator=random) * 2 - 1
    return (size * sign).to(like.device, like.dtype)


def slope(
    f: Map, x: Sequence[Tensor], j: int, v: Tensor, *, eps: float | None = None
) -> Slope:  # fmt: skip
    """The derivative along v by input j; eps is the middle one of three steps."""
    dtype = x[j].dtype
    here = [y.detach() for y in f(*x)]
    steps = STEPS[dtype] if eps is None else (10 * eps, eps, eps / 10)
    ends, problem = _ends(f, x, j, v, steps)
    result = _best(here, x, j, v, ends, problem)
    if eps is None and not all(bool(result.known(i).all()) for i in range(len(here))):
        more, worse = _ends(f, x, j, v, MORE.get(dtype, ()))
        result = _best(here, x, j, v, ends | more, problem or worse)
    return result


Ends = dict[float, tuple[list[Tensor], list[Tensor]]]


def _ends(
    f: Map, x: Sequence[Tensor], j: int, v: Tensor, steps: Sequence[float]
) -> tuple[Ends, str]:
    """f at either end of each step."""
    found: Ends = {}
    problem = ""
    for h in steps:
        try:
            above, below = (f(*x[:j], x[j] + s * v, *x[j + 1 :]) for s in (h, -h))
            found[h] = ([y.detach() for y in above], [y.detach() for y in below])
        except Exception as error:  # whatever f says of arguments it was not given
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, problem


def _best(
    here: Sequence[Tensor], x: Sequence[Tensor], j: int, v: Tensor, ends: Ends, problem: str
) -> Slope:
    steps = sorted(ends, reverse=True)
    columns = [_of_output(i, y, x[j], ends, steps) for i, y in enumerate(here)]
    values, errors, floors, kinks = zip(*columns, strict=True) if columns else ((), (), (), ())
    return Slope(j, v, list(values), list(errors), list(floors), list(kinks), problem)


def _of_output(
    i: int, y: Tensor, x: Tensor, ends: Ends, steps: Sequence[float]
) -> tuple[Tensor, Tensor, float, Tensor]:
    best = torch.zeros_like(y)
    error = torch.full_like(best, torch.inf)
    kinked = torch.zeros_like(best, dtype=torch.bool)
    eps = torch.finfo(y.dtype).eps
    size = max(largest(y), 1e-3 * largest(x))
    slopes = {h: (ends[h][0][i] - ends[h][1][i]) / (2 * h) for h in steps}
    # the slopes to either side: their difference goes down with the step, unless there is a kink
    bends = {h: (ends[h][0][i] - 2 * y + ends[h][1][i]).abs() / h for h in steps}
    for k, (longer, shorter) in enumerate(pairwise(steps)):
        near, rounding = slopes[shorter], 4 * eps * size / shorter
        guess = (slopes[longer] - near).abs() + rounding
        if k + 2 < len(steps):
            allowed = AGREE * 4 * eps * size / steps[k + 2]
            guess = guess + ((slopes[steps[k + 2]] - near).abs() - allowed).clamp(min=0.0)
        kink = (bends[shorter] > 0.5 * bends[longer]) & (bends[shorter] > 1e-5 * near.abs())
        kink &= bends[shorter] > 100 * rounding
        guess = torch.where(kink, guess + bends[shorter], guess)
        better = guess < error  # False for NaN
        best = torch.where(better, near, best)
        error = torch.where(better, guess, error)
        kinked = torch.where(better, kink, kinked)
    if bool(kinked.any()):
        # a kink may leave no trace in an element where the slopes to either side agree by chance
        error = error + largest(torch.where(kinked, error, 0.0))
    return best, error, 4 * eps**0.5 * size, kinked


def checked(f: Map, x: Sequence[Tensor], one: Slope, random: torch.Generator) -> Slope:
    """The slope, with infinite errors where f has no linear derivative, or one on another scale.

    At a tie, as in a median or a sort, D(v) + D(w) is not D(v + w), and that may be the only sign; of
    what oscillates faster than all steps, far shorter ones tell another slope.
    """
    w = [uniform(y, random) * scales(y) for y in x]

    def along(directions: Sequence[Tensor]) -> Slope:
        def moved(t: Tensor) -> list[Tensor]:
            return f(*(y + t.to(y.dtype) * d for y, d in zip(x, directions, strict=True)))

        zero = torch.zeros((), dtype=one.v.dtype, device=one.v.device)
        return slope(moved, [zero], 0, torch.ones_like(zero))

    other = along(w)
    both = along([d + one.v if k == one.column else d for k, d in enumerate(w)])
    fine = slope(f, x, one.column, one.v, eps=FINE) if one.v.dtype == torch.float64 else one
    errors = []
    for i, error in enumerate(one.errors):
        off = (one.values[i] + other.values[i] - both.values[i]).abs()
        doubt = other.errors[i] + both.errors[i] + error
        known = other.known(i) & both.known(i)
        linear = known & (off <= 2 * doubt + one.floors[i])
        apart = (fine.values[i] - one.values[i]).abs()
        linear &= ~(apart > 2 * (fine.errors[i] + error) + one.floors[i])
        errors.append(torch.where(linear, error, torch.inf))
    return one._replace(errors=errors)


def largest(tensor: Tensor) -> float:
    finite = tensor.detach()[tensor.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
