"""Warnings of functions that are piecewise linear, and of points where a derivative does not exist."""

import warnings

import pytest
import torch
from torch import nn

import hoglib as hog
from tests.rows import rows

SMALL, WIDE = (7, 2), (7, 8)  # whose Laplacians are nested, and collapsed


def points(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def mlp(coordinates, activation):
    net = nn.Sequential(nn.Linear(coordinates, 9), activation, nn.Linear(9, 1))
    return net.double()


def told(run):
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in found]


PIECEWISE = {
    "ReLU": nn.ReLU(),
    "ReLU in place": nn.ReLU(inplace=True),
    "LeakyReLU": nn.LeakyReLU(),
    "PReLU": nn.PReLU(),
    "Hardtanh": nn.Hardtanh(),
}
CALLS = {
    "laplacian": hog.laplacian,
    "laplacian by projections": lambda f, x: hog.laplacian(f, x, num_projections=2),
    "bilaplacian": hog.bilaplacian,
    "directional": lambda f, x: hog.directional(f, x, torch.ones_like(x), 3),
    "partial_derivative": lambda f, x: hog.partial_derivative(f, x, index=(0, 1)),
    "jet": lambda f, x: hog.jet(f, x, [torch.ones_like(x), None]),
}


@rows("shape", [SMALL, WIDE], ids=["2 coordinates", "8 coordinates"])
@rows("activation", PIECEWISE)
@rows("call", CALLS)
def test_a_piecewise_linear_network_is_told_once_by_its_activations(call, activation, shape):
    net, x = mlp(shape[1], PIECEWISE[activation]), points(*shape)
    (message,) = told(lambda: [CALLS[call](net, x) for _ in range(2)])
    for part in ("piecewise linear", "tanh", activation.split()[0], "test_kinks.py"):
        assert part in message


WRITTEN = {
    "product with a comparison": lambda x: x * (x > 0),
    "product with a comparison as numbers": lambda x: x * (x > 0).to(x.dtype),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "clamp": lambda x: x.clamp(min=0),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "amax": lambda x: x.amax(1, keepdim=True),
    "abs": torch.abs,
}


@rows("name", WRITTEN)
def test_what_is_written_by_hand_is_told(name):
    (message,) = told(
        lambda: hog.laplacian(lambda x: WRITTEN[name](x @ x.new_ones(8, 3)).sum(1), points(7, 8))
    )
    assert "piecewise linear" in message
    assert name.split()[0].lower() in message.replace("mul", "product")


LEGITIMATE = {
    "linear": lambda x: x.sum(1),
    "linear, checked for NaN": lambda x: torch.where(x.isnan(), 0.0, x).sum(1),
    "square of a ReLU": lambda x: x.relu().square().sum(1),
    "a ReLU as a mask of a smooth function": lambda x: (x.tanh() * (x.relu() + 1)).sum(1),
    "clamped for safety": lambda x: x.tanh().clamp(-0.99, 0.99).sum(1),
    "softmax": lambda x: x.softmax(1).sum(1),
    "harmonic": lambda x: x[:, 0].square() - x[:, 1].square(),
    "polynomial of degree 2": lambda x: x.square().sum(1),
    "attention scores": lambda x: (x[:, :, None] * x[:, None]).relu().sum((1, 2)),
}


@rows("shape", [SMALL, WIDE], ids=["2 coordinates", "8 coordinates"])
@rows("call", CALLS)
@rows("name", LEGITIMATE)
def test_a_zero_for_other_reasons_is_not_told(name, call, shape):
    assert told(lambda: CALLS[call](LEGITIMATE[name], points(*shape))) == []


def test_first_derivatives_are_not_told():
    net, x = mlp(2, nn.ReLU()), points(7, 2)
    assert told(lambda: hog.directional(net, x, torch.ones_like(x), 1)) == []
    assert told(lambda: hog.jet(net, torch.zeros_like(x), [torch.ones_like(x)])) == []


