"""The GAN experiment: runs end to end, resume, table of several runs, metrics, bad input."""

import json
import math

import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from experiments import runs
from experiments.gan.adversarial import describe_penalty, relativistic_loss, wasserstein_loss
from experiments.gan.experiment import GAN
from experiments.shared.mixture import gaussians, sample_points, swiss_roll
from experiments.shared.quality import score_points, wasserstein_distance
from tests.experiments.command import COMMAND_LINE, smoke

SMOKE, fit, folder = smoke("gan/mixture")
WGAN = (
    "--model.penalty.kind", "wgan_gp", "--model.penalty.weight", "1",
    "--model.loss", "wasserstein", "--model.critic_steps", "3",
)  # fmt: skip
pytestmark = COMMAND_LINE


def summary(version=0):
    return json.loads((folder(version) / "summary.json").read_text())


def test_all_penalties_stand_in_one_table(trained):
    trained(SMOKE)
    few = "--data.iterations", "10", "--data.batch", "16"
    fit(*WGAN, *few)
    fit("--model.penalty", "null", "--trainer.logger.init_args.name", "smoke/gan/other", *few)
    fit("--data.kind", "swiss_roll", *few)
    fit("--seed_everything", "1", *few)
    lines = (folder(3) / "table.txt").read_text().splitlines()
    penalties = sorted(line.split("  ")[0] for line in lines[4 : lines.index("", 4)])
    assert penalties == ["none", "r1_r2, weight 0.02", "real points", "wgan_gp, weight 1"]
    (own,) = [line for line in lines if line.endswith("  <-")]
    assert f"{summary(3)['distance']:.3f}" in own  # of two runs alike the newest
    assert summary(3)["distance"] != summary(0)["distance"]
    roll = (folder(2) / "table.txt").read_text()
    assert "pieces" in roll
    assert "wgan_gp" not in roll


def test_a_summary_of_something_else_is_passed_over(tmp_path):
    for name, text in (("gan/a", '{"a": 1}'), ("gan/b", '{"b": 2}'), ("maml/c", '{"c": 3}')):
        where = tmp_path / name / "version_0"
        where.mkdir(parents=True)
        runs.write_summary(where, json.loads(text))
    found = runs.summaries(tmp_path / "gan/a/version_0")
    assert sorted(found, key=str) == [{"a": 1}, {"b": 2}]
    assert runs.summaries(tmp_path) == []  # not a run's folder


def test_a_perfect_sample_and_collapsed_ones():
    target = gaussians()
    quality = score_points(sample_points("gaussians", 100_000, seed=5), target)
    assert quality.covered == 25
    assert quality.high == pytest.approx(1 - math.exp(-4.5), abs=0.002)
    assert 0.93 < quality.rarest <= 1
    one = score_points(target.points[7] + 0.01 * torch.randn(1000, 2), target)
    assert (one.covered, one.high, one.rarest) == (1, 1.0, 0.0)
    assert score_points(torch.full((10, 2), 0.5), target)[:3] == (0, 0.0, 0.0)  # between four modes
    just_inside, just_outside = (target.points + torch.tensor([d, 0.0]) for d in (0.149, 0.151))
    assert score_points(just_inside, target)[:3] == (25, 1.0, 1.0)
    assert score_points(just_outside, target)[:3] == (0, 0.0, 0.0)
    uneven = torch.cat([target.points, target.points[1:].repeat(3, 1)])  # mode 0 a quarter as often
    assert score_points(uneven, target).rarest == pytest.approx(25 / 97)


def test_the_roll_is_where_it_should_be():
    target = swiss_roll()
    assert torch.bincount(target.part).tolist() == [100] * 25
    gaps = (target.points[1:] - target.points[:-1]).norm(dim=1)
    assert gaps.max() < target.sigma / 4
    quality = score_points(sample_points("swiss_roll", 50_000, seed=5), target)
    assert quality.covered == 25
    # across the roll alone, which bends little within a sigma
    assert quality.high == pytest.approx(math.erf(3 / math.sqrt(2)), abs=0.002)
    assert 0.9 < quality.rarest <= 1


def test_the_wasserstein_distance_of_samples_whose_distance_is_known():
    x = torch.randn(200, 2)
    shift = torch.tensor([0.3, -0.4])
    assert wasserstein_distance(x, x[torch.randperm(200)]) == pytest.approx(0, abs=1e-12)
    assert wasserstein_distance(x, x.flip(0) + shift) == pytest.approx(0.5, abs=1e-6)
    line = torch.stack([torch.randn(200), torch.zeros(200)], 1)
    other = torch.stack([2 * torch.randn(200) + 1, torch.zeros(200)], 1)
    on_the_line = (line[:, 0].sort().values - other[:, 0].sort().values).abs().mean()
    assert wasserstein_distance(line, other) == pytest.approx(on_the_line.item(), rel=1e-5)
    with pytest.raises(ValueError, match="two samples of one size, got 3 and 4"):
        wasserstein_distance(x[:3], x[:4])


def test_the_losses():
    higher, lower = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 5.0])
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(3))) / 2
    assert relativistic_loss(higher, lower).item() == pytest.approx(expected)
    assert wasserstein_loss(higher, lower).item() == 1.0


def test_the_first_layer_is_steeper_and_nothing_else():
    def network(scale):
        torch.manual_seed(0)
        return GAN(None, hidden=[5], critic_scale=scale, generator_scale=1.0).critic

    plain, steep = network(1.0).state_dict(), network(4.0).state_dict()
    for name, value in plain.items():
        assert_close(steep[name], value * (4 if name.startswith("0.") else 1))


def test_a_penalty_in_words():
    assert describe_penalty(None) == "none"
    assert describe_penalty(hog.GradientPenalty("r1", 0.5)) == "r1, weight 0.5"
    lazy = hog.GradientPenalty("wgan_gp", 1, every=4, options={"one_sided": True})
    assert describe_penalty(lazy) == "wgan_gp, weight 1, every 4, one_sided True"
