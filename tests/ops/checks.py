"""What the tests of many ops share: values and errors beside torch's own, derivatives in every mix of modes, and
the stand-ins."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hoglib.stand_ins.table import STAND_INS
from tests.rows import rows

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


def value_and_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """Of a weighted sum of the values, whose weights are positive, as torch's segment_reduce needs them."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape).sin() + 1.5
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]


def same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Values and first gradients are those of torch."""
    pair = (value_and_gradients(function, *tensors) for function in (ours, theirs))
    assert_close(*pair, equal_nan=True)


def refused_as_by_torch(
    ours: Callable[..., Any], theirs: Callable[..., Any], table: Mapping[str, Any], words: str = ""
) -> Callable[..., None]:
    """A test that wrong arguments raise an error of the type of torch's, with words.

    table: The positional arguments; with a string or a dict beside them, words that both messages have,
    or keyword arguments.
    """

    @rows("name", table)
    def test(name: str) -> None:
        given, more = row if is_pair(row := table[name]) else (row, {})
        own, options = (more, {}) if isinstance(more, str) else (None, more)
        with pytest.raises(Exception, match=own) as raised:
            theirs(*given, **options)
        with pytest.raises(type(raised.value), match=own or words):
            ours(*given, **options)

    return test


def is_pair(row: Any) -> bool:
    return len(row) == 2 and isinstance(row[0], tuple) and isinstance(row[1], str | dict)
