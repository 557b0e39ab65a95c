"""What a callable reaches: one traversal, seen with each scope."""

import pytest
import torch
from torch import nn

from hoglib._core.messages.closures import (
    ALL,
    HELD,
    READ,
    ClosureWalker,
    Scope,
    refuse,
    refuse_hidden,
)

WEIGHT = torch.ones(3)


class Model:
    """Reads one of its two tensors; the other one by a name that is made at run time."""

    factor = torch.ones(3)

    def __init__(self) -> None:
        self.weight, self.unread_1 = torch.ones(3), torch.ones(3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) * self.weight + getattr(self, f"unread_{len(x.shape)}")

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor * WEIGHT


def reaches(root: object, value: object, scope: Scope) -> bool:
    return id(value) in ClosureWalker(root, scope).places


def test_attributes_are_followed_if_code_reads_them() -> None:
    model = Model()
    assert reaches(model.loss, model.weight, READ)
    assert reaches(model.loss, Model.factor, READ)
    assert reaches(model.loss, WEIGHT, READ)
    assert not reaches(model.loss, model.unread_1, READ)
    assert reaches(model.loss, model.unread_1, HELD)
    assert reaches(model.loss, model.unread_1, ALL)


def test_modules_are_entered_for_guards_only() -> None:
    layer = nn.Linear(3, 3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    assert reaches(loss, layer.weight, READ)
    assert reaches(loss, layer, HELD)
    assert not reaches(loss, layer.weight, HELD)


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
