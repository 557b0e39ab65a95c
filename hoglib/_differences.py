"""Hessian-vector products by differences of the gradient: what the other routes are compared with.

    D(h) = (grad f(p + h v) - grad f(p - h v)) / 2h        R(h) = (100 D(h / 10) - D(h)) / 99

D is off by O(h^2) and by rounding / h, Richardson's R by O(h^4). Of the steps below the one is taken at
which R and the next one agree best.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from hoglib import _tree
from hoglib._explaining import explaining
from hoglib._leaves import Vector, filled, own_leaves

STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of the size of the parameters, along v
Function = Callable[[Vector], Vector]
T = TypeVar("T")


def in_double(tree: T) -> T:
    """The tree with its tensors of floating-point and complex dtypes in double precision."""

    def convert(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.double()
        return x.to(torch.complex128) if x.is_complex() else x

    result: T = _tree.map_tensors(convert, tree)
    return result


def along(function: Function, leaves: Vector, vector: Vector) -> Vector:
    """The derivative of a function along a vector, all in float64."""
    if not _tree.norm([v.detach() for v in vector]):
        return [torch.zeros_like(x) for x in function(leaves)]
    better = [
        [(100 * fine - coarse) / 99 for coarse, fine in zip(*pair, strict=True)]
        for pair in pairwise(slopes(function, leaves, vector, STEPS))
    ]
    gaps = [distance(*pair) for pair in pairwise(better)]
    known = [gap for gap in gaps if gap == gap]
    if not known:
        return better[-1]
    return better[gaps.index(min(known)) + 1]


def slopes(
    function: Function, leaves: Vector, vector: Vector, steps: Sequence[float]
) -> list[Vector]:
    """D(h) for steps of a vector that is not zero, all with the random numbers of now."""
    leaves, vector = ([x.detach() for x in parts] for parts in (leaves, vector))
    size = max(1.0, float(_tree.norm(leaves)) / max(1, _tree.size(leaves)) ** 0.5)
    unit = size / float(_tree.norm(vector))
    found = []
    for step in steps:
        h, ends = step * unit, []
        for sign in (1, -1):
            with same_random_numbers(leaves):
                ends.append(
                    function([p + sign * h * v for p, v in zip(leaves, vector, strict=True)])
                )
        found.append([(a - b) / (2 * h) for a, b in zip(*ends, strict=True)])
    return found


def same_random_numbers(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Inside, random numbers are those of now, and afterwards they are so again."""
    return torch.random.fork_rng(sorted({x.device for x in tensors if x.is_cuda}, key=str))


def distance(a: Vector, b: Vector) -> float:
    return float(_tree.norm([x.detach() - y.detach() for x, y in zip(a, b, strict=True)]))


def gradient_of(func: Callable[..., Tensor]) -> Function:
    """The first gradient of a scalar function of leaves, by ordinary backward."""

    def gradient(leaves: Vector) -> Vector:
        own = own_leaves(leaves, False)
        value = func(*own)
        parts: list[Tensor | None] = [None] * len(own)
        if value.requires_grad:
            with explaining("the gradient"):
                parts = list(torch.autograd.grad(value, own, allow_unused=True))
        return [part.detach() for part in filled(parts, leaves)]

    return gradient
