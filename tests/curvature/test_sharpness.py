"""Critical sharpness: closed forms of quadratic losses, what is not found, and errors."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NondeterministicError,
    NonFiniteError,
)
from tests.curvature.problems import F64, draw
from tests.refused import refused
from tests.rows import rows
from tests.unchanged import unchanged

VALUES = torch.tensor([0.1, 1.0, 7.0, 30.0], dtype=F64)
Q = torch.linalg.qr(draw(4, 4))[0]
H = Q @ VALUES.diag() @ Q.T
P, D = draw(4, seed=1), H @ draw(4, seed=1) + 0.1 * draw(4, seed=2)


def quadratic(p, shift):
    return p @ H @ p / 2 + (0.0 if shift is None else shift.sum())


@rows("shift", [None, torch.tensor([5.0]), torch.tensor([-3.0]), torch.tensor([1e3])])
def test_quadratic_losses(shift):
    for i, value in enumerate(VALUES.tolist()):
        found = hog.critical_sharpness(quadratic, 1.7 * Q[:, i], shift)
        assert found.value == pytest.approx(value, rel=0.025)
        assert found.found and found.passes < 10  # noqa: PT018
    for d, step in product((H @ P, D), (None, 1e-3, 1e3)):
        exact = float(d @ H @ d / (d @ H @ P))
        found = hog.critical_sharpness(quadratic, P, shift, direction=d, step=step, tol=1e-6, max_passes=40)  # fmt: skip
        assert found.value == pytest.approx(exact, rel=1e-6)


def test_networks_and_the_edge_of_stability():
    """A step of less lowers the loss, one of more raises it; of batches as of one; nothing is changed.
    After long training by gradient descent it is the largest eigenvalue, and 2 / lr."""
    torch.manual_seed(0)
    x, lr = draw(32, 4), 0.3
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    batch = x, torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    with unchanged(model):
        found = hog.critical_sharpness(loss, params, batch, tol=1e-3)
        parts = [tuple(t[:3] for t in batch), tuple(t[3:] for t in batch)]
        assert hog.critical_sharpness(loss, params, parts, tol=1e-3).value == pytest.approx(
            found.value
        )
    optimizer, at = torch.optim.SGD(model.parameters(), lr=lr), []
    g = torch.autograd.grad(loss(params, batch), list(params.values()))
    for s in (0, *torch.linspace(0.05, 0.998, 20).tolist(), 1.002):
        moved = {k: p - s * found.step * d for (k, p), d in zip(params.items(), g, strict=True)}
        at.append(float(loss(moved, batch).detach()))
    assert max(at[1:-1]) < at[0] < at[-1]
    for _ in range(1500):
        optimizer.zero_grad()
        loss(params, batch).backward()
        optimizer.step()
    found = hog.critical_sharpness(loss, params, batch, step=lr)
    largest = float(hog.HessianOperator(loss, params, batch).eigsh(1, which="LA").values[0])
    assert (lr * largest, lr * found.value) == (
        pytest.approx(2, rel=0.1),
        pytest.approx(2, rel=0.1),
    )
    assert found.passes < 10


@rows(("function", "start", "step"), [(torch.sum, 1.0, None), (lambda p: -p.square().sum(), 1.0, None), (lambda p: 1e9 + p.square().sum(), 1e-3, None), (lambda p: (p + 3).sqrt().sum(), 1.0, 16)], ids=["linear", "concave", "lost in rounding", "roots of negative numbers"])  # fmt: skip
def test_what_is_not_found_is_no_number(function, start, step):
    found = hog.critical_sharpness(
        lambda p, _: function(p), torch.full((3,), start, dtype=F64), None
    )
    assert found.found == (step is not None)
    assert found.step == pytest.approx(step, rel=0.025) if step else math.isnan(found.value)


NOISY = hog.functional_loss(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), F.mse_loss)
sharpness = lambda p=P, **options: lambda: hog.critical_sharpness(quadratic, p, None, **options)  # noqa: E731
test_errors = refused(
    {
        "upward": (sharpness(direction=-H @ P), ArgumentValueError, r"got g\^T d = -"),
        "zero": (sharpness(direction=0 * P), ArgumentValueError, r"got g\^T d = 0"),
        "stationary": (sharpness(0 * P), ArgumentValueError, "take `HessianOperator.eigsh`"),
        "NaN": (sharpness(direction=P * torch.nan), NonFiniteError, "direction: expected finite"),
        "NaN in params": (sharpness(P * torch.nan), NonFiniteError, "loss: expected a finite number"),
        "a block": (sharpness(direction=Q), ArgumentValueError, "got a block of 4"),
        "another shape": (sharpness(direction=P[:2]), ArgumentValueError, "direction: expected"),
        "a step of 0": (sharpness(step=0), ArgumentValueError, "step: expected"),
        "a tolerance of 1": (sharpness(tol=1), ArgumentValueError, "tol: expected"),
        "two passes": (sharpness(max_passes=2), ArgumentValueError, "max_passes: expected"),
        "an option": (sharpness(modes=1), ArgumentTypeError, "expected options"),
        "dropout": (lambda: hog.critical_sharpness(NOISY, hog.trainable_params(NOISY.model), (torch.randn(6, 3), torch.randn(6, 4))), NondeterministicError, "Dropout"),
    },
    by=hog.errors.HoglibError,
)  # fmt: skip
