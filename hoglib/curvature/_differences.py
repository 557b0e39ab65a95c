"""Hessian-vector products by differences of the gradient: what the other routes are compared with.

    D(h) = (grad f(p + h v) - grad f(p - h v)) / 2h        R(h) = (100 D(h / 10) - D(h)) / 99

D is off by O(h^2) and by rounding / h, Richardson's R by O(h^4). Of the steps below the one is taken at
which R and the next one agree best.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from hoglib import _tree
from hoglib._explaining import explaining

STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of the size of the parameters, along v
T = TypeVar("T")


def in_double(tree: T) -> T:
    """The tree with its tensors of floating-point and complex dtypes in double precision."""

    def convert(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.double()
        return x.to(torch.complex128) if x.is_complex() else x

    result: T = _tree.map_tensors(convert, tree)
    return result


def along(
    function: Callable[[list[Tensor]], list[Tensor]], leaves: list[Tensor], vector: list[Tensor]
) -> list[Tensor]:
    """The derivative of a function along a vector, all in float64."""
    leaves, vector = ([x.detach() for x in parts] for parts in (leaves, vector))
    length = float(_tree.norm(vector))
    if length == 0:
        return [torch.zeros_like(x) for x in function(leaves)]
    unit = max(1.0, float(_tree.norm(leaves)) / max(1, _tree.size(leaves)) ** 0.5) / length

    again = replaying(leaves)

    def central(step: float) -> list[Tensor]:
        above, below = (
            again(function, [p + sign * step * v for p, v in zip(leaves, vector, strict=True)])
            for sign in (1, -1)
        )
        return [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)]

    slopes = [central(step * unit) for step in STEPS]
    better = [
        [(100 * fine - coarse) / 99 for coarse, fine in zip(*pair, strict=True)]
        for pair in pairwise(slopes)
    ]
    gaps = [_distance(*pair) for pair in pairwise(better)]
    known = [gap for gap in gaps if gap == gap]
    if not known:
        return better[-1]
    return better[gaps.index(min(known)) + 1]


def replaying(leaves: list[Tensor]) -> Callable[..., list[Tensor]]:
    """Calls functions with the random numbers of now, and leaves the generators as they are."""
    devices = sorted({leaf.device for leaf in leaves if leaf.is_cuda}, key=str)

    def call(function: Callable[[list[Tensor]], list[Tensor]], at: list[Tensor]) -> list[Tensor]:
        with torch.random.fork_rng(devices):
            return function(at)

    return call


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return float(_tree.norm([x - y for x, y in zip(a, b, strict=True)]))


def gradient_of(func: Callable[..., Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """The first gradient of a scalar function of leaves, by ordinary backward."""

    def gradient(leaves: list[Tensor]) -> list[Tensor]:
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        value = func(*own)
        if not value.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        with explaining("the gradient"):
            parts: Any = torch.autograd.grad(value, own, allow_unused=True)
        return [
            torch.zeros_like(leaf)
            if part is None
            else (part if part.layout is torch.strided else part.to_dense()).detach()
            for part, leaf in zip(parts, leaves, strict=True)
        ]

    return gradient
