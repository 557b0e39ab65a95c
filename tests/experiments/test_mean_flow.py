"""MeanFlow beside flow matching: losses, samplers, table, runs end to end, resume, bad input."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.mean_flow.experiment import INSTANT, MEAN, MeanFlow
from experiments.mean_flow.velocity import Velocity
from tests.experiments.command import COMMAND_LINE, smoke
from tests.oracles import relative

SMOKE, fit, folder = smoke("flow/meanflow")
pytestmark = COMMAND_LINE
F64 = torch.float64


@pytest.fixture
def model():
    torch.manual_seed(0)
    return MeanFlow(width=8, layers=1, heads=2, frequencies=3, power=0.7).double()


@pytest.fixture
def drawn(model):
    torch.manual_seed(1)
    x, e = torch.randn(2, 6, 2, dtype=F64)
    return x, e, *(part.double() for part in model.draw_times(6))


def test_the_target_of_meanflow_by_differences(model, drawn):
    """The loss and its gradient, with du/dt along the line between a point and its noise."""
    x, e, r, t = drawn
    network, h = model.networks[MEAN], 1e-5

    def u(t):
        return network((1 - t) * x + t * e, r, t)

    with torch.no_grad():
        target = e - x - (t - r) * (u(t + h) - u(t - h)) / (2 * h)
        weight = ((u(t) - target).square().sum(1) + 1e-2) ** -0.7
    expected = (weight * (u(t) - target).square().sum(1)).mean()
    (loss,) = model.meanflow_terms(*drawn)
    assert_close(loss, expected, rtol=1e-8, atol=0)
    parameters = [*network.parameters()]
    ours, theirs = (torch.autograd.grad(y, parameters) for y in (loss, expected))
    assert relative(ours, theirs) < 1e-7
    assert (t > r).any()
    assert (t == r).any()


def test_without_an_interval_meanflow_is_flow_matching(model, drawn):
    x, e, _, t = drawn
    model.power = 0.0
    assert_close(model.meanflow_terms(x, e, t, t), model.flow_matching_terms(x, e, t, t))
    (loss,) = model.flow_matching_terms(x, e, torch.zeros_like(t), t)
    u = model.networks[INSTANT]((1 - t) * x + t * e, t, t)
    assert_close(loss, ((u - e + x) ** 2).sum() / 6)


def test_times_are_ordered_and_equal_for_a_share():
    r, t = MeanFlow(width=4, instant=0.3).draw_times(4000)
    assert (r <= t).all()
    assert (r == t).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert t.mean().item() == pytest.approx(2 / 3, abs=0.02)


class Straight(nn.Module):
    """The velocities of one point x = 1 along straight lines, z = 1 + t (e - 1): u = (z - 1) / t."""

    def forward(self, z, r, t):
        self.last = r, t
        return (z - 1) / t


@pytest.mark.parametrize("steps", [1, 4])
def test_samplers_follow_the_velocity(model, steps):
    e = torch.randn(5, 2, dtype=F64)
    for name in (MEAN, INSTANT):
        model.networks[name] = straight = Straight()
        assert_close(model.sample(name, e, steps), torch.ones_like(e))
        r, t = straight.last
        assert_close(t, torch.full_like(t, 1 / steps))
        assert_close(r, t if name == INSTANT else torch.zeros_like(t))


def test_attention_sees_all_tokens(model):
    z = torch.randn(3, 2, dtype=F64, requires_grad=True)
    r, t = (torch.rand(3, 1, dtype=F64, requires_grad=True) for _ in range(2))
    for component in (0, 1):
        grads = torch.autograd.grad(model.networks[MEAN](z, r, t)[:, component].sum(), (z, r, t))
        assert all((g != 0).all() for g in grads)


def test_features_have_the_frequencies_that_they_say():
    network = Velocity(4, 1, 2, 3)
    assert_close(network.frequency, torch.tensor([0.25, 0.5, 1.0]) * torch.pi)
