"""Central differences: the step table of the library, and directional derivatives of whole vectors.

    D(h) = (f(x + h v) - f(x - h v)) / 2h        error ~ O(h^2) + eps |f| / h

Every comparison with finite differences takes its steps h from the table below. A derivative of order k
is compared with differences of autograd's derivative of order k - 1, so steps depend on the dtype and
on the comparison, not on the order.

`element_differences` builds on this module: it chooses a step for each element.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from hoglib._core.substrate.autograd import Vector, fresh_leaves, materialize_grads, vjp
from hoglib._core.substrate.placement import UNSHARDED, Placement
from hoglib._core.torch_api import pytree

Use = Literal["product", "element", "element, more", "element, short", "slot", "route"]
STEPS: dict[Use, dict[torch.dtype, tuple[float, ...]]] = {
    # `mode="finite-differences"`: the pair of steps with the best agreement is taken, so the range is
    # wide. In units of the root mean square of the parameters, or of 1 if it is in [SMALL, 1].
    "product": dict.fromkeys((torch.float64, torch.float32), (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)),
    # `verify`: each element takes the step with the smallest estimated error. In units of the
    # size of each element. Narrow dtypes need long steps, because rounding grows as eps / h.
    "element": {
        torch.float64: (1e-3, 1e-4, 1e-5, 1e-6), torch.float32: (1e-1, 3e-2, 1e-2, 3e-3),
        torch.float16: (5e-1, 2e-1, 1e-1), torch.bfloat16: (5e-1, 2e-1, 1e-1),
    },
    # `verify`, if the steps above are not conclusive: they double the cost.
    "element, more": {
        torch.float64: (1e-2, 1e-7, 1e-8, 1e-9, 1e-10), torch.float32: (1e-3, 3e-4, 1e-4),
        torch.float16: (), torch.bfloat16: (),
    },
    # `verify`, if a derivative seems wrong: a function may oscillate faster than all steps above.
    "element, short": {torch.float64: (1e-7, 1e-8, 1e-9), torch.float32: ()},
    # The attribution of an error to tensors that a Function saved: terms are compared with their sum,
    # coarsely, and away from kinks, so one step is enough.
    "slot": {torch.float64: (1e-5,), torch.float32: (3e-3,)},
    # `audit` of whole models, in units of the size of each parameter tensor. Tried in this order until
    # a product agrees. The first step is right for most models. A model with many ReLUs needs a shorter
    # step, which crosses no kink; a loss with cancellation needs a longer step.
    "route": {torch.float64: (1e-7, 1e-9, 1e-5, 1e-4, 1e-3), torch.float32: (1e-2, 1e-3, 3e-2, 1e-4)},
}  # fmt: skip
SMALL = 1e-3  # parameters with a smaller root mean square have a natural unit far below 1
VectorFunction = Callable[[Vector], Vector]
T = TypeVar("T")


def steps(use: Use, dtype: torch.dtype) -> tuple[float, ...]:
    """The steps of a use in a dtype; the steps of float32 for an unlisted dtype."""
    table = STEPS[use]
    return table.get(dtype, table[torch.float32])


def both_sides(function: VectorFunction, x: Vector, v: Vector, h: float) -> tuple[Vector, Vector]:
    """f(x + h v) and f(x - h v)."""
    above, below = (function(shifted(x, v, step)) for step in (h, -h))
    return above, below


def shifted(x: Vector, v: Vector, h: float) -> Vector:
    """x + h v."""
    return [p + h * d for p, d in zip(x, v, strict=True)]


def difference_quotient(above: Sequence[Tensor], below: Sequence[Tensor], h: float) -> Vector:
    """D(h) = (above - below) / 2h."""
    return [(a - b) / (2 * h) for a, b in zip(above, below, strict=True)]


def directional_derivative(
    function: VectorFunction, leaves: Vector, vector: Vector, placement: Placement = UNSHARDED
) -> Vector:
    """The derivative of a function along a vector, in float64, by Richardson's extrapolation.

        R(h) = (100 D(h / 10) - D(h)) / 99        error ~ O(h^4)

    The step at which R agrees best with the next R is taken.

    placement: The distribution of the leaves and the vector over processes.
    """
    if not placement.norm([v.detach() for v in vector]):
        return [torch.zeros_like(x) for x in function(leaves)]
    table = steps("product", torch.float64)
    extrapolated = [
        [(100 * fine - coarse) / 99 for coarse, fine in zip(*pair, strict=True)]
        for pair in pairwise(central_differences(function, leaves, vector, table, placement))
    ]
    gaps = [distance(*pair) for pair in pairwise(extrapolated)]
    known = [gap for gap in gaps if gap == gap]
    return extrapolated[gaps.index(min(known)) + 1] if known else extrapolated[-1]


def central_differences(
    function: VectorFunction,
    leaves: Vector,
    vector: Vector,
    steps: Sequence[float],
    placement: Placement = UNSHARDED,
) -> list[Vector]:
    """D(h) for several steps along a nonzero vector; all evaluations draw equal random numbers.

    A step is in units of the root mean square of the leaves (see `STEPS`) over the norm of the vector.
    """
    leaves, vector = ([x.detach() for x in parts] for parts in (leaves, vector))
    count = max(1, placement.size(leaves))
    size = float(placement.norm(leaves)) / count**0.5
    unit = (size if 0 < size < SMALL else max(1.0, size)) / float(placement.norm(vector))

    def reproducible(point: Vector) -> Vector:
        with fixed_random_numbers(leaves):
            return function(point)

    lengths = [step * unit for step in steps]
    return [difference_quotient(*both_sides(reproducible, leaves, vector, h), h) for h in lengths]


def gradient_function(func: Callable[..., Tensor]) -> VectorFunction:
    """leaves -> the gradient of a scalar function, without a graph."""

    def gradient(leaves: Vector) -> Vector:
        p = fresh_leaves(leaves, False)
        value = func(*p)
        parts = vjp([value], p, [torch.ones_like(value)], "the gradient")
        return [part.detach() for part in materialize_grads(parts, leaves)]

    return gradient


def fixed_random_numbers(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Restores torch's random generators at exit: the next run draws equal numbers."""
    return torch.random.fork_rng(sorted({x.device for x in tensors if x.is_cuda}, key=str))


def distance(a: Vector, b: Vector) -> float:
    """|a - b|."""
    return float(pytree.norm([x.detach() - y.detach() for x, y in zip(a, b, strict=True)]))


def relative_distance(a: Vector, b: Vector) -> float:
    """|a - b| / |b|."""
    return distance(a, b) / max(float(pytree.norm(b)), 1e-300)


def to_double(tree: T) -> T:
    """The tree with its floating-point and complex tensors in double precision."""
    return pytree.map_tensors(partial(pytree.in_dtype, dtype=torch.float64), tree)
