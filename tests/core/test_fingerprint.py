"""The fingerprint of the state that a loss depends on."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib._core.substrate.fingerprint import ComparedState, StateFingerprint, sums_and_norms
from hoglib.errors import NondeterministicError


class Reads(TorchFunctionMode):
    """Counts the calls that read tensors: each makes the program wait for a GPU."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.count += name in ("to", "cpu", "tolist", "item", "__float__")
        return func(*args, **(kwargs or {}))


def test_sums_in_the_order_of_the_tensors_then_norms() -> None:
    tensors = [
        torch.tensor([3.0, -4.0]),
        torch.tensor([2, 5]),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([3 + 4j]),
        torch.tensor([6.0, 8.0]),
        torch.tensor([True, True]),
    ]
    expected = [-1, 7, 3, 7, 14, 2, 5, 5**0.5, 5, 10]
    assert sums_and_norms(tensors).read() == pytest.approx(expected)
    assert sums_and_norms([]).read() == []


@pytest.mark.parametrize("count", [2, 40])
def test_values_are_read_once_for_each_dtype(count: int) -> None:
    tensors: list[Tensor] = [torch.ones(3), torch.ones(3, dtype=torch.int64)] * count
    with Reads() as reads:
        sums_and_norms(tensors).read()
    assert reads.count == 2  # one list for float32, and for int64


def state_of(p: Tensor) -> ComparedState:
    return ComparedState("Pass", StateFingerprint(lambda: p, lambda: [p], list))


def nothing() -> None:
    """What to do while a device computes."""


def test_a_state_is_compared_from_pass_to_pass() -> None:
    p, waited = torch.ones(3), list[int]()
    state = state_of(p)

    def changed() -> bool:
        return state.changed(lambda: waited.append(0))

    assert changed()  # nothing was seen yet
    state.note()
    assert not changed()
    p.mul_(2)
    assert changed()
    assert not changed()
    p.data.mul_(2)
    assert changed()
    p.mul_(2)
    state.note()  # such as a counter of calls
    assert not changed()
    assert len(waited) == 6
    assert not state.may_skip()  # no algorithm runs


def test_an_algorithm_needs_a_constant_state() -> None:
    p = torch.ones(3)
    state = state_of(p)
    with state.during("solve"):
        assert not state.may_skip()  # before the first pass
        assert state.changed(nothing)
        assert [state.may_skip() for _ in range(8)] == [True] * 7 + [False]
        assert not state.changed(nothing)
        assert state.may_skip()
        state.check()
        p.data.mul_(2)
        assert not state.changed(nothing)  # pointers and versions are the same
        with pytest.raises(
            NondeterministicError, match=r"^Pass\.solve: expected parameters, buffers"
        ):
            state.check()
        p.add_(1)
        with pytest.raises(NondeterministicError, match=r"^Pass\.solve"):
            state.changed(nothing)
    state.check()  # no algorithm runs
    assert state.changed(nothing)
