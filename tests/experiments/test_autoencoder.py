"""The race of NewtonCG and Adam: what it counts, runs end to end, resume, bad input."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from experiments.autoencoder.experiment import cost_of_factors, reconstruction_error
from experiments.shared import race
from hoglib.curvature import KFAC, NewtonCG
from tests.experiments.command import COMMAND_LINE, metrics, smoke

SMOKE, fit, folder = smoke("curvature/newton_cg")
ALL_FOUR = smoke("curvature/kfac")
pytestmark = COMMAND_LINE
LABELS = {name: race.LABELS[name] for name in ("newton_cg", "newton_kfac", "kfac", "adam")}


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
    assert last["adam"] - last["newton_cg"] < 128 / 1297  # of one batch
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


def test_the_error_is_that_of_pixels_from_0_to_1():
    x, y = torch.rand(7, 64), torch.rand(7, 64)
    expected = sum(((a - b) ** 2).sum() for a, b in zip(x, y, strict=True)) / 7
    assert_close(reconstruction_error(2 * x - 1, 2 * y - 1), expected)
