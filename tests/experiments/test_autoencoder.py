"""The race of NewtonCG and Adam: what it counts, runs end to end, resume, bad input."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from experiments.autoencoder import LABELS, Race, cost_of_factors, reconstruction_error
from experiments.tables.curvature import race_table
from hoglib.curvature import KFAC, NewtonCG
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    ROOT,
    assert_refused,
    checkpoint,
    metrics,
    run,
)

SMOKE = ROOT / "configs/smoke/curvature/newton_cg.yaml"
ALL_FOUR = ROOT / "configs/smoke/curvature/kfac.yaml"
pytestmark = COMMAND_LINE


def fit(*args):
    assert run("fit", "--config", SMOKE, *args) == 0


def folder(version=0, root="runs"):
    return Path(root) / "smoke/curvature/newton_cg" / f"version_{version}"


def untimed(rows):
    return [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in rows]


@DRAWN
def test_a_fit_ends_with_table_picture_and_checkpoint(trained):
    printed = trained(SMOKE)
    assert {p.name for p in folder().iterdir()} == {
        "config.yaml", "last.ckpt", "metrics.csv", "table.txt", "race.png",
    }  # fmt: skip
    table = (folder() / "table.txt").read_text()
    assert table in printed
    assert checkpoint(folder())["global_step"] == 6
    rows = [row for row in metrics(folder()) if row["train/adam"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4, 5]
    for name in ("newton_cg", "adam"):
        errors = [float(row[f"val/{name}"]) for row in rows]
        assert errors[-1] < 0.5 * errors[0]
        (line,) = [x for x in table.splitlines() if x.lower().startswith(name.replace("_", ""))]
        assert f"{errors[-1]:.4f}" in line


def test_the_cost_is_that_of_the_steps(monkeypatch):
    infos, step = [], NewtonCG.step

    def recorded(self, *args, **kwargs):
        value = step(self, *args, **kwargs)
        infos.append(self.info)
        return value

    monkeypatch.setattr(NewtonCG, "step", recorded)
    fit("--model.adam_batch", "100")
    rows = [row for row in metrics(folder()) if row["train/adam"]]
    spent = 0.0
    for info, row in zip(infos, rows, strict=True):
        spent += 1 + info.values / 3 + info.products * 256 / 1297
        assert float(row["gradients/newton_cg"]) == pytest.approx(spent)
        assert 0 <= float(row["gradients/adam"]) - spent < 100 / 1297
    steps = checkpoint(folder())["optimizer_states"][1]["state"][0]["step"]
    assert float(rows[-1]["gradients/adam"]) == pytest.approx(float(steps) * 100 / 1297)


@DRAWN
def test_four_optimizers_at_the_same_cost_and_resumed(trained, monkeypatch):
    infos = {NewtonCG: [], KFAC: []}
    for kind, steps in infos.items():
        own = kind.step

        def recorded(self, *args, own=own, steps=steps, **kwargs):
            value = own(self, *args, **kwargs)
            steps.append((id(self), self.info))
            return value

        monkeypatch.setattr(kind, "step", recorded)
    trained(ALL_FOUR, into="whole")
    where = Path("whole/smoke/curvature/kfac/version_0")
    assert {"table.txt", "race.png"} <= {p.name for p in where.iterdir()}
    assert all(label in (where / "table.txt").read_text() for label in LABELS.values())
    rows = [row for row in metrics(where) if row["train/adam"]]
    last = {name: float(rows[-1][f"gradients/{name}"]) for name in LABELS}
    assert all(cost >= last["newton_cg"] for cost in last.values())
    for name in LABELS:
        assert float(rows[-1][f"train/{name}"]) < 0.9 * float(rows[0][f"train/{name}"])
    plain, preconditioned = dict.fromkeys(key for key, _ in infos[NewtonCG])
    factors = cost_of_factors([64, 32, 8, 32, 64])
    for key, name, more in ((plain, "newton_cg", 0), (preconditioned, "newton_kfac", factors)):
        costs = [
            1 + info.values / 3 + (info.products + more) * 256 / 1297
            for each, info in infos[NewtonCG] if each == key
        ]  # fmt: skip
        assert last[name] == pytest.approx(sum(costs))
    # a gradient, factors, products of d and of the last step, and each five steps a loss
    count = len(infos[KFAC])
    expected = count * (1 + factors) + 2 * count - 1 + -(-count // 5) / 3
    assert last["kfac"] == pytest.approx(expected)
    assert (
        run("fit", "--config", ALL_FOUR, "--trainer.max_steps", "2", "--test_after_fit", "false")
        == 0
    )
    assert run("fit", "--config", ALL_FOUR, "--ckpt_path", "last", "--test_after_fit", "false") == 0
    here = Path("runs/smoke/curvature/kfac/version_0")
    assert_close(checkpoint(here)["state_dict"], checkpoint(where)["state_dict"], rtol=0, atol=0)


def test_the_cost_of_factors_is_that_of_their_multiplications():
    widths = [64, 16, 4]
    passes = sum(into * out for into, out in pairwise(widths))  # of each of three, an image
    squares = 64**2 + 2 * 16**2 + 4**2
    assert cost_of_factors(widths) == pytest.approx((2 * passes + squares) / (3 * passes))


def test_newton_steps_lower_the_training_error_at_each():
    fit("--model.curvature_batch", "null", "--test_after_fit", "false")
    errors = [float(row["train/newton_cg"]) for row in metrics(folder()) if row["train/adam"]]
    assert errors == sorted(errors, reverse=True)


def test_both_start_alike():
    torch.manual_seed(0)
    ours, theirs = Race(hidden=[8]).networks.values()
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_the_error_is_that_of_pixels_from_0_to_1():
    x, y = torch.rand(7, 64), torch.rand(7, 64)
    expected = sum(((a - b) ** 2).sum() for a, b in zip(x, y, strict=True)) / 7
    assert_close(reconstruction_error(2 * x - 1, 2 * y - 1), expected)


def test_resume_is_bit_for_bit_the_uninterrupted_run_but_for_the_time(trained):
    trained(SMOKE, into="whole")
    fit("--trainer.max_steps", "3", "--test_after_fit", "false")
    assert checkpoint(folder())["global_step"] == 2
    fit("--ckpt_path", "last")
    assert not folder(1).exists()
    a, b = checkpoint(folder()), checkpoint(folder(root="whole"))
    assert_close(a["state_dict"], b["state_dict"], rtol=0, atol=0)
    assert a["global_step"] == b["global_step"]
    for ours, theirs in zip(a["optimizer_states"], b["optimizer_states"], strict=True):
        assert ours["param_groups"] == theirs["param_groups"]
        assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
    assert untimed(metrics(folder())) == untimed(metrics(folder(root="whole")))
    seconds = [float(row["seconds/adam"]) for row in metrics(folder()) if row["train/adam"]]
    assert seconds == sorted(seconds)  # it goes on from where it was
    assert len(seconds) == 6


def test_test_judges_the_checkpoint_in_its_own_folder(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    (folder() / "table.txt").unlink()
    (folder() / "race.png").unlink()
    assert run("test", "--config", folder() / "config.yaml") == 0
    assert (folder() / "table.txt").read_text() == table
    assert (folder() / "race.png").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--model.damping", "0.2"),
            "trained with damping 0.2, .* got one trained with damping 0.1",
        ),
        (("--data.train", "1000"), "trained with data.train 1000"),
    ],
    ids=["damping", "data"],
)
def test_a_checkpoint_of_another_run_is_refused(trained, args, message, capsys):
    trained(SMOKE)
    assert run("test", "--config", SMOKE, *args, "--ckpt_path", "last") == 2
    assert re.search(message, capsys.readouterr().err)


@DRAWN
def test_the_derivatives_are_verified_and_the_spectrum_is_drawn(trained, capsys):
    trained(SMOKE)
    assert run("verify", "--config", SMOKE) == 0
    assert run("spectrum", "--config", SMOKE, "--k", "1", "--num_samples", "2", "--steps", "9") == 0
    assert "largest" in capsys.readouterr().out


BAD = {
    "no damping": (("--model.damping", "0"), "damping: expected a number greater than 0"),
    "no iterations": (("--model.max_iter", "0"), "max_iter: expected a whole number of at least 1"),
    "no images": (("--model.curvature_batch", "0"), "curvature_batch: .*at least 1"),
    "no rate": (("--model.adam_lr", "0"), "adam_lr"),
    "an empty batch": (("--model.adam_batch", "0"), "adam_batch"),
    "another optimizer": (
        ("--model.optimizers", "[sgd]"),
        "optimizers: expected some of newton_cg",
    ),
    "an optimizer twice": (("--model.optimizers", "[adam, adam]"), "optimizers: .*each once"),
    "no such option": (
        ("--model.optimizers", "[kfac]", "--model.kfac", "{rate: 1}"),
        "KFAC: expected options of KFACOperator",
    ),
    "no units": (("--model.hidden", "[0]"), "hidden"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_paragraph(case, capsys):
    assert_refused(SMOKE, *BAD[case], capsys)


def test_a_rate_that_is_too_large_stops_the_run(capsys):
    assert run("fit", "--config", SMOKE, "--model.adam_lr", "1e30") == 2
    assert "Lower adam_lr" in capsys.readouterr().err


def test_the_table():
    columns = {
        "val/a": [(1, 0.5), (2, 0.25), (3, 0.75)], "train/a": [(1, 1.0), (3, 0.125)],
        "gradients/a": [(1, 2.0), (3, 9.4)], "seconds/a": [(1, 0.5), (3, 2.26)],
    }  # fmt: skip
    lines = race_table(columns, {"a": ("A", 0.75), "b": ("B", 0.5)}).splitlines()
    assert lines[4].split() == ["A", "0.7500", "0.2500", "0.1250", "9", "2.3"]
    assert lines[5].split() == ["B", "0.5000", "0.5000", "-", "-", "-"]
