"""Differences of a function, of its gradient and of its products, along a direction.

    values     (f(x + h v) - f(x - h v)) / 2h
    gradients  (g(x + h v) - g(x - h v)) / 2h
    products   (H v at x + h w - H v at x - h w) / 2h, with H v by reverse-over-reverse

What the function stops is held, and they are kept, for the next that asks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf, nan
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core import pytree
from hoglib._core.autograd import Vector, dense, fresh_leaves, materialize_grads
from hoglib._core.finite_differences import both_sides, difference_quotient, steps
from hoglib.auditing.routes import Route, Scalar, gradient, reverse_over_reverse
from hoglib.auditing.stop_gradients import StopGradientReplay


class Difference(NamedTuple):
    """(F(x + h v) - F(x - h v)) / 2h and (F(x + h v) + F(x - h v)) / 2h."""

    slope: Vector
    sum: Vector


def all_finite(parts: Vector) -> bool:
    return all(bool(part.isfinite().all()) for part in parts)


class Differences:
    """Those of a scalar function of leaves, by kind and step; w is the direction of products."""

    def __init__(
        self, f: Scalar, leaves: Vector, stops: StopGradientReplay | None, v: Vector, w: Vector
    ) -> None:
        self._f, self._leaves, self._stops, self._v, self._w = f, leaves, stops, v, w
        self._known: dict[tuple[str, float], Difference | None] = {}
        self._here: dict[str, Vector | None] = {}

    @property
    def leaves(self) -> Vector:
        """The point, in copies: code under no_grad may write to what it is given."""
        return [x.clone() for x in self._leaves]

    def here(self, kind: str) -> Vector | None:
        """What is differenced, at the point itself; None where it cannot be had."""
        if kind not in self._here:
            self._here[kind] = None
            with suppress(Exception):  # as at another point
                self._here[kind] = self._functions[kind](self.leaves)
        return self._here[kind]

    def at(self, kind: str, step: float) -> Difference | None:
        """The difference with a step, or None where the function cannot be had there.

        Nor can it where it stops what is inside of a transform of torch.func, which cannot be held.
        """
        if (kind, step) not in self._known:
            self._known[kind, step] = self._difference(kind, step)
        return self._known[kind, step]

    @property
    def _functions(self) -> dict[str, Callable[[Vector], Vector]]:
        return {"values": self._value, "gradients": self.gradient, "products": self._product}

    def _difference(self, kind: str, step: float) -> Difference | None:
        along = self._w if kind == "products" else self._v
        try:
            self._record()
            if self._stops is not None and self._stops.beyond:
                return None
            above, below = both_sides(self._functions[kind], self.leaves, along, step)
        except Exception:  # whatever it says of another point, also that it takes another path
            return None
        slope = difference_quotient(above, below, step)
        total = [(a + b) / (2 * step) for a, b in zip(above, below, strict=True)]
        return Difference(slope, total) if all_finite(slope) else None

    def _held(self, *own: Tensor) -> Tensor:
        if self._stops is None:
            return self._f(*own)
        with self._stops.held():
            return self._f(*own)

    def _record(self) -> None:
        """Remember what the function takes out of its graph, at the point itself."""
        if self._stops is not None and not self._stops.recorded:
            self._held(*fresh_leaves(self.leaves, False))

    def _value(self, leaves: Vector) -> Vector:
        self._record()
        return [self._held(*fresh_leaves(leaves, False)).detach()]

    def gradient(self, leaves: Vector) -> Vector:
        self._record()
        own = fresh_leaves(leaves, False)
        return [part.detach() for part in materialize_grads(gradient(self._held, own), own)]

    def _product(self, leaves: Vector) -> Vector:
        self._record()
        return reverse_over_reverse(self._held, leaves, self._v, self._w)


# === Whether a route gives the right derivative of a scalar function: the one that differences
# have.
#
#     first      <g, v>            with those of f
#     H v        by each route     with those of g
#     w^T H v    a number          with these and w
#     third      of w^T H v        with those of H v by reverse-over-reverse, along w
#
# Steps h are tried until a product agrees with a difference. What agrees with none is wrong if a
# difference agrees with another one, and the slopes to either side with each other; if they do not
# (at a
# kink, where numbers cancel) nothing is known.

RIGHT = {torch.float64: 1e-5, torch.float32: 1e-2}
CLEARLY = 10  # times as far from a difference as that is known
UNSURE, OF_ONE = 1e-2, 1e-3  # how well a difference must be known to say wrong; of one number
SURE = 1e-2  # and to say right
KINKED = 0.5  # how far apart slopes to either side are where a kink is all that they show
SHARE = 1e-3  # of all tensors together, below which one's own size is not what counts
FIRST = "first derivative: reverse"


class CheckResult(NamedTuple):
    """What is known of a route. `wrong`: True, False, or None where nothing could be compared."""

    wrong: bool | None
    error: float | None = None  # relative
    raised: Exception | None = None
    sure: bool = False  # it agrees with a difference as well as differences go

    @property
    def at_fault(self) -> bool:
        return self.wrong is True or self.raised is not None

    def rank(self) -> tuple[bool, bool, float]:
        """What is known best, and of what is known as well the larger error."""
        return self.sure, self.wrong is False, self.error or 0.0


NOT_FINITE = CheckResult(True, nan)  # wrong: the loss is finite at its parameters
Tried = tuple[float, Vector, float | None, float]  # step, slope, size, how far off


class RouteChecker:
    """Judges routes of one function at one point, along one random direction v.

    stops: what the function takes out of its graph, to be held. frozen: by leaf, a row that is constant
    by definition.
    """

    def __init__(
        self,
        f: Scalar,
        leaves: Sequence[Tensor],
        stops: StopGradientReplay | None,
        seed: int = 0,
        frozen: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.f = f
        self._leaves = [x.detach() for x in leaves]
        dtype = max((x.dtype for x in leaves), key=lambda dtype: torch.finfo(dtype).eps)
        self._steps = steps("route", dtype)
        self._right = RIGHT.get(dtype, RIGHT[torch.float32])
        random = torch.Generator("cpu").manual_seed(seed)
        self.scales = [scale(x) for x in self._leaves]
        self.v, self.w = (
            [
                normal(x, random) * size
                for x, size in zip(self._leaves, self.scales, strict=True)
            ]
            for _ in range(2)
        )  # fmt: skip
        for i, row in frozen.items():
            self.v[i][row], self.w[i][row] = 0.0, 0.0
        self.keep: set[str] = set()  # of routes whose products are wanted again
        self._products: dict[str, Vector] = {}
        self.compares = True  # or only says whether a route raises
        self.differences = Differences(f, self._leaves, stops, self.v, self.w)

    @property
    def leaves(self) -> Vector:
        """The point."""
        return self.differences.leaves

    def first(self) -> CheckResult:
        """Of the gradient that autograd gives."""
        try:
            found = self.differences.gradient(self.leaves)
        except Exception as error:
            return CheckResult(None, raised=error)
        slope = [pytree.dot(found, self.v)]
        return self._compare("values", slope, self._size(found), lambda truth: truth)

    def of(self, route: Route) -> CheckResult:
        try:
            found = self.product(route)
        except Exception as error:
            return CheckResult(None, raised=error)
        if route.quantity == "third":
            return self._compare("products", found, None, lambda truth: truth)
        if route.quantity == "hessian":
            return self._compare("gradients", found, None, lambda truth: truth)
        return self._compare(
            "gradients", found, self._size, lambda truth: [pytree.dot(truth, self.w)]
        )

    def product(self, route: Route) -> Vector:
        """What a route gives."""
        if route.key in self._products:
            return self._products[route.key]
        found = route.product(self.f, self.leaves, self.v, self.w)
        found = [dense(part.detach()) for part in found]
        if route.key in self.keep:
            self._products[route.key] = found
        return found

    def finite(self, route: Route) -> CheckResult:
        """Whether it is there, and finite, without any differences."""
        try:
            found = self.product(route)
        except Exception as error:
            return CheckResult(None, raised=error)
        return CheckResult(False) if all_finite(found) else NOT_FINITE

    def apart(self, other: "RouteChecker") -> float | None:
        """By how much the differences of two functions differ, at one step or another."""
        found = []
        for step in self._steps[:4]:
            a, b = self.differences.at("gradients", step), other.differences.at("gradients", step)
            if a is not None and b is not None:
                found.append(self._off(a.slope, b.slope, None))
        return max(found, default=None)

    def _compare(
        self,
        kind: str,
        found: Vector,
        size: float | Callable[[Vector], float] | None,
        take: Callable[[Vector], Vector],
    ) -> CheckResult:
        """size: of what the numbers are parts of, where they are no vector like the leaves."""
        if not self.compares:
            return CheckResult(False, sure=True)
        if not all_finite(found):
            return NOT_FINITE
        best, tried = CheckResult(None), []
        steps = list(self._steps)
        while steps:
            step = steps.pop(0)
            truth = self.differences.at(kind, step)
            if truth is None:
                continue
            whole = size(truth.slope) if callable(size) else size
            off = self._off(found, take(truth.slope), whole)
            if off < self._right:
                return CheckResult(False, off, sure=True)
            tried.append((step, take(truth.slope), whole, off))
            if best.error is None or off < best.error:
                best = CheckResult(None, off)
            if len(tried) == 2 and self._known_to(kind, take, tried) < off / CLEARLY:
                break  # two short steps agree, and longer ones will
            bends = [self._bend(kind, h, take, its) for h, _, its, _ in tried[:2]]
            if len(tried) == 2 and min(bends) > KINKED:
                steps = steps[-1:]  # rounding, which the longest mends, or a kink, which none does
        doubt = self._known_to(kind, take, tried)
        if best.error is None:
            return CheckResult(None)
        if doubt < (UNSURE if size is None else OF_ONE) and best.error > CLEARLY * doubt:
            return best._replace(wrong=True)
        if doubt < SURE and best.error < doubt:
            return CheckResult(False, best.error)
        return CheckResult(None)

    def _known_to(self, kind: str, take: Callable[[Vector], Vector], tried: list[Tried]) -> float:
        """How well the best difference is known: by the next one, and by the slopes to either side."""
        doubts = []
        for step, slope, whole, _ in tried:
            others = [self._off(other, slope, whole) for at, other, *_ in tried if at != step]
            doubts.append(max(min(others, default=inf), self._bend(kind, step, take, whole)))
        return min(doubts, default=inf)

    def _bend(
        self, kind: str, step: float, take: Callable[[Vector], Vector], whole: float | None
    ) -> float:
        """How far the slopes to either side are apart: by O(h), unless there is a kink within h."""
        truth = self.differences.at(kind, step)
        assert truth is not None
        here = self.differences.here(kind)
        if here is None:
            return inf
        bend = [a - b / step for a, b in zip(truth.sum, here, strict=True)]
        bent = [a + b for a, b in zip(truth.slope, bend, strict=True)]
        return self._off(take(bent), take(truth.slope), whole)

    def _off(self, found: Vector, truth: Vector, whole: float | None) -> float:
        """The largest relative difference of two vectors, a tensor at a time."""
        if whole is not None:
            return float((found[0] - truth[0]).abs()) / max(whole, 1e-300)
        sizes = [
            unit * max(float(a.norm()), float(b.norm()))
            for a, b, unit in zip(found, truth, self.scales, strict=True)
        ]
        floor = SHARE * sum(size**2 for size in sizes) ** 0.5
        gaps = [
            unit * float((a - b).norm()) / max(size + floor, 1e-300)
            for a, b, size, unit in zip(found, truth, sizes, self.scales, strict=True)
        ]
        return inf if any(gap != gap for gap in gaps) else max(gaps)

    def _size(self, parts: Vector) -> float:
        pairs = zip(parts, self.scales, strict=True)
        return sum((unit * float(part.norm())) ** 2 for part, unit in pairs) ** 0.5


def scale(x: Tensor) -> float:
    """The size of the numbers of a tensor, in whose parts steps are counted."""
    size = float(x.norm()) / max(x.numel(), 1) ** 0.5
    return size if size > 1e-8 and size == size else 0.01


def normal(x: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(x.shape, dtype=torch.float64, device="cpu", generator=random).to(
        x.device, x.dtype
    )


def padding_rows(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """The weights of embeddings with padding_idx: name, weight, and the row whose gradient is zero by
    definition."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx is not None:
            yield f"{name}.weight".removeprefix("."), part.weight, part.padding_idx
