"""Routes to a second derivative, their comparison with central differences, and the search for the call
that loses the derivative.

A route is a function of leaves and directions. If it is wrong for a loss, it is wrong for one of the
calls that the loss makes. Each call is checked by itself, down to a faulty call with correct parts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import inf, nan
from types import FunctionType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import grad, jacrev, jvp, vmap
from torch.overrides import TorchFunctionMode

from hoglib._core.messages.module_names import ModuleNames
from hoglib._core.modules.swap import call_with
from hoglib._core.numerics.element_differences import random_like
from hoglib._core.numerics.finite_differences import (
    both_sides,
    difference_quotient,
    distance,
    gradient_function,
    shifted,
    steps,
)
from hoglib._core.runtime import source_location
from hoglib._core.substrate.autograd import Vector, dense, fresh_leaves
from hoglib._core.substrate.detachment import (
    ALIASES,
    ESCAPES,
    VALUE_INDEPENDENT,
    name_of_call,
    uses_metadata,
)
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.function_watch import Applying, watching_functions
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_internals import transforms_active, unwrap
from hoglib.stand_ins.mode import without_override_check
from hoglib.verification import maps
from hoglib.verification.attribution import detached_copy, requires_grad
from hoglib.verification.comparison import look_up

# Stopped gradients: values that a function takes out of its graph.
#
# A target under no_grad, `x + (round(x) - x).detach()`, the vectors of spectral norm: autograd treats
# them as constants, so differences must hold them constant, too. A mode records the result of each call
# that returns no graph for arguments with a graph, and replays that result at every other point.

AUTOGRAD_CALLS = ("grad", "backward")  # not opened: a mode would see each call in a Python backward


class CallMode(TorchFunctionMode, ABC):
    """A mode that handles torch calls and custom Functions, but not the calls inside a Function's
    forward.

    of_composites: names of calls to handle inside a composite torch function, instead of the
    composite. Default: the calls with a stand-in.
    """

    def __init__(self, of_composites: frozenset[str] | None = None) -> None:
        super().__init__()
        self._of_composites, self._applying = of_composites, Applying()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside this context, calls are handled."""
        with watching_functions(self.on_function) as self._applying, self:
            yield

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        if self._applying:
            return func(*args, **kwargs)
        name = name_of_call(func)
        if isinstance(func, FunctionType) and name not in AUTOGRAD_CALLS:
            inner = without_override_check(func, self._of_composites)
            if inner is not None:
                with self:
                    return inner(*args, **kwargs)
        return self.on_call(func, name, args, kwargs)

    @abstractmethod
    def on_call(self, func: Callable[..., Any], name: str, args: object, kwargs: object) -> Any:
        """Run a torch call; returns its result."""

    def on_function(self, function: type[Function], args: tuple[Any, ...]) -> None:
        """Called with a custom Function before it runs."""


class StopGradient(NamedTuple):
    """A call that ended the graph, and its result."""

    how: str  # the call, as in messages
    line: source_location.SourceLine | None
    module: nn.Module | None  # the module that was running
    value: Any


