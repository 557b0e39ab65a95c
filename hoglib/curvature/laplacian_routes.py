"""How a Laplacian is computed: by collapsed Taylor mode or by nested derivatives, whichever costs less.

The collapsed route runs Python code at each operation of the function, once; the nested one runs
torch's backward pass of it for each direction. So the nested one is faster for few directions of small
tensors, as in a network of 32 units with two coordinates, and for nothing else.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core import torch_internals
from hoglib._core.closures import owner_of
from hoglib._core.finite_differences import fixed_random_numbers
from hoglib.curvature.directions import units
from hoglib.curvature.input_derivatives import Function
from hoglib.taylor.algebras import Parts, Univariate
from hoglib.taylor.jet import Options, by_taylor
from hoglib.taylor.kinks import COMPARISONS, KINKS
from hoglib.taylor.rules import names_of

COLLAPSED, NESTED, FORWARD = "collapsed", "nested", "forward-over-reverse"
MOST_DIRECTIONS = 5  # from here on the collapsed route takes less of everything
# Microseconds on one core of an AMD EPYC, of which only the ratios count: an operation of the function
# costs a + b n and its arithmetic c + d n runs of it, with n directions or backward passes.
COSTS = {
    (COLLAPSED, True): (209, 0, 7.0, 2.0), (NESTED, True): (30, 55, 1.0, 4.5),
    (COLLAPSED, False): (133, 0, 2.0, 0.9), (NESTED, False): (58, 11.5, 0.0, 1.5),
}  # fmt: skip
MULTIPLICATIONS, ELEMENTS = 25e3, 2e3  # in a microsecond


class Route(NamedTuple):
    """The route that `laplacian` or `bilaplacian` took.

    Attributes:
        name: "collapsed", "nested", or, inside torch.func transforms, "forward-over-reverse".
        directions: Along which the function is differentiated; None where there was no choice.
        operations: Of one run of the function, as torch dispatches them; None if they were not counted,
            which is done where both routes are possible.
        multiplications: Of the matrix products and convolutions of one run; or None.
        elements: Of the results of all operations of one run; or None.
        reason: Why it was taken, in words.
    Example:
        >>> x = torch.ones(4, 2)
        >>> hog.laplacian(lambda x: x.square().sum(1), x, return_route=True)[2].name
        'nested'
    """

    name: str
    directions: int | None
    operations: int | None
    multiplications: int | None
    elements: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Counts(NamedTuple):
    """The work of one run of a function."""

    operations: int
    multiplications: int
    elements: int
    outputs: int  # of each point; 0 if x is one point

    def microseconds(self, name: str, passes: int, keep: bool) -> float:
        a, b, c, d = COSTS[name, keep]
        run = self.multiplications / MULTIPLICATIONS + self.elements / ELEMENTS
        return self.operations * (a + b * passes) + run * (c + d * passes)


def choose(
    func: Any, values: Function, x: Tensor, directions_of: Callable[[bool], int], options: Options,
    with_gradient: bool,
) -> Route:  # fmt: skip
    """The route that costs less. A function is counted once for each shape of x.

    directions_of: their number, by whether x is many points or one.
    """
    if x.dim() > 1 and directions_of(True) > MOST_DIRECTIONS:
        return uncounted(COLLAPSED, directions_of(True), f"more than {MOST_DIRECTIONS} directions")
    keep, counts = options.keep, _counts(func, values, x, options)
    directions = directions_of(counts.outputs > 0)
    if directions > MOST_DIRECTIONS:
        return uncounted(COLLAPSED, directions, f"more than {MOST_DIRECTIONS} directions")
    passes = _backward_passes(directions, max(counts.outputs, 1), keep, with_gradient)
    costs = {
        COLLAPSED: counts.microseconds(COLLAPSED, directions, keep),
        NESTED: counts.microseconds(NESTED, passes, keep),
    }
    name, other = sorted(costs, key=lambda name: costs[name])
    reason = (
        f"estimated {costs[name]:,.0f} us against {costs[other]:,.0f} us ({other}), for "
        f"{counts.operations} operations, {counts.multiplications:,} multiplications, {directions} "
        f"directions or {passes} backward passes"
    )
    return Route(name, directions, *counts[:3], reason)


def uncounted(name: str, directions: int | None, reason: str) -> Route:
    """A route for which no operation was counted."""
    return Route(name, directions, None, None, None, reason)


def without_choice(options: Options, x: Tensor) -> Route | None:
    """The route, where it is known without the function; None where there is a choice."""
    if torch_internals.transforms_active():
        return uncounted(FORWARD, None, "inside torch.func transforms")
    if not x.numel():
        return uncounted(NESTED, None, "no points")
    if options.mode != "auto":
        return uncounted(options.mode, None, f"mode={options.mode!r}")
    if torch_internals.tracing():
        return uncounted(COLLAPSED, None, "captured as a graph")
    return None


def nested_instead(route: Route) -> Route:
    """Where the collapsed route was not possible."""
    return route._replace(name=NESTED, reason="an operation has no Taylor rule")


def _backward_passes(directions: int, outputs: int, keep: bool, with_gradient: bool) -> int:
    """Of the nested route, `input_derivatives.by_reverse`."""
    together = outputs > (1 if keep else 3)
    passes = 2 * directions + 2 if together else outputs * (directions + 1)
    return passes + (1 + outputs) * with_gradient


_COUNTS: Any = WeakIdKeyDictionary()  # owner -> key -> counts
MAX_KEPT = 64  # counts of one function


def _counts(func: Any, values: Function, x: Tensor, options: Options) -> Counts:
    # the code of a function that is made anew at each call; a method's object has several
    owner, name = owner_of(func), getattr(func, "__name__", "")
    key = (name, x.shape, x.dtype, x.device)
    of_owner: dict[Any, Counts] = _COUNTS.setdefault(owner, {})
    found = of_owner.get(key)
    if found is None:
        found = _count(values, x, options)
        if len(of_owner) >= MAX_KEPT:
            of_owner.clear()
        of_owner[key] = found
    return found


def _count(values: Function, x: Tensor, options: Options) -> Counts:
    with fixed_random_numbers([x]), _Counter() as counter:
        value = values(x.detach().requires_grad_())
    outputs = value.numel() // len(x) if value.dim() and len(x) else 0
    if counter.kinked:  # Taylor mode warns of a func that is piecewise linear
        probe = options._replace(mode="auto", keep=False, always=False)
        seed: Parts = [units(x, value.dim() > 0), None]
        with fixed_random_numbers([x]):
            by_taylor(probe, Univariate(2, True), [x], [seed], lambda own: [values(own)])
    return Counts(counter.operations, counter.multiplications, counter.elements, outputs)


@final
class _Counter(TorchDispatchMode):
    """Counts the operations that run, and their work by the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.multiplications = self.elements = 0
        self.kinked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default:  # of a result that autograd saves
            return out
        self.operations += 1
        self.kinked |= names_of(func)[1] in KINKS or names_of(func)[1] in COMPARISONS
        if isinstance(out, Tensor):
            self.elements += out.numel()
        flops = flop_registry.get(func.overloadpacket)
        if flops is not None:
            self.multiplications += flops(*args, **kwargs, out_val=out) // 2
        return out
