"""Checks whether a route gives the right derivative of a scalar function f with gradient g.

    derivative                is compared with
    first    <g, v>           (f(x + h v) - f(x - h v)) / 2h
    H v                       (g(x + h v) - g(x - h v)) / 2h
    w^T H v, a number         the same, and w
    third    of w^T H v       (H v at x + h w - H v at x - h w) / 2h, by reverse-over-reverse

Steps h are tried until the derivative agrees with a difference. If it agrees with none, it is wrong
provided that a difference agrees with another one and the one-sided slopes with each other; otherwise
(at a kink, or where numbers cancel) nothing is known. Values that f takes out of its graph are held
constant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf, nan
from types import MappingProxyType
from typing import NamedTuple, final

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
    """Whether every number is finite."""
    return all(bool(part.isfinite().all()) for part in parts)


@final
class Differences:
    """Central differences of a scalar function of leaves, each computed once, by kind and step.

    Kinds are "values" of f, "gradients" and "products" H v; products are differenced along w, the
    others along v. stops: the values that f takes out of its graph; None to let them vary.
    """

    def __init__(
        self, f: Scalar, leaves: Vector, stops: StopGradientReplay | None, v: Vector, w: Vector
    ) -> None:
        self._f, self._leaves, self._stops, self._v, self._w = f, leaves, stops, v, w
        self._known: dict[tuple[str, float], Difference | None] = {}
        self._here: dict[str, Vector | None] = {}

    @property
    def leaves(self) -> Vector:
        """Copies of the point: code under no_grad may write to its arguments."""
        return [x.clone() for x in self._leaves]

    def here(self, kind: str) -> Vector | None:
        """The differenced function at the point itself; None where it raises."""
        if kind not in self._here:
            self._here[kind] = None
            with suppress(Exception):  # as at any other point
                self._here[kind] = self._functions[kind](self.leaves)
        return self._here[kind]

    def at(self, kind: str, step: float) -> Difference | None:
        """The difference with a step; None where the function raises, or where it stops a gradient
        inside a transform of torch.func, which cannot be held constant."""
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
        except Exception:  # the function need not accept another point, or takes another path there
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
        """Record the stopped values at the point itself."""
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


RIGHT = {torch.float64: 1e-5, torch.float32: 1e-2}
CLEARLY = 10  # a wrong result is that many times further from a difference than its uncertainty
# Largest uncertainty of a difference to call a vector wrong, to call a number wrong, to call a result
# right.
UNSURE, OF_ONE, SURE = 1e-2, 1e-3, 1e-2
KINKED = 0.5  # relative gap between one-sided slopes that only a kink or rounding explains
SHARE = 1e-3  # tensors smaller than this share of all are compared relative to all
FIRST = "first derivative: reverse"


class CheckResult(NamedTuple):
    """What is known about a route. `wrong`: True, False, or None where nothing could be compared."""

    wrong: bool | None
    error: float | None = None  # relative
    raised: Exception | None = None
    sure: bool = False  # the route agrees with a difference to full accuracy

    @property
    def at_fault(self) -> bool:
        """Whether it is wrong or raises."""
        return self.wrong is True or self.raised is not None

    def rank(self) -> tuple[bool, bool, float]:
        """The key by which the better-known result is larger, then that with the larger error."""
        return self.sure, self.wrong is False, self.error or 0.0


NOT_FINITE = CheckResult(True, nan)  # wrong, because the loss itself is finite


class _Comparison(NamedTuple):
    """A route against one difference."""

    step: float
    slope: Vector
    size: float | None
    error: float


@final
class RouteChecker:
    """Checks routes of one function at one point, along one random direction v.

    stops: the values that the function takes out of its graph. frozen: for a leaf, a row whose gradient
        is zero by definition, along which nothing is differenced.
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
        self.keep: set[str] = set()  # keys of routes whose products are asked for again
        self._products: dict[str, Vector] = {}
        self.compares = True  # False: only find out whether a route raises
        self.differences = Differences(f, self._leaves, stops, self.v, self.w)

    @property
    def leaves(self) -> Vector:
        """The point."""
        return self.differences.leaves

    def check_gradient(self) -> CheckResult:
        """Check the gradient of autograd."""
        try:
            found = self.differences.gradient(self.leaves)
        except Exception as error:
            return CheckResult(None, raised=error)
        slope = [pytree.dot(found, self.v)]
        return self._compare("values", slope, self._size(found), lambda truth: truth)

    def check(self, route: Route) -> CheckResult:
        """Check the derivative of a route."""
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
        """The derivative of a route."""
        if route.key in self._products:
            return self._products[route.key]
        found = route.product(self.f, self.leaves, self.v, self.w)
        found = [dense(part.detach()) for part in found]
        if route.key in self.keep:
            self._products[route.key] = found
        return found

    def check_finite(self, route: Route) -> CheckResult:
        """Check only that a route does not raise and is finite."""
        try:
            found = self.product(route)
        except Exception as error:
            return CheckResult(None, raised=error)
        return CheckResult(False) if all_finite(found) else NOT_FINITE

    def largest_difference(self, other: "RouteChecker") -> float | None:
        """The largest relative difference of H v of two functions, by central differences."""
        found = []
        for step in self._steps[:4]:
            a, b = self.differences.at("gradients", step), other.differences.at("gradients", step)
            if a is not None and b is not None:
                found.append(self._error(a.slope, b.slope, None))
        return max(found, default=None)

    def _compare(
        self,
        kind: str,
        found: Vector,
        size: float | Callable[[Vector], float] | None,
        take: Callable[[Vector], Vector],
    ) -> CheckResult:
        """Compare with differences.

        size: the size that an error is relative to, if found is a number instead of one tensor for each
        leaf. take: the same number of a difference.
        """
        if not self.compares:
            return CheckResult(False, sure=True)
        if not all_finite(found):
            return NOT_FINITE
        best, compared = CheckResult(None), []
        steps = list(self._steps)
        while steps:
            step = steps.pop(0)
            truth = self.differences.at(kind, step)
            if truth is None:
                continue
            slope = take(truth.slope)
            whole = size(truth.slope) if callable(size) else size
            error = self._error(found, slope, whole)
            if error < self._right:
                return CheckResult(False, error, sure=True)
            compared.append(_Comparison(step, slope, whole, error))
            if best.error is None or error < best.error:
                best = CheckResult(None, error)
            if len(compared) == 2:
                if self._uncertainty(kind, take, compared) < error / CLEARLY:
                    break  # two short steps agree with each other; longer ones are no better
                gaps = [self._one_sided_gap(kind, one.step, take, one.size) for one in compared]
                if min(gaps) > KINKED:
                    # either rounding, which the longest step overcomes, or a kink, which none does
                    steps = steps[-1:]
        uncertainty = self._uncertainty(kind, take, compared)
        if best.error is None:
            return CheckResult(None)
        limit = UNSURE if size is None else OF_ONE
        if uncertainty < limit and best.error > CLEARLY * uncertainty:
            return best._replace(wrong=True)
        if uncertainty < SURE and best.error < uncertainty:
            return CheckResult(False, best.error)
        return CheckResult(None)

    def _uncertainty(
        self, kind: str, take: Callable[[Vector], Vector], compared: list[_Comparison]
    ) -> float:
        """The relative uncertainty of the best difference, by the other steps and the one-sided
        slopes."""
        found = []
        for step, slope, size, _ in compared:
            others = [self._error(one.slope, slope, size) for one in compared if one.step != step]
            gap = self._one_sided_gap(kind, step, take, size)
            found.append(max(min(others, default=inf), gap))
        return min(found, default=inf)

    def _one_sided_gap(
        self, kind: str, step: float, take: Callable[[Vector], Vector], size: float | None
    ) -> float:
        """Relative gap between the slopes to either side: O(h), unless there is a kink within h."""
        truth = self.differences.at(kind, step)
        assert truth is not None
        here = self.differences.here(kind)
        if here is None:
            return inf
        gap = [a - b / step for a, b in zip(truth.sum, here, strict=True)]
        forward_slope = [a + b for a, b in zip(truth.slope, gap, strict=True)]
        return self._error(take(forward_slope), take(truth.slope), size)

    def _error(self, found: Vector, truth: Vector, whole: float | None) -> float:
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
    """The root mean square of a tensor, which steps are relative to; 0.01 for a tensor of zeros."""
    size = float(x.norm()) / max(x.numel(), 1) ** 0.5
    return size if size > 1e-8 and size == size else 0.01


def normal(x: Tensor, random: torch.Generator) -> Tensor:
    """Standard normal numbers, the same on every device and in every dtype."""
    return torch.randn(x.shape, dtype=torch.float64, device="cpu", generator=random).to(
        x.device, x.dtype
    )


def padding_rows(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """The weights of embeddings with padding_idx: name, weight, and the row whose gradient is zero by
    definition."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx is not None:
            yield f"{name}.weight".removeprefix("."), part.weight, part.padding_idx
