"""What the tests of many ops check: derivatives in every mode, and in every mix of modes."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

MODES = ("rr", "fr", "rf", "ff")
Scalar = Callable[[Tensor], Tensor]


def in_every_mix(function: Scalar, x: Tensor, v: Tensor, order: int) -> Iterator[Tensor]:
    """d^order/dt^order function(x + t v) at t = 0, by each of the 2^order mixes of modes."""
    for modes in itertools.product("rf", repeat=order):
        derivative = function
        for mode in modes:
            derivative = _along(derivative, v, mode)
        yield derivative(x)


def _along(function: Scalar, v: Tensor, mode: str) -> Scalar:
    if mode == "f":
        return lambda x: torch.func.jvp(function, (x,), (v,))[1]
    return lambda x: (torch.func.grad(function)(x) * v).sum()