# Whether the result at 0 is the derivative of f(t) + t^2, of order 2 and of order 3.
AT_ZERO = {
    "relu": (torch.relu, False, False),
    "abs": (torch.abs, False, False),
    "leaky_relu": (torch.nn.functional.leaky_relu, False, False),
    "clamp": (lambda x: x.clamp(min=0), False, False),
    "maximum": (lambda x: torch.maximum(x, -x), False, False),
    "minimum": (lambda x: torch.minimum(x, 2 * x), False, False),
    "norm": (lambda x: torch.linalg.vector_norm(torch.stack([x, 2 * x])), False, False),
    "relu squared": (lambda x: x.relu() ** 2, False, False),
    "relu to the third": (lambda x: x.relu() ** 3, True, False),
    "relu to the fourth": (lambda x: x.relu() ** 4, True, True),
    "maximum of equal slopes": (lambda x: torch.maximum(x.sin(), x), True, False),
    "maximum of one value": (lambda x: torch.maximum(x, x), True, True),
    "relu of what stays": (lambda x: (0 * x).relu(), True, True),
    "tanh of abs squared": (lambda x: x.abs().square().tanh(), True, True),
    "smooth": (torch.sin, True, True),
}


@rows("order", [2, 3])
@rows("name", AT_ZERO)
def test_a_derivative_that_does_not_exist_at_a_kink_is_told(name, order):
    func, *right = AT_ZERO[name]
    one = torch.tensor(1.0, dtype=torch.float64)
    messages = told(
        lambda: hog.jet(lambda x: func(x) + x**2, one * 0, [one, *[None] * (order - 1)])
    )
    assert ["exactly at a kink" in m for m in messages] == [True] * (not right[order - 2])
    assert told(lambda: hog.jet(lambda x: func(x) + x**2, one, [one, *[None] * (order - 1)])) == []


CUTOFF = lambda x: (1 - x.square().sum(1)).relu() ** 3  # noqa: E731
AT_THE_RIM = {
    "laplacian": (lambda x: hog.laplacian(CUTOFF, x), True),
    "bilaplacian": (lambda x: hog.bilaplacian(CUTOFF, x), False),
    "partial_derivative, order 2": (lambda x: hog.partial_derivative(CUTOFF, x, index=(0, 1)), True),
    "partial_derivative, order 3": (lambda x: hog.partial_derivative(CUTOFF, x, index=(0, 0, 0)), False),
    "directional, order 3": (lambda x: hog.directional(CUTOFF, x, x, 3), False),
}  # fmt: skip


@rows("name", AT_THE_RIM)
def test_a_smooth_cutoff_is_told_from_the_order_on_that_it_lacks(name):
    run, exists = AT_THE_RIM[name]
    messages = told(lambda: run(torch.eye(6, dtype=torch.float64)))
    assert ["exactly at a kink" in m for m in messages] == [True] * (not exists)


INFINITE = {
    "sqrt": (torch.sqrt, "sqrt"),
    "power": (lambda x: x**1.5, "pow"),
    "quotient": (lambda x: (x**3).sin().sqrt(), "sqrt"),
    "product of a root": (lambda x: x * x.sqrt(), "sqrt"),
}


@rows("name", INFINITE)
def test_an_infinite_derivative_is_told_by_its_operation(name):
    func, operation = INFINITE[name]
    x = torch.zeros(3, 8, dtype=torch.float64)
    for run in (
        lambda: hog.laplacian(lambda x: func(x).sum(1), x),
        lambda: hog.laplacian(lambda x: func(x).sum(1), x, mode="nested"),
        lambda: hog.jet(lambda x: func(x).sum(), x, [torch.ones_like(x), None], mode="nested"),
    ):
        (message,) = told(run)
        assert "infinite or NaN" in message
        assert f"first behind {operation} at" in message.lower()
    assert told(lambda: hog.laplacian(lambda x: func(x).sum(1), x + 1)) == []
    # Of a value that is NaN
    assert told(lambda: hog.laplacian(lambda x: func(x).sum(1), x / 0)) == []


def test_the_result_stays_that_of_torchs_first_derivative():
    x = torch.zeros(3, 8, dtype=torch.float64)
    with pytest.warns(UserWarning, match="exactly at a kink"):
        _, lap = hog.laplacian(lambda x: (x.abs() + x.square()).sum(1), x)
    assert lap.tolist() == [16.0] * 3
