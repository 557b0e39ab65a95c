"""Critical sharpness: closed forms of quadratic losses, what is not found, and errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from tests.curvature.problems import F64, draw
from tests.rows import rows
from tests.unchanged import unchanged

VALUES = torch.tensor([0.1, 1.0, 7.0, 30.0], dtype=F64)
Q = torch.linalg.qr(draw(4, 4))[0]
H = Q @ VALUES.diag() @ Q.T
P, D = draw(4, seed=1), H @ draw(4, seed=1) + 0.1 * draw(4, seed=2)
sharpness = hog.critical_sharpness


def quadratic(p, shift):
    return p @ H @ p / 2 + (0.0 if shift is None else shift.sum())


@rows("shift", [None, torch.tensor([5.0]), torch.tensor([-3.0]), torch.tensor([1e3])])
def test_quadratic_losses(shift):
    for i, value in enumerate(VALUES.tolist()):
        found = sharpness(quadratic, 1.7 * Q[:, i], shift)
        assert found.value == pytest.approx(value, rel=0.025)
        assert found.passes < 10
    for d in (H @ P, D):
        exact = pytest.approx(float(d @ H @ d / (d @ H @ P)), rel=1e-6)
        for step in (None, 1e-3, 1e3):
            options = {"direction": d, "step": step, "tol": 1e-6, "max_passes": 40}
            assert sharpness(quadratic, P, shift, **options).value == exact


def test_networks_and_the_edge_of_stability():
    """Of batches as of one, and nothing is changed; after long training by gradient descent it is the
    largest eigenvalue, and 2 / lr."""
    x, two = draw(32, 4), pytest.approx(2, rel=0.1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    batch = x, torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    with unchanged(model):
        found = sharpness(loss, params, batch, tol=1e-3)
        halves = [[t[:3] for t in batch], [t[3:] for t in batch]]
        several = sharpness(loss, params, halves, tol=1e-3)
    assert several.value == pytest.approx(found.value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(1500):
        optimizer.zero_grad()
        loss(params, batch).backward()
        optimizer.step()
    largest = hog.HessianOperator(loss, params, batch).eigsh(1, which="LA").values
    critical = sharpness(loss, params, batch, step=0.3).value
    assert (0.3 * float(largest), 0.3 * critical) == (two, two)


OTHERS = {"linear": (torch.sum, 1.0), "concave": (lambda p: -p.square().sum(), 1.0), "lost in rounding": (lambda p: 1e9 + p.square().sum(), 1e-3)}  # fmt: skip


@rows("name", OTHERS)
def test_what_is_not_found_is_no_number(name):
    function, start = OTHERS[name]
    found = sharpness(lambda p, _: function(p), torch.full((3,), start, dtype=F64), None)
    assert (found.found, math.isnan(found.value)) == (False, True)
    flat = lambda p, _: (p - 2 * p.log()).sum()  # noqa: E731
    flattens = sharpness(flat, torch.tensor([5.0, 0.1]).double(), None)
    assert (flattens.found, flattens.step) == (True, pytest.approx(0.48668, rel=0.05))
    steep = lambda p, _: (torch.exp(300 * p) - p).sum()  # noqa: E731
    for step in (None, 1e-6, 0.1, 1.0, 100.0):  # the edge is where the line has risen by exp(15)
        edge = sharpness(steep, torch.tensor([0.05]).double(), None, step=step)
        assert (edge.found, edge.step) == (True, pytest.approx(1 / 300, rel=0.05))
    into_nan = sharpness(lambda p, _: (p + 3).sqrt().sum(), torch.ones(3, dtype=F64), None)
    assert into_nan.step == pytest.approx(16, rel=0.025)


NOISY = hog.functional_loss(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), F.mse_loss)
ERRORS = [
    (P, {"direction": -H @ P}, r"got g\^T d = -"), (P, {"direction": 0 * P}, r"got g\^T d = 0"),
    (0 * P, {}, "take `HessianOperator.eigsh`"), (P * torch.nan, {}, "loss: expected a finite number"),
    (P, {"direction": P * torch.nan}, "direction: expected finite"),
    (P, {"direction": Q}, "got a block of 4"), (P, {"direction": P[:2]}, "direction: expected"),
    (P, {"step": 0}, "step: expected"), (P, {"tol": 1}, "tol: expected"),
    (P, {"max_passes": 2}, "max_passes: expected"), (P, {"modes": 1}, "expected options"),
]  # fmt: skip


@rows(("p", "options", "words"), ERRORS)
def test_errors(p, options, words):
    with pytest.raises(hog.errors.HoglibError, match=words):
        sharpness(quadratic, p, None, **options)
    with pytest.raises(hog.errors.NondeterministicError, match="Dropout"):
        sharpness(NOISY, hog.trainable_params(NOISY.model), (torch.randn(6, 3), torch.randn(6, 4)))
