"""The fingerprint of the state that a loss depends on."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib._core.fingerprint import sums_and_norms


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
