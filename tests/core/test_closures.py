"""What a callable holds that is no argument of it is refused by name."""

import pytest
import torch
from torch import nn

from hoglib._core.closures import refuse, refuse_hidden

WEIGHT = torch.ones(3)


def test_a_method_that_is_called_is_searched() -> None:
    """A tensor that a helper object reads as a global gets no gradient either."""

    class Scale:
        def times(self, x: torch.Tensor) -> torch.Tensor:
            return x * WEIGHT

    scale = Scale()
    with pytest.raises(ValueError, match=r"closes over `scale\.times`, which reads the global"):
        refuse("remat", lambda x: scale.times(x))
    assert refuse("remat", lambda x: x if scale else -x) == []


def test_unregistered_parameters_of_a_module() -> None:
    layer = nn.Linear(3, 3)
    layer.parts = [nn.Linear(3, 3)]  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"holds `parts\[0\]` .*unregistered"):
        refuse_hidden("remat", layer)
    layer.parts = [torch.ones(3), layer.weight]  # type: ignore[assignment]
    refuse_hidden("remat", layer)