@final
class StopGradientReplay(CallMode):
    """Records the stopped values of a function in its first run, and replays them in all later runs."""

    def __init__(self) -> None:
        super().__init__(frozenset({"detach"}))
        self.found: list[StopGradient] = []
        # a gradient is stopped inside a transform, where values cannot be replayed
        self.in_transform = False
        self._recorded, self._next = False, 0  # the first run is over; index of the next value

    @contextmanager
    def held(self) -> Iterator[None]:
        """The context for a run of the function, with a graph, but without its backward."""
        self._next = 0
        if not self._recorded:
            self.found.clear()
        with self.watching():
            yield
        self._recorded = True

    def on_call(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        graphed = any(map(_has_graph, pytree.leaves((args, kwargs))))
        result = func(*args, **kwargs)
        if not graphed or name in VALUE_INDEPENDENT or uses_metadata(name, args):
            return result
        if name in AUTOGRAD_CALLS and kwargs.get("create_graph"):
            return result
        if name in ESCAPES:
            return self._hold(ESCAPES[name], result) if _is_value(result) else result
        made = [y for y in pytree.leaves(result) if is_float(y)]
        if not made or any(map(_has_graph, made)):
            return result
        if name in ALIASES:
            return self._hold(ALIASES[name], result)
        how = "without a graph" if torch.is_grad_enabled() else "under torch.no_grad"
        held = self._hold(f"`{name}` {how}", result)
        if held is not result:  # the call may have written its result to a buffer
            with torch.no_grad():
                for y, value in zip(made, filter(is_float, pytree.leaves(held)), strict=True):
                    y.copy_(value)
        return result

    def _hold(self, how: str, result: object) -> Any:
        """Record the result in the first run; return the recorded result in later runs."""
        if transforms_active():
            self.in_transform = True
            return result
        if not self._recorded:
            line, module = source_location.torch_call_line(), source_location.running_module()
            value = pytree.map_tensors(lambda x: x.detach().clone(), result)
            self.found.append(StopGradient(how, line, module, value))
            return result
        if self._next >= len(self.found) or self.found[self._next].how != how:
            raise RuntimeError("at another point the function makes other calls")
        value = self.found[self._next].value
        self._next += 1
        return pytree.map_tensors(torch.clone, value)


def _has_graph(x: Any) -> bool:
    """Whether autograd records results of x. A torch.func wrapper does not tell: unwrap it."""
    return is_float(x) and bool(x.requires_grad or unwrap(x).requires_grad)


def _is_value(result: object) -> bool:
    """Whether the result is a number or an array of numbers, and not an address."""
    return isinstance(result, float | complex | list) or type(result).__module__ == "numpy"


Scalar = Callable[..., Tensor]  # a scalar function of leaves
# Each quantity as part of a sentence.
TEXTS = {
    "first": "the gradient",
    "hessian": "H v",
    "curvature": "w^T H v",
    "third": "the third derivative",
}


class Route(NamedTuple):
    """One way to a derivative of a scalar function f of leaves, along directions v and w."""

    key: str  # short name
    title: str  # name in reports
    # "first": gradient; "hessian": H v; "curvature": w^T H v; "third": its derivative
    quantity: str
    product: Callable[[Scalar, Vector, Vector, Vector], Vector]  # product(f, leaves, v, w)

    @property
    def row(self) -> str:
        """The name of the route's row in a report."""
        order = self.quantity if self.quantity in ("first", "third") else "second"
        return f"{order} derivative: {self.title}"

    @property
    def takes_w(self) -> bool:
        """Whether its product takes a second direction."""
        return self.quantity in ("curvature", "third") or self.product is grad_of_vmap

    @property
    def text(self) -> str:
        """The computed quantity, as part of a sentence."""
        what = TEXTS[self.quantity]
        return what if self.quantity == "first" else f"{what} by {self.title}"


def requested_routes(names: object) -> list[Route]:
    """The routes with these keys or titles; None gives the route of hvp(mode="auto")."""
    if names is None:
        return [AUTO]
    known = {name: route for route in ROUTES for name in (route.title, route.key)}
    known |= {"auto": AUTO, "rrr": THIRD}
    chosen = look_up("routes", names, known, [route.key for route in ROUTES])
    return [route for route in ROUTES if route in chosen]


def _gradient(f: Scalar, own: Vector) -> Vector:
    """grad f, with its graph."""
    return maps.grad([f(*own)], own, create_graph=True)


def reverse_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """d <grad f, v> / d leaves."""
    own = fresh_leaves(leaves, False)
    return maps.grad(_gradient(f, own), own, v)


def third_order(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """d <H v, w> / d leaves, reverse three times."""
    own = fresh_leaves(leaves, False)
    return maps.grad(maps.grad(_gradient(f, own), own, v, create_graph=True), own, w)


def forward_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The jvp of grad f."""
    return list(jvp(_wrt_all(grad, f, leaves), tuple(leaves), tuple(v))[1])


def reverse_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The gradient of the jvp of f."""
    return list(_wrt_all(grad, _slope(f, v), leaves)(*leaves))


def forward_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The jvp along w of the jvp of f along v."""
    return [jvp(_slope(f, v), tuple(leaves), tuple(w))[1]]


def func_hessian(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """H v as torch.func.hessian = jacfwd(jacrev(f)) computes a column: vmap over directions."""
    jacobian = _wrt_all(jacrev, f, leaves)
    return _vmap_of_one(lambda *one: jvp(jacobian, tuple(leaves), one)[1], v)


def jacrev_of_jacrev(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """v^T H as jacrev(jacrev(f)) computes a row: vmap over the cotangents of a gradient."""
    pull = torch.func.vjp(_wrt_all(jacrev, f, leaves), *leaves)[1]
    return _vmap_of_one(lambda *one: pull(one), v)


def grad_of_vmap(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A meta-gradient by grad(vmap(task)): inner gradients are taken at the parameters of each task."""

    def total(*own: Tensor) -> Tensor:
        def task(e: Tensor) -> Tensor:
            adapted = [x + e * y for x, y in zip(own, w, strict=True)]
            return pytree.dot(list(_wrt_all(grad, f, leaves)(*adapted)), v)

        return vmap(task, randomness="same")(leaves[0].new_zeros(1)).mean()

    return list(_wrt_all(grad, total, leaves)(*leaves))


def _wrt_all(transform: Any, f: Scalar, leaves: Vector) -> Callable[..., tuple[Tensor, ...]]:
    """torch.func.grad or jacrev of f by all leaves."""
    return transform(f, argnums=tuple(range(len(leaves))))


def _slope(f: Scalar, v: Vector) -> Scalar:
    """<grad f, v> in forward mode."""
    return lambda *own: jvp(f, own, tuple(v))[1]


def _vmap_of_one(function: Callable[..., tuple[Tensor, ...]], v: Vector) -> Vector:
    """The function under vmap over a single sample."""
    result = vmap(function, randomness="same")(*(part[None] for part in v))
    return [part[0] for part in result]


FIRST = Route("first", "reverse", "first", lambda f, leaves, v, w: gradient_function(f)(leaves))
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


# Comparison of the derivatives of a scalar function f, with gradient g, with central differences.
#
#     derivative                is compared with
#     first    <g, v>           (f(x + h v) - f(x - h v)) / 2h
#     H v                       (g(x + h v) - g(x - h v)) / 2h
#     w^T H v, a number         w^T (g(x + h v) - g(x - h v)) / 2h
#     third    of w^T H v       (H v at x + h w - H v at x - h w) / 2h, by reverse-over-reverse
#
# Steps h are tried until the derivative agrees with a difference. It is wrong if it agrees with none of
# them, although two differences agree with each other and with their one-sided slopes. Otherwise (at a
# kink, or if numbers cancel) nothing is known. Stopped gradients are held constant.
#
# `verification.comparison.Comparer` works differently: it estimates the error of each element of a
# difference before it reads the derivative, from nine evaluations, and confirms a fault with 25 more.
# Here a correct derivative takes three evaluations of a model's gradient and a wrong one five: no wrong
# derivative agrees with a difference by chance.

RIGHT_WITHIN = {torch.float64: 1e-5, torch.float32: 1e-2}  # relative error of a correct derivative
# The error of a wrong result exceeds the uncertainty of a difference by this factor.
CLEARLY_WRONG = 10
# Largest relative uncertainty of a difference that may call a vector, or a number, wrong.
DOUBT_OF_VECTOR, DOUBT_OF_NUMBER = 1e-2, 1e-3
AGREE = 0.1  # differences along several directions or steps agree up to this relative distance
SMALL_SHARE = 1e-3  # a tensor below this fraction of the whole is compared relative to the whole


class CheckResult(NamedTuple):
    """The result of checking a route."""

    wrong: bool | None  # None if nothing could be compared
    error: float | None = None  # relative
    raised: Exception | None = None
    product: Vector | None = None  # only from a check without comparison

    @property
    def at_fault(self) -> bool:
        """Whether the route is wrong or raises."""
        return self.wrong is True or self.raised is not None


# Slopes of a function F, in units of its arguments: the central (F(x + h v) - F(x - h v)) / 2h and the
# one-sided (F(x + h v) - F(x)) / h. They differ by O(h) unless there is a kink within h.


@final
class Checker:
    """Checks routes of one function at one point, along random directions v and w.

    stops: holds stopped gradients constant; None lets them vary.
    """

    def __init__(
        self, f: Scalar, leaves: Sequence[Tensor], stops: StopGradientReplay | None, seed: int = 0
    ) -> None:
        self._f, self._stops = f, stops
        self._leaves = [x.detach() for x in leaves]  # the point x
        self._dtype = maps.coarsest_dtype(leaves)
        self._random = torch.Generator("cpu").manual_seed(seed)
        self._scales = [scale(x) for x in self._leaves]  # units of the leaves
        self._v, self._state = self._draw(), self._random.get_state()
        self._w: Vector = []  # drawn for routes that take a second direction
        # for the quantity compared last: its central slopes by step
        self._kind, self._known, self._ran = "", dict[float, Vector | None](), False
        # correct products, by quantity; all correct routes to a quantity have equal products
        self.products: dict[str, Vector] = {}

    def check(self, route: Route, *, compare: bool = True) -> CheckResult:
        """Check a route. compare: if False, only whether it runs and is finite."""
        # copies: code under no_grad may write to its arguments
        leaves = self._copies()
        self._w = (self._w or self._draw_w()) if route.takes_w else []
        try:
            product = route.product(self._f, leaves, self._v, self._w)
        except Exception as error:
            return CheckResult(None, raised=error)
        del leaves
        product = [dense(part.detach()) for part in product]
        if not _all_finite(product):
            return CheckResult(True, nan)
        if not compare:
            return CheckResult(False, product=product)
        result = self._compare(route, product)
        if not result.wrong and route.quantity != "first":  # nothing is compared with it later
            self.products.setdefault(route.quantity, product)
        return result

    def _compare(self, route: Route, product: Vector) -> CheckResult:
        # everything is compared in units of the leaves: <g, v> and w^T H v are one number each
        quantity, limit = route.quantity, DOUBT_OF_VECTOR
        size = None  # denominator of the relative error of a number; None for a vector
        if quantity == "first":
            size, limit = float(pytree.norm(_times(product, self._scales))), DOUBT_OF_NUMBER
            product = [pytree.dot(product, self._v)]
        elif quantity != "curvature":
            product = _times(product, self._scales)
        # zero is suspect in float64: no relative error exists, and it may be a cut graph
        zero = self._dtype == torch.float64 and quantity == "hessian"
        zero = zero and not any(part.any() for part in product)
        tried: list[tuple[Vector, float]] = []  # slopes, and their relative bends
        best = doubt = inf
        for step in steps("route", self._dtype):
            central = self._slope(quantity, step)
            if central is None:
                continue
            if quantity == "curvature":
                size, limit = float(pytree.norm(central)), DOUBT_OF_NUMBER
                central = [self._along_w(central)]
            error = _relative_distance(product, central, size)
            if error < RIGHT_WITHIN.get(self._dtype, RIGHT_WITHIN[torch.float32]):
                return self._compare_zero(error) if zero else CheckResult(False, error)
            one_sided = self._one_sided(quantity, step)
            if quantity == "curvature":
                one_sided = [self._along_w(one_sided)]
            best, bend = min(best, error), _relative_distance(one_sided, central, size)
            for other, bent in tried:
                doubt = min(doubt, max(_relative_distance(other, central, size), min(bend, bent)))
            if doubt < limit and best > CLEARLY_WRONG * doubt:
                return CheckResult(True, best)
            tried.append((central, bend))
        return self._compare_zero(None) if zero else CheckResult(None)

    def _compare_zero(self, error: float | None) -> CheckResult:
        """Judge a product of zero: there is no relative error.

        It is correct if the differences vanish with their step, or if they are zero at one step
        (`error`) and do not agree at others: a branch for the neighbourhood of a single point, such as
        sin(x) / x at 0, has the derivatives of the branch.
        """
        found = [(self._slope("hessian", h), h) for h in steps("route", self._dtype)[2:]]
        pairs = [(one, self._one_sided("hessian", h)) for one, h in found if one is not None]
        slopes = [side for pair in pairs for side in pair]
        size = float(pytree.norm(slopes[-2])) if len(slopes) == 2 * len(found) else 0.0
        if size and max(distance(one, slopes[-2]) for one in slopes) < AGREE * size:
            return CheckResult(True, 1.0)
        small = bool(size) and float(pytree.norm(slopes[0])) < 2e-2 * size
        return CheckResult(False, error or 0.0) if small or error is not None else CheckResult(None)

    def is_linear(self) -> bool:
        """Whether differences of the gradient are linear in their direction. If they converge without
        being linear, as at a tie of a maximum, no second derivative exists."""
        step, (v, w) = steps("route", self._dtype)[2], (self._v, self._draw_w())
        both = [a - b for a, b in zip(v, w, strict=True)]
        of_v, of_w, of_both = (self._difference("hessian", x, step) or [] for x in (v, w, both))
        apart = [a - b for a, b in zip(of_v, of_w, strict=True)]
        return bool(apart) and _relative_distance(of_both, apart, float(pytree.norm(of_v))) < AGREE

    def _slope(self, quantity: str, step: float) -> Vector | None:
        """The central slope for a quantity and a step. None if the function raises, or if it stops a
        gradient inside a torch.func transform, where the value cannot be held constant."""
        kind = "hessian" if quantity == "curvature" else quantity
        if kind != self._kind:  # keep slopes for one quantity: its routes are checked in a row
            self._kind, self._known, self._ran = kind, {}, False
        if step not in self._known:
            self._known[step] = None
            along = self._w if kind == "third" else self._v
            with suppress(Exception):  # the function need not accept another point
                if not self._ran:  # the first run records the values to hold
                    self._function(kind, self._copies())
                    self._ran = True
                if self._stops is None or not self._stops.in_transform:
                    self._known[step] = self._difference(kind, along, step)
        return self._known[step]

    def _one_sided(self, quantity: str, step: float) -> Vector:
        """(F(x + h v) - F(x)) / h. Its two values are computed again: a correct route does not need
        it, and vectors of the size of the parameters are what limits an audit."""
        kind = "hessian" if quantity == "curvature" else quantity
        along = self._w if kind == "third" else self._v
        above = self._function(kind, shifted(self._leaves, along, step))
        slope = difference_quotient(above, self._function(kind, self._copies()), step / 2)
        return slope if kind == "first" else _times(slope, self._scales)

    def _difference(self, kind: str, along: Vector, step: float) -> Vector | None:
        above, below = both_sides(lambda x: self._function(kind, x), self._leaves, along, step)
        central = difference_quotient(above, below, step)
        del above, below
        if kind != "first":
            for part, unit in zip(central, self._scales, strict=True):
                part.mul_(unit)
        return central if _all_finite(central) else None

    def _along_w(self, slope: Vector) -> Tensor:
        """<w, slope>, for a slope in units of the leaves."""
        units = zip(slope, self._w, self._scales, strict=True)
        return pytree.sum_scalars([(part * (w / unit)).sum() for part, w, unit in units])

    def _function(self, kind: str, leaves: Vector) -> Vector:
        """The function F of the differences: f, its gradient, or H v; f may write to the leaves."""
        if kind == "first":
            return [self._held(*fresh_leaves(leaves, False)).detach()]
        if kind == "hessian":
            return gradient_function(self._held)(leaves)
        return reverse_over_reverse(self._held, leaves, self._v, self._w)

    def _draw(self) -> Vector:
        drawn = (random_like(x, self._random) for x in self._leaves)
        return [part * unit for part, unit in zip(drawn, self._scales, strict=True)]

    def _draw_w(self) -> Vector:
        self._random.set_state(self._state)
        return self._draw()

    def _copies(self) -> Vector:
        return [x.clone() for x in self._leaves]

    def _held(self, *own: Tensor) -> Tensor:
        with nullcontext() if self._stops is None else self._stops.held():
            return self._f(*own)


def _relative_distance(got: Vector, truth: Vector, size: float | None) -> float:
    """The largest difference of two vectors, tensor by tensor; relative to their sizes, or to
    `size`."""
    pairs = list(zip(got, truth, strict=True))
    sizes = [max(float(a.norm()), float(b.norm())) if size is None else 0.0 for a, b in pairs]
    floor = SMALL_SHARE * sum(one**2 for one in sizes) ** 0.5 if size is None else size
    sized = zip(pairs, sizes, strict=True)
    gaps = [float((a - b).norm()) / max(one + floor, 1e-300) for (a, b), one in sized]
    return inf if any(gap != gap for gap in gaps) else max(gaps)


def _times(parts: Vector, units: Sequence[float]) -> Vector:
    return [part * unit for part, unit in zip(parts, units, strict=True)]


def _all_finite(parts: Vector) -> bool:
    return all(bool(part.isfinite().all()) for part in parts)


def scale(x: Tensor) -> float:
    """The root mean square of a tensor, for relative steps; 0.01 for a tensor of zeros."""
    size = float(x.norm()) / max(x.numel(), 1) ** 0.5
    return size if 0 < size < inf else 0.01


# The search for the module, and the operation in it, that loses a derivative.
#
# The loss calls modules, and each module calls modules, torch functions and custom Functions. A call
# is a function f(x, p, u) = <u, y(x, p)> of its inputs x, its parameters p and the incoming gradient u.
# If a derivative of the whole loss is wrong, it is wrong for one of the calls in the loss, then for one
# of the calls in that call, and so on, down to a call with correct parts.

MAX_OPERATIONS = 40  # recorded operations in one module's own code


@final
@dataclass
class RecordedCall:
    """A call of a module, an operation (a torch function or a custom Function), or the whole loss."""

    module: nn.Module | None = None  # for an operation, the module that calls it
    operation: str = ""  # name of the operation; "" for a module
    run: Callable[..., Any] | None = None  # the module or function; None if it cannot run alone
    args: tuple[Any, ...] = ()  # copies
    kwargs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # parameters given to a module
    line: source_location.SourceLine | None = None  # of an operation
    function: type[Function] | None = None  # for a custom Function
    parts: dict[Any, "RecordedCall"] = field(default_factory=dict)  # calls inside, each kind once

    @property
    def operations(self) -> list["RecordedCall"]:
        """The operations in the module's own code, without those inside of modules that it calls."""
        return [part for part in self.parts.values() if part.operation]


class Fault(NamedTuple):
    """A module call that loses a derivative, although no module called inside loses it."""

    call: RecordedCall
    result: CheckResult
    operations: list[RecordedCall]  # operations in the module's own code that lose the derivative

    @property
    def module(self) -> nn.Module | None:
        """The module that calls the operations; the call may be of another module's method."""
        owners = {id(op.module): op.module for op in self.operations}
        (owner,) = owners.values() if len(owners) == 1 else (None,)
        return owner or self.call.module


@final
class Locator:
    """Finds the faults among the calls of a loss.

    run: runs the whole loss inside a given context. initial_state: a context that resets a module, or
    the whole loss, so that it gives equal values in every run.
    """

    def __init__(
        self, names: ModuleNames, run: Callable[..., Any], initial_state: Callable[..., Any]
    ) -> None:
        self._root, self._initial_state = record_calls(names, run), initial_state
        self._checkers: dict[int, Checker | None] = {}  # by id of the call

    def find(self, route: Route, result: CheckResult) -> Iterator[Fault]:
        """The faults, one for each module, if a derivative of the whole loss is wrong or raises."""
        found: set[int] = set()
        # if the derivative raises, look only for calls that raise
        for fault in self._descend(self._root, route, result, result.raised is None):
            if id(fault.module) not in found:
                found.add(id(fault.module))
                yield fault

    def _descend(
        self, call: RecordedCall, route: Route, result: CheckResult, compare: bool
    ) -> Iterator[Fault]:
        fault_below, operations = False, []
        for part in call.parts.values():
            checker = self._checker(part, call)
            of_part = checker.check(route, compare=compare) if checker else None
            if of_part is None or not of_part.at_fault:
                continue
            if part.operation:
                operations.append(part)
            else:
                fault_below = True
                yield from self._descend(part, route, of_part, compare)
        if operations or not fault_below:
            yield Fault(call, result, operations)

    def _checker(self, call: RecordedCall, parent: RecordedCall) -> Checker | None:
        """The checker of a call; None if the call cannot run alone, or has no variables."""
        if id(call) not in self._checkers:
            self._checkers[id(call)] = None
            module = parent.module if call.operation else call.module
            function: Any = call.run

            def run(args: Any, kwargs: Any, parameters: dict[str, Tensor]) -> list[Tensor]:
                with self._initial_state(module):
                    if call.operation:
                        return _float_tensors(function(*args, **kwargs))
                    return _float_tensors(call_with(function, parameters, *args, **kwargs))

            with suppress(Exception):  # it cannot run alone
                f, leaves = _as_scalar_function(run, (call.args, call.kwargs, call.parameters))
                if leaves:
                    self._checkers[id(call)] = Checker(f, leaves, StopGradientReplay())
        return self._checkers[id(call)]


def _as_scalar_function(run: Callable[..., Vector], inputs: Any) -> tuple[Scalar, Vector]:
    """<u, run(inputs)> as a function f of u and of the inputs that require grad, and the values of its
    arguments; an empty list of values if nothing depends on them."""
    call = replace(maps.map_of(run, inputs), clones=True)  # run may change its inputs in place
    first = call.run_with_grad() if any(map(requires_grad, pytree.leaves(inputs))) else []
    which = [i for i, y in enumerate(first) if y.requires_grad and y.numel()]
    random = torch.Generator("cpu").manual_seed(1)
    u = [random_like(maps.real(first[i].detach()), random) for i in which]
    outputs, count = call.to(which), len(call.point)

    def f(*values: Tensor) -> Tensor:
        pairs = zip(outputs(*values[:count]), values[count:], strict=True)
        return pytree.sum_scalars([(y * weights).sum() for y, weights in pairs])

    return f, [*call.point, *u] if u else []


def _float_tensors(value: object) -> list[Tensor]:
    """The floating-point tensors of an output, also inside objects unknown to pytrees."""
    return [x for _, x in pytree.tensors_in("", value) if is_float(x)]


def record_calls(names: ModuleNames, run: Callable[..., Any]) -> RecordedCall:
    """The tree of calls in a run, with copies of their arguments."""
    stack = [root := RecordedCall()]

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = RecordedCall(module)
        if not transforms_active():  # wrapped tensors cannot be copied
            call.run = module
            call.args, call.kwargs = detached_copy((args, kwargs))
            # a functional loss swaps plain tensors in for the parameters
            named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            plain = [(name, p) for name, p in named if not isinstance(p, nn.Parameter)]
            call.parameters = {name: p.detach().requires_grad_() for name, p in plain}
        stack[-1].parts[len(stack[-1].parts)] = call
        stack.append(call)

    def end(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if len(stack) > 1 and stack[-1].module is module:
            stack.pop()

    @contextmanager
    def hooks() -> Iterator[None]:
        with ExitStack() as stack:
            for module in {id(module): module for module in names.modules()}.values():
                if not isinstance(module, torch.jit.ScriptModule):
                    before = module.register_forward_pre_hook(start, prepend=True, with_kwargs=True)
                    after = module.register_forward_hook(end, with_kwargs=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            yield

    # the check of the whole reports an error; the calls before it are recorded
    with suppress(Exception), _OperationRecorder(lambda: stack[-1].parts).watching():
        run(hooks())
    return root


@final
class _OperationRecorder(CallMode):
    """Records outermost torch calls that map tensors with a graph to tensors with a graph, and custom
    Functions; each kind of call once.

    parts: gives the recorded parts of the running module.
    """

    def __init__(self, parts: Callable[[], dict[Any, RecordedCall]]) -> None:
        super().__init__()
        self._parts = parts

    def on_function(self, function: type[Function], args: tuple[Any, ...]) -> None:
        if not maps.is_part(function):
            name = function.__qualname__
            call = RecordedCall(run=function.apply, operation=name, function=function)
            self._record(call, (args, {}), source_location.caller_line())

    def on_call(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        call = key = None
        if any(map(requires_grad, pytree.leaves((args, kwargs)))):
            call = RecordedCall(run=func, operation=name or str(func))
            key = self._record(call, (args, kwargs), source_location.torch_call_line())
        result = func(*args, **kwargs)
        made = any(map(requires_grad, pytree.leaves(result)))
        if call is not None and not made and self._parts().get(key) is call:
            del self._parts()[key]
        return result

    def _record(
        self, call: RecordedCall, inputs: object, line: source_location.SourceLine | None
    ) -> Any:
        """Keep a call, unless a similar call is kept, or its tensors cannot be copied."""
        parts = self._parts()
        key = call.operation, line, tuple((tuple(x.shape), x.dtype) for x in pytree.tensors(inputs))
        full = sum(bool(part.operation) for part in parts.values()) >= MAX_OPERATIONS
        if not (key in parts or full or transforms_active()):
            call.args, call.kwargs = detached_copy(inputs)
            call.line, call.module = line, source_location.running_module()
            parts[key] = call
        return key
