"""MeanFlow beside flow matching: losses, samplers, table, runs end to end, resume, bad input."""

import json

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.mean_flow import INSTANT, MEAN, SAMPLERS, MeanFlow
from experiments.models.velocity import Velocity
from experiments.tables.flows import Scores, flows_table
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    checkpoint,
    metrics,
    smoke,
)
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
    torch.manual_seed(0)
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


def test_attention_sees_all_tokens_and_both_networks_start_alike(model):
    ours, theirs = model.networks.values()
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    z = torch.randn(3, 2, dtype=F64, requires_grad=True)
    r, t = (torch.rand(3, 1, dtype=F64, requires_grad=True) for _ in range(2))
    for component in (0, 1):
        grads = torch.autograd.grad(ours(z, r, t)[:, component].sum(), (z, r, t))
        assert all((g != 0).all() for g in grads)


@DRAWN
def test_the_table_and_the_curves_agree(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    rows = metrics(folder())
    assert [int(row["step"]) for row in rows if row["train/meanflow"]] == [4, 9, 14, 19]
    assert len([row for row in rows if row["val/MeanFlow, 1 step"]]) == 2
    summary = json.loads((folder() / "summary.json").read_text())
    assert [*summary] == [*SAMPLERS, "real points"]
    for label in SAMPLERS:
        (line,) = [x for x in table.splitlines() if x.startswith(f"{label}  ")]
        assert float(rows[-1][f"test/distance/{label}"]) == pytest.approx(
            summary[label]["distance"]
        )
        assert f"{summary[label]['distance']:.3f}" in line


def test_one_step_of_meanflow_learns_what_one_of_flow_matching_cannot():
    fit("--model.width", "16", "--data.iterations", "150", "--trainer.val_check_interval", "150")
    last = metrics(folder())[-1]
    distance = {label: float(last[f"test/distance/{label}"]) for label in SAMPLERS}
    assert distance["MeanFlow, 1 step"] < 0.7 * distance["flow matching, 1 step"]


def test_as_graphs_the_run_is_the_same():
    for compile in ("false", "eager"):
        fit("--model.compile", compile, "--test_after_fit", "false")
    plain, graphs = (checkpoint(folder(v))["state_dict"] for v in (0, 1))
    assert_close(graphs, plain, rtol=1e-4, atol=1e-5)


def test_the_table():
    rows = {"a": Scores(24, 0.915, 0.5, 0.1234), "real points": Scores(25, 0.99, 0.8, 0.1)}
    lines = flows_table(rows, "25 Gaussians", "modes", 7).splitlines()
    assert lines[0] == "7 generated points beside as many real ones: 25 Gaussians"
    assert lines[4].split() == ["a", "24", "0.50", "91.5%", "0.123"]
    assert lines[5].split() == ["real", "points", "25", "0.80", "99.0%", "0.100"]


def test_features_have_the_frequencies_that_they_say():
    network = Velocity(4, 1, 2, 3)
    assert_close(network.frequency, torch.tensor([0.25, 0.5, 1.0]) * torch.pi)
