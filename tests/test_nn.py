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
    "Linear": (
        lambda: hog.nn.Linear(2, 4), lambda: nn.Linear(2, 4),
        "Linear(in_features=2, out_features=4, bias=True)",
    ),
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


@pytest.mark.parametrize("name", MODULES)
def test_copies_and_loads(name):
    module = MODULES[name][0]()
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


LOSSES = {
    "SmoothL1Loss": (hog.nn.SmoothL1Loss, nn.SmoothL1Loss, lambda: (torch.randn(4, 3), torch.randn(4, 3)), {"beta": 0.5}),
    "CrossEntropyLoss": (
        hog.nn.CrossEntropyLoss, nn.CrossEntropyLoss, lambda: (torch.randn(4, 3), torch.tensor([0, 2, 1, -100])),
        {"label_smoothing": 0.1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_torch(name, reduction):
    ours, theirs, inputs, options = LOSSES[name]
    outputs, targets = inputs()
    assert_close(
        ours(reduction=reduction, **options)(outputs, targets),
        theirs(reduction=reduction, **options)(outputs, targets),
    )
    assert f"reduction={reduction!r}" in repr(ours(reduction=reduction))
    with pytest.raises(ValueError, match="one of mean, sum, none"):
        ours(reduction="total")


def test_logsumexp_pools():
    values = torch.randn(2, 3, 4)
    assert_close(hog.nn.LogSumExp()(values), values.logsumexp(-1))
    assert_close(
        hog.nn.LogSumExp([0, 2], keepdim=True)(values), values.logsumexp((0, 2), keepdim=True)
    )
    assert repr(hog.nn.LogSumExp([0, 2])) == "LogSumExp(dim=(0, 2), keepdim=False)"


GRADIENTS = {
    "StraightThrough": (
        lambda: hog.nn.StraightThrough("round"),
        torch.round,
        1.0,
        "StraightThrough(kind='round')",
    ),
    "ScaleGradient": (
        lambda: hog.nn.ScaleGradient(0.5),
        torch.clone,
        0.5,
        "ScaleGradient(scale=0.5)",
    ),
    "GradientReversal": (
        lambda: hog.nn.GradientReversal(2.0),
        torch.clone,
        -2.0,
        "GradientReversal(scale=2.0)",
    ),
    "ClipGradient": (
        lambda: hog.nn.ClipGradient(0.25),
        torch.clone,
        0.25,
        "ClipGradient(bound=0.25)",
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_surrogate_gradients(name):
    make, value, slope, text = GRADIENTS[name]
    module, given = make(), torch.randn(5, requires_grad=True)
    output = module(given)
    assert_close(output, value(given))
    output.sum().backward()
    assert_close(given.grad, torch.full((5,), slope))
    assert repr(module) == text


def test_remat_is_its_module():
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    wrapped = hog.nn.Remat(module)
    assert_close(wrapped(x), module(x))
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    grads = torch.autograd.grad(
        wrapped(x).square().sum(), list(wrapped.parameters()), create_graph=True
    )
    assert_close(grads, torch.autograd.grad(module(x).square().sum(), list(module.parameters())))
    assert torch.autograd.grad(grads[0].sum(), wrapped.module[2].weight)[0].abs().sum() > 0


def test_errors():
    with pytest.raises(ValueError, match="one of relu, tanh"):
        hog.nn.LinearAct(2, 3, act="gelu")
    with pytest.raises(ValueError, match="num_parameters"):
        hog.nn.Swish(0)
