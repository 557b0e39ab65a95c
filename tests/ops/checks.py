"""What the tests of many ops share: derivatives in every mode and mix of modes, and the stand-ins."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hoglib.stand_ins.table import STAND_INS

MODES = ("rr", "fr", "rf", "ff")
Scalar = Callable[[Tensor], Tensor]
REPLACES = {theirs: ours for row in STAND_INS for theirs, ours in row.replaces.items()}


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
