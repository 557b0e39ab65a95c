"""The race of NewtonCG and Adam: what it counts, runs end to end, resume, bad input."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from experiments.autoencoder import LABELS, Race, cost_of_factors, reconstruction_error
from experiments.tables.curvature import race_table
from hoglib.curvature import KFAC, NewtonCG
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    checkpoint,
    metrics,
    smoke,
)

SMOKE, fit, folder = smoke("curvature/newton_cg")
ALL_FOUR = smoke("curvature/kfac")
pytestmark = COMMAND_LINE


@DRAWN
def test_the_table_and_the_curves_agree(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
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
def test_four_optimizers_at_the_same_cost(monkeypatch):
    infos = {NewtonCG: [], KFAC: []}
    for kind, steps in infos.items():
        own = kind.step

        def recorded(self, *args, own=own, steps=steps, **kwargs):
            value = own(self, *args, **kwargs)
            steps.append((id(self), self.info))
            return value

        monkeypatch.setattr(kind, "step", recorded)
    ALL_FOUR.fit()
    where = ALL_FOUR.folder()
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


def test_the_table():
    columns = {
        "val/a": [(1, 0.5), (2, 0.25), (3, 0.75)], "train/a": [(1, 1.0), (3, 0.125)],
        "gradients/a": [(1, 2.0), (3, 9.4)], "seconds/a": [(1, 0.5), (3, 2.26)],
    }  # fmt: skip
    lines = race_table(columns, {"a": ("A", 0.75), "b": ("B", 0.5)}).splitlines()
    assert lines[4].split() == ["A", "0.7500", "0.2500", "0.1250", "9", "2.3"]
    assert lines[5].split() == ["B", "0.5000", "0.5000", "-", "-", "-"]
