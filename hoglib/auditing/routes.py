"""The derivatives that `audit` checks, each as a function of leaves and directions, and their
comparison with central differences."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import inf, nan
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, dense, fresh_leaves
from hoglib._core.element_differences import random_like
from hoglib._core.finite_differences import (
    both_sides,
    difference_quotient,
    gradient_function,
    steps,
)
from hoglib.auditing.stop_gradients import StopGradientReplay
from hoglib.errors import ArgumentTypeError, ArgumentValueError

Scalar = Callable[..., Tensor]  # a scalar function of leaves
# What a route computes, as part of a sentence.
TEXTS = {
    "first": "the gradient", "hessian": "H v", "curvature": "w^T H v",
    "third": "the third derivative",
}  # fmt: skip


class Route(NamedTuple):
    """One way to a derivative of a scalar function f of leaves, along directions v and w.

    quantity: "first" for the gradient, "hessian" for H v, "curvature" for w^T H v, "third" for the
    derivative of w^T H v. product(f, leaves, v, w) computes it.
    """

    key: str
    title: str
    quantity: str
    product: Callable[[Scalar, Vector, Vector, Vector], Vector]

    @property
    def row(self) -> str:
        """The name of its row in a report."""
        order = self.quantity if self.quantity in ("first", "third") else "second"
        return f"{order} derivative: {self.title}"

    @property
    def text(self) -> str:
        """What it computes, as part of a sentence."""
        what = TEXTS[self.quantity]
        return what if self.quantity == "first" else f"{what} by {self.title}"


def requested_routes(names: object) -> list[Route]:
    """The routes with these keys or titles; for None the one that hvp(mode="auto") takes."""
    if names is None:
        return [AUTO]
    given = [names] if isinstance(names, str) else names
    known = {name: route for route in ROUTES for name in (route.title, route.key)}
    known |= {"auto": AUTO, "rrr": THIRD}
    if not isinstance(given, list | tuple | set | frozenset) or not given:
        raise ArgumentTypeError(
            f"routes: expected some of {', '.join(route.key for route in ROUTES)}, got "
            f"{validation.describe(names)}."
        )
    for name in given:
        if not isinstance(name, str) or name not in known:
            raise ArgumentValueError(f"routes: expected some of {', '.join(known)}, got {name!r}.")
    chosen = {known[name].key for name in given}
    return [route for route in ROUTES if route.key in chosen]


def gradient(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """grad f."""
    return gradient_function(f)(leaves)


def _gradient(f: Scalar, own: Vector) -> Vector:
    """grad f with its graph."""
    return _vjp([f(*own)], own, [own[0].new_ones(())], create_graph=True)


def _vjp(outputs: Vector, own: Vector, v: Vector, *, create_graph: bool = False) -> Vector:
    """d <outputs, v> / d own; an output without a graph is a constant, as it is to autograd."""
    pairs = [(y, u.to(y)) for y, u in zip(outputs, v, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in own]
    given = [[*part] for part in zip(*pairs, strict=True)]
    found = torch.autograd.grad(
        given[0], own, given[1], create_graph=create_graph, materialize_grads=True
    )
    return list(found)


def reverse_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """d <grad f, v> / d leaves."""
    own = fresh_leaves(leaves, False)
    return _vjp(_gradient(f, own), own, v)


def third_order(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """d <H v, w> / d leaves, reverse three times."""
    own = fresh_leaves(leaves, False)
    product = _vjp(_gradient(f, own), own, v, create_graph=True)
    return _vjp(product, own, w)


def forward_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The jvp of grad f."""
    return list(jvp(_by_all(grad, f, leaves), tuple(leaves), tuple(v))[1])


def reverse_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The gradient of the jvp of f."""
    return list(_by_all(grad, _slope(f, v), leaves)(*leaves))


def forward_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The jvp along w of the jvp of f along v."""
    return [jvp(_slope(f, v), tuple(leaves), tuple(w))[1]]


