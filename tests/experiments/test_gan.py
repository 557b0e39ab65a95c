"""The GAN experiment: runs end to end, resume, table of several runs, metrics, bad input."""

import json
import math
import re

import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from experiments import runs
from experiments.data import mixture
from experiments.data.mixture import Points, PointStream, gaussians, sample_points, swiss_roll
from experiments.evaluation.quality import score_points, wasserstein_distance
from experiments.gan import GAN
from experiments.training.adversarial import describe_penalty, relativistic_loss, wasserstein_loss
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    assert_same_run,
    checkpoint,
    metrics,
    run,
    smoke,
)
from tests.long_tail import FULL

SMOKE, fit, folder = smoke("gan/mixture")
WGAN = (
    "--model.penalty.kind", "wgan_gp", "--model.penalty.weight", "1",
    "--model.loss", "wasserstein", "--model.critic_steps", "3",
)  # fmt: skip
pytestmark = COMMAND_LINE


def summary(version=0):
    return json.loads((folder(version) / "summary.json").read_text())


def numbers(found):
    return {name: float(value) for name, value in found.items() if not isinstance(value, str)}


@DRAWN
def test_the_table_and_the_curves_agree(trained):
    trained(SMOKE)
    rows = metrics(folder())
    logged = [int(r["step"]) for r in rows if r["train/critic"]]
    assert logged == [int(r["step"]) for r in rows if r["train/generator"]] == [4, 9, 14, 19]
    assert [float(r["val/penalty"]) > 0 for r in rows if r["val/covered"]] == [True, True]
    assert summary()["steps"] == 20


@FULL  # that it is the same, resumed runs show
def test_the_same_seed_is_the_same_run_and_another_is_not():
    for seed in (0, 0, 1):
        fit("--seed_everything", seed, "--test_after_fit", "false")
    assert_same_run(folder(), folder(1))
    assert metrics(folder())[0]["train/critic"] != metrics(folder(2))[0]["train/critic"]
    first, other = (checkpoint(folder(v))["state_dict"] for v in (0, 2))
    weights = [name for name in first if name.endswith("weight")]
    assert len(weights) == 12
    assert not any(torch.equal(first[name], other[name]) for name in weights)


@pytest.mark.parametrize(
    "args",
    [pytest.param((), marks=FULL), pytest.param(WGAN, marks=FULL), ("--model.penalty.every", "3")],
    ids=["r1_r2", "wgan_gp", "lazily"],
)
def test_as_graphs_the_run_is_the_same(args):
    for compile in ("false", "eager"):
        fit(*args, "--model.compile", compile)
    plain, graphs = (checkpoint(folder(v))["state_dict"] for v in (0, 1))
    if args != WGAN:  # differences of the critic's outputs have no derivative by it but rounding
        del plain["critic.3.bias"], graphs["critic.3.bias"]
    assert_close(graphs, plain, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert (folder(1) / "table.txt").read_text().splitlines()[2] in (
        folder(0) / "table.txt"
    ).read_text()


@FULL
def test_a_compiled_run_says_what_it_compiles_and_ends_in_the_same_table(
    capfd, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path / "cache"))
    small = ("--model.hidden", "[8]")
    for compile in ("false", "true"):
        fit(*small, "--model.compile", compile)
    said = capfd.readouterr().err
    assert "hoglib: compiling" in said
    assert "the critic's loss with its gradient" in said
    assert "the generator's loss with its gradient" in said
    assert_close(numbers(summary(0)), numbers(summary(1)), rtol=1e-3, atol=1e-6)


