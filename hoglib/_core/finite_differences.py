"""Hessian-vector products by differences of the gradient: what the other routes are compared with.

    D(h) = (grad f(p + h v) - grad f(p - h v)) / 2h        R(h) = (100 D(h / 10) - D(h)) / 99

D is off by O(h^2) and by rounding / h, Richardson's R by O(h^4). Of the steps below the one is taken at
which R and the next one agree best.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core import pytree
from hoglib._core.autograd import (
    Vector,
    fresh_leaves,
    gradient_with_graph,
    materialize_grads,
    translate_errors,
    vjp,
)
from hoglib._core.gradient_graph import GraphSummary, graph_summary
from hoglib._core.source_location import warn
from hoglib._core.torch_modes import value_checks_on

STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of the size of the parameters, along v
VectorFunction = Callable[[Vector], Vector]
T = TypeVar("T")


def to_double(tree: T) -> T:
    """The tree with its tensors of floating-point and complex dtypes in double precision."""

    def convert(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.double()
        return x.to(torch.complex128) if x.is_complex() else x

    result: T = pytree.map_tensors(convert, tree)
    return result


def directional_derivative(function: VectorFunction, leaves: Vector, vector: Vector) -> Vector:
    """The derivative of a function along a vector, all in float64."""
    if not pytree.norm([v.detach() for v in vector]):
        return [torch.zeros_like(x) for x in function(leaves)]
    better = [
        [(100 * fine - coarse) / 99 for coarse, fine in zip(*pair, strict=True)]
        for pair in pairwise(central_differences(function, leaves, vector, STEPS))
    ]
    gaps = [distance(*pair) for pair in pairwise(better)]
    known = [gap for gap in gaps if gap == gap]
    if not known:
        return better[-1]
    return better[gaps.index(min(known)) + 1]


def central_differences(
    function: VectorFunction, leaves: Vector, vector: Vector, steps: Sequence[float]
) -> list[Vector]:
    """D(h) for steps of a vector that is not zero, all with the random numbers of now."""
    leaves, vector = ([x.detach() for x in parts] for parts in (leaves, vector))
    size = max(1.0, float(pytree.norm(leaves)) / max(1, pytree.size(leaves)) ** 0.5)
    unit = size / float(pytree.norm(vector))
    found = []
    for step in steps:
        h, ends = step * unit, []
        for sign in (1, -1):
            with fixed_random_numbers(leaves):
                ends.append(
                    function([p + sign * h * v for p, v in zip(leaves, vector, strict=True)])
                )
        found.append([(a - b) / (2 * h) for a, b in zip(*ends, strict=True)])
    return found


def fixed_random_numbers(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Inside, random numbers are those of now, and afterwards they are so again."""
    return torch.random.fork_rng(sorted({x.device for x in tensors if x.is_cuda}, key=str))


def distance(a: Vector, b: Vector) -> float:
    return float(pytree.norm([x.detach() - y.detach() for x, y in zip(a, b, strict=True)]))


def gradient_function(func: Callable[..., Tensor]) -> VectorFunction:
    """The first gradient of a scalar function of leaves, by ordinary backward."""

    def gradient(leaves: Vector) -> Vector:
        own = fresh_leaves(leaves, False)
        value = func(*own)
        parts: list[Tensor | None] = [None] * len(own)
        if value.requires_grad:
            with translate_errors("the gradient"):
                parts = list(torch.autograd.grad(value, own, allow_unused=True))
        return [part.detach() for part in materialize_grads(parts, leaves)]

    return gradient


# === A second look at the first product through a custom Function: one central difference of the
# gradient.
#
# What a Function's backward leaves out of the second derivative cannot be seen in its graph in
# every
# case (a NumPy number kept on ctx, a detach() on a saved tensor). So the first time that a product
# runs
# through a Function of the user's it is compared, coarsely, with a difference of gradients; that
# costs
# four gradients, once for each Function in a process, and says nothing of later inputs:
# `hoglib.verify`
# does. A gradient that is stopped on purpose, all of it zero, is let be.

CHECK_STEPS = (1e-2, 1e-3)
OFF = 0.05  # of the product; a smooth function is off by a hundredth of that in float32
_SEEN: WeakSet[type[Function]] = WeakSet()


def unchecked_functions(value: Tensor, graph: GraphSummary) -> list[type[Function]]:
    """The custom Functions in the graph of a value that no product ran through before."""
    if value.dtype not in (torch.float32, torch.float64) or not value_checks_on():
        return []
    found = {entry.function for entry in graph.user_functions if entry.function} - set(_SEEN)
    return sorted(found, key=lambda function: function.__qualname__)


def check_hessian_product(
    what: str,
    functions: list[type[Function]],
    func: Callable[..., Tensor],
    leaves: Vector,
    vector: Vector,
) -> None:
    """Warns where a product with the Hessian of func is not the difference of its gradients.

    The product is made anew, by the random numbers that the differences have.
    """
    with fixed_random_numbers(leaves), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to tell of a cut was told
        gradient = gradient_with_graph(func, leaves, what, create_graph=False)
        own = gradient.leaves
        product = materialize_grads(vjp(gradient.parts, own, vector, what), own)
    finite_difference_check(what, functions, gradient_function(func), func, leaves, vector, product)


def finite_difference_check(
    what: str,
    functions: list[type[Function]],
    function: VectorFunction,
    func: Callable[..., Tensor],
    leaves: Vector,
    vector: Vector,
    product: Vector,
) -> None:
    """Warns where a product is not the difference, along the vector, of a function of the leaves.

    func: what the user wrote, of the same leaves, of which `function` holds first derivatives.
    """
    for seen in functions:
        _SEEN.add(seen)
    if not pytree.norm([v.detach() for v in vector]):
        return
    found = central_differences(function, leaves, vector, CHECK_STEPS)
    off = [distance(slope, product) for slope in found]
    apart = distance(*found)  # of two steps: by a kink, or by rounding
    scale = max(float(pytree.norm([x.detach() for x in parts])) for parts in (found[0], product))
    if min(off) > OFF * scale and min(off) > 5 * apart and not _stops_gradient(func, leaves):
        names = ", ".join(function.__qualname__ for function in functions)
        warn(
            f"{what}: the second derivative differs by {min(off) / scale:.0%} from a difference of "
            f"first ones. It runs through {names}, whose backward may be cut from its graph, or be no "
            f"derivative: `hoglib.verify({functions[0].__name__}, inputs)` tells.",
        )


def _stops_gradient(func: Callable[..., Tensor], leaves: Vector) -> bool:
    """Whether a custom Function gives zeros for a gradient."""
    own = fresh_leaves(leaves, False)
    value = func(*own)
    stopped: list[bool] = []

    def note(returned: Any, incoming: Any) -> None:
        given = [g for g in returned if isinstance(g, Tensor) and g.is_floating_point()]
        stopped.append(any(not bool(g.any()) for g in given))

    for node, _ in graph_summary(value).user_functions:
        node.register_hook(note)
    torch.autograd.grad(value, own, allow_unused=True)
    return any(stopped)
