"""Whether a route gives the right derivative of a scalar function: the one that differences have.

    first      <g, v>            with (f(x + h v) - f(x - h v)) / 2h
    H v        by each route     with (g(x + h v) - g(x - h v)) / 2h
    w^T H v    a number          with that and w
    third      of w^T H v        with (H v at x + h w - H v at x - h w) / 2h, H v by reverse-over-reverse

Steps h are tried until a product agrees with a difference. What agrees with none is wrong if the
differences agree with each other; if they do not (a kink, rounding) nothing is known.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hoglib import _tree
from hoglib._leaves import Vector, filled, own_leaves
from hoglib.verification._routes import Route, Scalar, gradient, reverse_over_reverse
from hoglib.verification._stops import OtherPath, Stops

# Of the size of each tensor, along v. The first is right for most; ReLUs want a shorter one, which
# crosses no kink, and sums that cancel a longer one.
STEPS = {
    torch.float64: (1e-5, 1e-7, 1e-4, 1e-8, 1e-3, 1e-9),
    torch.float32: (1e-2, 1e-3, 3e-2, 1e-4),
}
RIGHT = {torch.float64: 1e-5, torch.float32: 1e-2}
CLEARLY = 10  # times as far from differences as these are from each other
SHARE = 1e-3  # of all tensors together, below which one's own size is not what counts
FIRST = "first derivative: reverse"


class Verdict(NamedTuple):
    """What is known of a route. `wrong`: True, False, or None where nothing could be compared."""

    wrong: bool | None
    error: float | None = None  # relative
    raised: Exception | None = None
    worst: int = 0  # the leaf that is off most

    @property
    def at_fault(self) -> bool:
        return self.wrong is True or self.raised is not None


class Judge:
    """Judges routes of one function at one point, along one random direction v.

    The differences are made when they are needed, and kept for the next route.
    """

    def __init__(
        self, f: Scalar, leaves: Sequence[Tensor], stops: Stops | None, seed: int = 0
    ) -> None:
        self.f, self.stops = f, stops
        self.leaves = [x.detach() for x in leaves]
        self.dtype = max((x.dtype for x in leaves), key=lambda dtype: torch.finfo(dtype).eps)
        random = torch.Generator().manual_seed(seed)
        self.scales = [scale(x) for x in self.leaves]
        self.v, self.w = (
            [
                normal(x, random) * size
                for x, size in zip(self.leaves, self.scales, strict=True)
            ]
            for _ in range(2)
        )  # fmt: skip
        self.differences = True  # or only whether a route raises
        self._known: dict[tuple[str, float], Vector | None] = {}

    def first(self) -> Verdict:
        """Of the gradient that autograd gives."""
        try:
            found = self._gradient(self.leaves)
        except Exception as error:
            return Verdict(None, raised=error)
        slope = [_tree.dot(found, self.v)]
        return self._compare("values", slope, self._size(found), lambda truth: truth)

    def of(self, route: Route) -> Verdict:
        try:
            found = route.product(self.f, self.leaves, self.v, self.w)
        except Exception as error:
            return Verdict(None, raised=error)
        found = [part.detach() for part in found]
        if route.of == "third":
            return self._compare("products", found, None, lambda truth: truth)
        if route.of == "hessian":
            return self._compare("gradients", found, None, lambda truth: truth)
        return self._compare(
            "gradients", found, self._size, lambda truth: [_tree.dot(truth, self.w)]
        )

    def finite(self, route: Route) -> Verdict:
        """Whether it is there, and finite, without any differences."""
        try:
            found = route.product(self.f, self.leaves, self.v, self.w)
        except Exception as error:
            return Verdict(None, raised=error)
        bad = [i for i, part in enumerate(found) if not bool(part.isfinite().all())]
        return Verdict(True, float("nan"), None, bad[0]) if bad else Verdict(False)

    def apart(self, other: "Judge") -> float | None:
        """By how much the differences of two functions differ, at the step that both settle at best."""
        found = []
        for step in STEPS.get(self.dtype, STEPS[torch.float32]):
            a, b = self._truth("gradients", step), other._truth("gradients", step)
            if a is not None and b is not None:
                found.append(self._off(a, b, None)[0])
        return min(found, default=None)

    def _compare(
        self,
        kind: str,
        found: Vector,
        size: float | Callable[[Vector], float] | None,
        take: Callable[[Vector], Vector],
    ) -> Verdict:
        """size: of what the numbers are parts of, where they are no vector like the leaves."""
        if not self.differences:
            return Verdict(False)
        if not all(bool(part.isfinite().all()) for part in found):
            return self._not_finite(kind, found)
        best, worst, truths = float("inf"), 0, []
        for step in STEPS.get(self.dtype, STEPS[torch.float32]):
            truth = self._truth(kind, step)
            if truth is None:
                continue
            whole = size(truth) if callable(size) else size
            truth = take(truth)
            off, where = self._off(found, truth, whole)
            if off < best:
                best, worst = off, where
            if off < RIGHT.get(self.dtype, RIGHT[torch.float32]):
                return Verdict(False, off)
            truths.append((truth, whole))
        pairs = [
            self._off(a, b, size)[0]
            for i, (a, size) in enumerate(truths)
            for b, _ in truths[i + 1 :]
        ]
        doubt = min(pairs, default=float("inf"))
        if doubt < 0.1 and best > CLEARLY * doubt:
            return Verdict(True, best, None, worst)
        if doubt < 1e-2 and best < 5 * doubt:
            return Verdict(False, best)
        return Verdict(None)

    def _not_finite(self, kind: str, found: Vector) -> Verdict:
        """Wrong where differences are finite, or where nothing says that they are not."""
        where = next(i for i, part in enumerate(found) if not bool(part.isfinite().all()))
        return Verdict(True, float("nan"), None, where)

    def _off(self, found: Vector, truth: Vector, whole: float | None) -> tuple[float, int]:
        """The largest relative difference of two vectors, a tensor at a time, and of which tensor."""
        if whole is not None:
            return float((found[0] - truth[0]).abs()) / max(whole, 1e-300), 0
        sizes = [
            unit * max(float(a.norm()), float(b.norm()))
            for a, b, unit in zip(found, truth, self.scales, strict=True)
        ]
        floor = SHARE * sum(size**2 for size in sizes) ** 0.5
        gaps = [
            unit * float((a - b).norm()) / max(size + floor, 1e-300)
            for a, b, size, unit in zip(found, truth, sizes, self.scales, strict=True)
        ]
        worst = max(range(len(gaps)), key=gaps.__getitem__)
        return (gaps[worst] if gaps[worst] == gaps[worst] else float("inf")), worst

    def _size(self, parts: Vector) -> float:
        pairs = zip(parts, self.scales, strict=True)
        return sum((unit * float(part.norm())) ** 2 for part, unit in pairs) ** 0.5

    # Differences.

    def _truth(self, kind: str, step: float) -> Vector | None:
        """The difference with a step, or None where the function cannot be had there."""
        if (kind, step) not in self._known:
            self._known[kind, step] = self._difference(kind, step)
        return self._known[kind, step]

    def _difference(self, kind: str, step: float) -> Vector | None:
        function = {
            "values": self._value, "gradients": self._gradient, "products": self._product,
        }[kind]  # fmt: skip
        along = self.w if kind == "products" else self.v
        try:
            ends = [
                function([x + sign * step * d for x, d in zip(self.leaves, along, strict=True)])
                for sign in (1, -1)
            ]
        except OtherPath:
            return None
        truth = [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]
        return truth if all(bool(part.isfinite().all()) for part in truth) else None

    def _held(self, *own: Tensor) -> Tensor:
        if self.stops is None:
            return self.f(*own)
        with self.stops.held():
            return self.f(*own)

    def record(self) -> None:
        """Remember what the function takes out of its graph, at the point itself."""
        if self.stops is not None and not self.stops.recorded:
            self._held(*own_leaves(self.leaves, False))

    def _value(self, leaves: Vector) -> Vector:
        self.record()
        return [self._held(*own_leaves(leaves, False)).detach()]

    def _gradient(self, leaves: Vector) -> Vector:
        self.record()
        own = own_leaves(leaves, False)
        return [part.detach() for part in filled(gradient(self._held, own), own)]

    def _product(self, leaves: Vector) -> Vector:
        return reverse_over_reverse(self.f, leaves, self.v, self.w)


def scale(x: Tensor) -> float:
    """The size of the numbers of a tensor, in whose parts steps are counted."""
    size = float(x.norm()) / max(x.numel(), 1) ** 0.5
    return size if size > 1e-8 and size == size else 0.01


def normal(x: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(x.shape, dtype=torch.float64, generator=random).to(x.device, x.dtype)