def func_hessian(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A column of torch.func.hessian = jacfwd(jacrev(f)): vmap over directions."""
    jacobian = _by_all(jacrev, f, leaves)
    return _vmap_of_one(lambda *one: jvp(jacobian, tuple(leaves), one)[1], v)


def jacrev_of_jacrev(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A row of jacrev(jacrev(f)): vmap over the cotangents of a gradient."""
    pull = torch.func.vjp(_by_all(jacrev, f, leaves), *leaves)[1]
    return _vmap_of_one(lambda *one: pull(one), v)


def grad_of_vmap(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A meta-gradient by grad(vmap(task)), with inner gradients at the parameters of each task."""

    def total(*own: Tensor) -> Tensor:
        def task(e: Tensor) -> Tensor:
            adapted = [x + e * y for x, y in zip(own, w, strict=True)]
            return pytree.dot(list(_by_all(grad, f, leaves)(*adapted)), v)

        slopes: Tensor = vmap(task, randomness="same")(leaves[0].new_zeros(1))
        return slopes.mean()

    return list(_by_all(grad, total, leaves)(*leaves))


def _by_all(transform: Any, f: Scalar, leaves: Vector) -> Callable[..., tuple[Tensor, ...]]:
    """torch.func.grad or jacrev of f by all leaves."""
    result: Callable[..., tuple[Tensor, ...]] = transform(f, argnums=tuple(range(len(leaves))))
    return result


def _slope(f: Scalar, v: Vector) -> Scalar:
    def slope(*own: Tensor) -> Tensor:
        found: Tensor = jvp(f, own, tuple(v))[1]
        return found

    return slope


def _vmap_of_one(function: Callable[..., tuple[Tensor, ...]], v: Vector) -> Vector:
    found = vmap(function, randomness="same")(*(part[None] for part in v))
    return [part[0] for part in found]


FIRST = Route("first", "reverse", "first", gradient)
AUTO = Route("rr", "reverse-over-reverse", "hessian", reverse_over_reverse)  # hvp(mode="auto")
THIRD = Route("third order", "reverse-over-reverse-over-reverse", "third", third_order)
ROUTES = (
    AUTO,
    Route("fr", "forward-over-reverse", "hessian", forward_over_reverse),
    Route("rf", "reverse-over-forward", "hessian", reverse_over_forward),
    Route("ff", "forward-over-forward", "curvature", forward_over_forward),
    Route("torch.func.hessian", "torch.func.hessian", "hessian", func_hessian),
    Route("jacrev of jacrev", "jacrev of jacrev", "hessian", jacrev_of_jacrev),
    Route("grad of vmap", "grad of vmap", "hessian", grad_of_vmap),
    THIRD,
)


# Compares the derivatives of a scalar function f, with gradient g, with central differences.
#
#     derivative                is compared with
#     first    <g, v>           (f(x + h v) - f(x - h v)) / 2h
#     H v                       (g(x + h v) - g(x - h v)) / 2h
#     w^T H v, a number         the same, and w
#     third    of w^T H v       (H v at x + h w - H v at x - h w) / 2h, by reverse-over-reverse
#
# Steps h are tried until the derivative agrees with a difference. It is wrong if it agrees with none,
# and two differences agree with each other and their one-sided slopes; otherwise (at a kink, or where
# numbers cancel) nothing is known. Values that f takes out of its graph are held constant.

RIGHT = {torch.float64: 1e-5, torch.float32: 1e-2}
CLEARLY = 10  # a wrong result is that many times further from a difference than its uncertainty
# Largest uncertainty of a difference to call a vector wrong, to call a number wrong.
OF_VECTOR, OF_NUMBER = 1e-2, 1e-3
SHARE = 1e-3  # tensors smaller than this share of all are compared relative to all


class CheckResult(NamedTuple):
    """What is known about a route. `wrong`: True, False, or None where nothing could be compared."""

    wrong: bool | None
    error: float | None = None  # relative
    raised: Exception | None = None
    product: Vector | None = None  # of a check that compares nothing

    @property
    def at_fault(self) -> bool:
        """Whether it is wrong or raises."""
        return self.wrong is True or self.raised is not None


# Slopes of a function F in units of its arguments: (F(x + h v) - F(x - h v)) / 2h, and
# (F(x + h v) - F(x)) / h, which differs by O(h) unless there is a kink within h.
_Slope = tuple[Vector, Vector]


@final
class Checker:
    """Checks routes of one function at one point, along random directions v and w.

    stops: holds the values that the function takes out of its graph; None to let them vary.
    """

    def __init__(
        self, f: Scalar, leaves: Sequence[Tensor], stops: StopGradientReplay | None, seed: int = 0
    ) -> None:
        self._f, self._stops = f, stops
        self._leaves = [x.detach() for x in leaves]
        self._dtype = max((x.dtype for x in leaves), key=lambda dtype: torch.finfo(dtype).eps)
        random = torch.Generator("cpu").manual_seed(seed)
        self._scales = [scale(x) for x in self._leaves]
        self._v, self._w = (
            _times([random_like(x, random) for x in self._leaves], self._scales) for _ in range(2)
        )
        self._known: dict[tuple[str, float], _Slope | None] = {}
        self._here: dict[str, Vector] = {}
        self.products: dict[str, Vector] = {}  # by the routes that were checked

    def check(self, route: Route, *, compare: bool = True) -> CheckResult:
        """Whether a route is right; without `compare`, whether it does not raise and is finite."""
        # copies, because code under no_grad may write to its arguments
        leaves = [x.clone() for x in self._leaves]
        try:
            found = route.product(self._f, leaves, self._v, self._w)
        except Exception as error:
            return CheckResult(None, raised=error)
        found = [dense(part.detach()) for part in found]
        if not _all_finite(found):
            return CheckResult(True, nan)
        self.products[route.key] = found
        return self._compare(route, found) if compare else CheckResult(False, product=found)

    def _compare(self, route: Route, found: Vector) -> CheckResult:
        size, limit = None, OF_VECTOR  # size: what the error of a number is relative to
        if route.quantity == "first":
            size, limit = float(pytree.norm(_times(found, self._scales))), OF_NUMBER
            found = [pytree.dot(found, self._v)]
        elif route.quantity != "curvature":
            found = _times(found, self._scales)
        tried: list[tuple[Vector, float]] = []  # slopes, and their relative bends
        best = doubt = inf
        for step in steps("route", self._dtype):
            slope = self._slope(route.quantity, step)
            if slope is None:
                continue
            central, one_sided = slope
            if route.quantity == "curvature":
                size, limit = float(pytree.norm(central)), OF_NUMBER
                w = [part / unit for part, unit in zip(self._w, self._scales, strict=True)]
                central, one_sided = ([pytree.dot(part, w)] for part in slope)
            error = _distance(found, central, size)
            if error < RIGHT.get(self._dtype, RIGHT[torch.float32]):
                return CheckResult(False, error)
            best, bend = min(best, error), _distance(one_sided, central, size)
            for other, other_bend in tried:
                gap = _distance(other, central, size)
                doubt = min(doubt, max(gap, min(bend, other_bend)))
            if doubt < limit and best > CLEARLY * doubt:
                return CheckResult(True, best)
            tried.append((central, bend))
        return CheckResult(None)

    def _slope(self, quantity: str, step: float) -> _Slope | None:
        """A slope of the function that gives a quantity; None where that raises, or where it stops a
        gradient inside a transform of torch.func, which cannot be held constant."""
        kind = "hessian" if quantity == "curvature" else quantity
        if (kind, step) not in self._known:
            self._known[kind, step] = None
            along = self._w if kind == "third" else self._v
            try:
                if kind not in self._here:  # the first run records the values to hold
                    self._here[kind] = self._function(kind, self._leaves)
                if self._stops is None or not self._stops.beyond:
                    self._known[kind, step] = self._difference(kind, along, step)
            except Exception:  # the function need not accept another point
                pass
        return self._known[kind, step]

    def _difference(self, kind: str, along: Vector, step: float) -> _Slope | None:
        above, below = both_sides(lambda x: self._function(kind, x), self._leaves, along, step)
        central = difference_quotient(above, below, step)
        one_sided = difference_quotient(above, self._here[kind], step / 2)
        if kind != "first":
            central, one_sided = _times(central, self._scales), _times(one_sided, self._scales)
        return (central, one_sided) if _all_finite(central) else None

    def _function(self, kind: str, x: Vector) -> Vector:
        """What is differenced."""
        leaves = [part.clone() for part in x]
        if kind == "first":
            return [self._held(*fresh_leaves(leaves, False)).detach()]
        if kind == "hessian":
            return gradient_function(self._held)(leaves)
        return reverse_over_reverse(self._held, leaves, self._v, self._w)

    def _held(self, *own: Tensor) -> Tensor:
        with nullcontext() if self._stops is None else self._stops.held():
            return self._f(*own)


def _distance(found: Vector, truth: Vector, size: float | None) -> float:
    """The largest difference of two vectors, a tensor at a time; relative to their size, or a given
    one."""
    pairs = list(zip(found, truth, strict=True))
    sizes = [max(float(a.norm()), float(b.norm())) if size is None else 0.0 for a, b in pairs]
    floor = SHARE * sum(one**2 for one in sizes) ** 0.5 if size is None else size
    gaps = [
        float((a - b).norm()) / max(one + floor, 1e-300)
        for (a, b), one in zip(pairs, sizes, strict=True)
    ]
    return inf if any(gap != gap for gap in gaps) else max(gaps)


def _times(parts: Vector, units: Sequence[float]) -> Vector:
    return [part * unit for part, unit in zip(parts, units, strict=True)]


def _all_finite(parts: Vector) -> bool:
    return all(bool(part.isfinite().all()) for part in parts)


def scale(x: Tensor) -> float:
    """The root mean square of a tensor, which steps are relative to; 0.01 for a tensor of zeros."""
    size = float(x.norm()) / max(x.numel(), 1) ** 0.5
    return size if size > 1e-8 and size == size else 0.01
