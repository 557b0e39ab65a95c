"""What an exhibit of the zoo is: one mistake, and the same Function without it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class Exhibit(NamedTuple):
    """A mistake that people make in a Function, and the right Function beside it."""

    name: str  # the mistake in words
    wrong: type[Function]  # has this mistake and no other
    right: type[Function]  # the same function of the same inputs
    inputs: Callable[[], tuple[Tensor, ...]]  # drawn from torch's generator, which the caller seeds
    says: tuple[str, ...]  # all occur, in lower case, in one row of the report of the wrong one
    verdict: str = "fail"  # or "warn": the status of that row
    options: Mapping[str, Any] = MappingProxyType({})  # keyword arguments for verify


def normal(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Inputs of these shapes, standard normal."""
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def positive(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Inputs of these shapes, uniform in [1/2, 3/2]."""
    return lambda: tuple(0.5 + torch.rand(shape) for shape in shapes)
