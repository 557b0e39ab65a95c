"""What the tests of many ops check: derivatives in every mode, and in every mix of modes."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import hoglib as hog

MODES = ("rr", "fr", "rf", "ff")
Scalar = Callable[[Tensor], Tensor]


def right_in_every_mode(
    function: Callable[..., Any], *inputs: Any, orders: tuple[int, ...] = (1, 2, 3)
) -> None:
    """Finite differences agree with the derivatives in each mode, to third order."""
    hog.verify(function, inputs, orders=orders, modes=MODES).raise_if_failed()


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