def test_validation_draws_nothing_from_the_randomness_of_the_run():
    for interval in (5, 10):
        fit(*WGAN, "--trainer.val_check_interval", interval, "--test_after_fit", "false")
    often, seldom = (checkpoint(folder(v))["state_dict"] for v in (0, 1))
    assert_close(often, seldom, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("args", [(), pytest.param(WGAN, marks=FULL)], ids=["r1_r2", "wgan_gp"])
def test_test_and_validate_judge_the_checkpoint_in_its_own_folder(args, capsys):
    fit(*args)
    table = (folder() / "table.txt").read_text()
    expected = float([r for r in metrics(folder()) if r["val/penalty"]][-1]["val/penalty"])
    assert expected > 0
    (folder() / "table.txt").unlink()
    capsys.readouterr()
    config = folder() / "config.yaml"  # the run's own, with its penalty
    assert run("test", "--config", config) == 0
    assert (folder() / "table.txt").read_text() == table
    assert table in capsys.readouterr().out
    assert run("validate", "--config", config) == 0
    printed = capsys.readouterr().out
    value = float(re.search(r"val/penalty\W+([\d.e-]+)", printed)[1])
    assert value == pytest.approx(expected, rel=1e-5)
    assert not folder(1).exists()


def test_a_run_is_not_judged_under_another_name(capsys):
    fit(*WGAN, "--test_after_fit", "false")
    assert run("test", "--config", SMOKE) == 2
    error = capsys.readouterr().err
    assert "got one trained with penalty wgan_gp, weight 1, loss wasserstein;" in error
    assert "config.yaml that lies beside" in error
    assert not (folder() / "table.txt").exists()


def test_all_penalties_stand_in_one_table(capsys):
    fit(*WGAN)
    fit("--model.penalty", "null", "--trainer.logger.init_args.name", "smoke/gan/other")
    fit("--data.kind", "swiss_roll")
    capsys.readouterr()
    fit()
    fit("--seed_everything", "1")
    lines = (folder(3) / "table.txt").read_text().splitlines()
    penalties = sorted(line.split("  ")[0] for line in lines[4 : lines.index("", 4)])
    assert penalties == ["none", "r1_r2, weight 0.02", "real points", "wgan_gp, weight 1"]
    (own,) = [line for line in lines if line.endswith("<- this run")]
    assert f"{summary(3)['distance']:.3f}" in own  # of two runs alike the newest
    assert summary(3)["distance"] != summary(2)["distance"]
    assert "pieces" in (folder(1) / "table.txt").read_text()
    assert "wgan_gp" not in (folder(1) / "table.txt").read_text()


def test_a_summary_of_something_else_is_passed_over(tmp_path):
    for name, text in (("gan/a", '{"a": 1}'), ("gan/b", '{"b": 2}'), ("maml/c", '{"c": 3}')):
        where = tmp_path / name / "version_0"
        where.mkdir(parents=True)
        runs.write_summary(where, json.loads(text))
    found = runs.summaries(tmp_path / "gan/a/version_0")
    assert sorted(found, key=str) == [{"a": 1}, {"b": 2}]
    assert runs.summaries(tmp_path) == []  # not a run's folder


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(capsys, monkeypatch):
    honest = PointStream.__iter__

    def poisoned(self):
        for number, x in enumerate(honest(self)):
            yield x * (float("nan") if number == 15 else 1)

    monkeypatch.setattr(PointStream, "__iter__", poisoned)
    assert run("fit", "--config", SMOKE) == 2
    assert "critic loss: expected a finite number, got nan" in capsys.readouterr().err
    assert checkpoint(folder())["global_step"] == 20


def test_a_perfect_sample_and_collapsed_ones():
    target = gaussians()
    quality = score_points(sample_points("gaussians", 100_000, seed=5), target)
    assert quality.covered == 25
    assert quality.high == pytest.approx(1 - math.exp(-4.5), abs=0.002)
    assert 0.93 < quality.rarest <= 1
    one = score_points(target.points[7] + 0.01 * torch.randn(1000, 2), target)
    assert (one.covered, one.high, one.rarest) == (1, 1.0, 0.0)
    assert score_points(torch.full((10, 2), 0.5), target) == (0, 0.0, 0.0)  # between four modes
    just_inside, just_outside = (target.points + torch.tensor([d, 0.0]) for d in (0.149, 0.151))
    assert score_points(just_inside, target) == (25, 1.0, 1.0)
    assert score_points(just_outside, target) == (0, 0.0, 0.0)
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


def test_the_stream_goes_on_where_it_was_and_never_repeats():
    stream = PointStream("gaussians", 5, 3, seed=1)
    whole = list(stream)
    assert len({tuple(x.flatten().tolist()) for x in (*whole, *stream)}) == 10
    again, resumed = (
        PointStream("gaussians", 5, 3, seed=1),
        PointStream("gaussians", 5, 3, seed=9),
    )
    iterator = iter(again)
    next(iterator), next(iterator)
    resumed.load_state_dict(again.state_dict())
    assert_close(list(resumed), whole[2:], rtol=0, atol=0)


@pytest.mark.parametrize("kind", mixture.TARGETS)
def test_held_out_points_do_not_depend_on_the_seed(kind):
    batches = [
        next(iter(loader()))
        for data in (Points(kind, seed=0), Points(kind, seed=1))
        for loader in (data.test_dataloader, data.val_dataloader)
    ]
    assert_close(batches[:2], batches[2:], rtol=0, atol=0)
    real, other = batches[0]
    assert real.shape == (2500, 2)
    assert not torch.equal(real, other)
    assert not torch.equal(real[:500], batches[1][0])


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
