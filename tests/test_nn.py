"""The modules: torch's names, reprs and state dicts around hoglib's ops."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hoglib as hog

x = torch.randn(3, 2)
MODULES = {
    "Tanh": (hog.nn.Tanh, nn.Tanh, "Tanh()"),
    "Sigmoid": (hog.nn.Sigmoid, nn.Sigmoid, "Sigmoid()"),
    "Swish": (hog.nn.Swish, nn.SiLU, "Swish(num_parameters=1)"),
    "Linear": (lambda: hog.nn.Linear(2, 4), lambda: nn.Linear(2, 4), "Linear(in_features=2, out_features=4, bias=True)"),
    "LinearAct": (
        lambda: hog.nn.LinearAct(2, 4, bias=False, act="relu"),
        lambda: nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU()),
        "LinearAct(in_features=2, out_features=4, bias=False, act='relu')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_is_the_torch_module_of_the_same_seed(name):
    ours, theirs, text = MODULES[name]
    torch.manual_seed(3)
    module = ours()
    torch.manual_seed(3)
    assert_close(module(x), theirs()(x))
    assert repr(module) == text
    other = copy.deepcopy(module)
    other.load_state_dict(module.state_dict())
    assert_close(module(x), other(x))


def test_linear_loads_the_state_of_torch_linear():
    source = nn.Linear(2, 4)
    module = hog.nn.LinearAct(2, 4, act="tanh")
    module.load_state_dict(source.state_dict())
    assert_close(module(x), torch.tanh(source(x)))


def test_swish_learns_its_slopes():
    module = hog.nn.Swish(2, beta=0.5)
    module(x).square().sum().backward()
    assert module.beta.grad.shape == (2,)
    assert (module.beta.grad != 0).all()


def test_a_fixed_slope_is_a_buffer():
    module = hog.nn.Swish(beta=2.0, learnable=False)
    assert list(module.parameters()) == []
    assert list(module.state_dict()) == ["beta"]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_that_of_torch(reduction):
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 2, 1, -100])
    options = {"reduction": reduction, "label_smoothing": 0.1}
    module = hog.nn.CrossEntropyLoss(**options)
    assert_close(module(outputs, targets), nn.CrossEntropyLoss(**options)(outputs, targets))
    assert f"reduction={reduction!r}" in repr(module)
    with pytest.raises(ValueError, match="one of mean, sum, none"):
        hog.nn.CrossEntropyLoss(reduction="total")


def test_remat_is_its_module():
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    wrapped = hog.nn.Remat(module)
    assert_close(wrapped(x), module(x))
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    wrapped(x).square().sum().backward()
    assert module[2].weight.grad.any()


def test_errors():
    with pytest.raises(ValueError, match="one of relu, tanh"):
        hog.nn.LinearAct(2, 3, act="gelu")
    with pytest.raises(ValueError, match="num_parameters"):
        hog.nn.Swish(0)
