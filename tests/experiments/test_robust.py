"""Robust classifiers of digits: losses, choice, table, runs end to end, resume, bad input."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import hoglib as hog
from experiments.data.digits import Images
from experiments.robust import Penalty, Robustness, choose_weights
from experiments.tables.classifiers import Tried, robustness_table
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    metrics,
    smoke,
)

SMOKE, fit, folder = smoke("penalty/digits_robust")
pytestmark = COMMAND_LINE


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = Robustness({"input_gradient": [3.0], "jacobian": [0.5]}, hidden=[9])
    return model, Images(2 * torch.rand(5, 64) - 1, torch.tensor([0, 3, 3, 9, 1]))


def test_the_losses_are_those_of_their_papers(problem, monkeypatch):
    """Image by image: a row of the Jacobian for each class, all of which the projections are of."""
    model, (x, label) = problem
    network = model.networks["plain"]
    jacobian = hog.penalties.jacobian
    monkeypatch.setattr(
        "hoglib.penalties.jacobian", lambda *a, **k: jacobian(*a, num_projections=None, **k)
    )
    losses, slopes, stretches = [], [], []
    for one, y in zip(x, label, strict=True):
        J = torch.autograd.functional.jacobian(network, one)  # [10, 64]
        p = network(one).softmax(0)
        losses.append(-p[y].log())
        slopes.append(((p - F.one_hot(y, 10)) @ J).square().sum() / 2)
        stretches.append(J.square().sum() / 2)
    plain, slope, stretch = (sum(part) / 5 for part in (losses, slopes, stretches))
    expected = {
        "plain": plain, "input_gradient_0": plain + 3 * slope, "jacobian_0": plain + 0.5 * stretch,
    }  # fmt: skip
    assert {name: model.loss(name, Images(x, label)).item() for name in model.networks} == (
        pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-5)
    )


def test_all_start_alike(problem):
    first, *others = problem[0].networks.values()
    for other in others:
        assert_close(first.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_accuracy_without_an_attack_comes_first(problem):
    model, images = problem
    images = images._replace(label=model(images.x).argmax(1))
    for attack in ("FGSM", "PGD"):
        right = model.correct("plain", images, attack)
        assert right.shape == (len(model.epsilons), 5)
        assert right[0].all()
        assert not right[-1].all()
    found = model.attacked("plain", images, "PGD", 0.05)
    assert 0.0999 < (found - images.x).abs().max() <= 0.1 + 1e-12  # -1 to 1 is 2 wide
    share = model.correct("plain", images, "PGD").double().mean()
    assert model.area("plain", images).item() == pytest.approx(share.item())


def test_a_confident_network_is_attacked_too(problem):
    """In float32 the softmax of logits that are 400 apart is 1, and its loss has no slope."""
    model, images = problem
    images = images._replace(label=model(images.x).argmax(1))
    with torch.no_grad():
        last = model.networks["plain"][-1]
        last.weight *= 2000
        last.bias *= 2000
    slope = torch.autograd.functional.jacobian(
        lambda x: F.cross_entropy(model(x), images.label, reduction="sum"), images.x
    )
    assert (slope.abs().amax(1) == 0).any()
    found = model.attacked("plain", images, "PGD", 0.05)
    assert ((found - images.x).abs().amax(1) > 0.09).all()


def test_the_choice_is_by_the_area_alone():
    penalties = {
        "plain": Penalty("plain"), "a": Penalty("input_gradient", 1.0),
        "b": Penalty("input_gradient", 10.0), "c": Penalty("jacobian", 0.1), "d": Penalty("jacobian", 1.0),
    }  # fmt: skip
    areas = {"plain": 0.9, "a": 0.3, "b": 0.5, "c": 0.4, "d": 0.4}
    assert choose_weights(penalties, areas) == {
        "plain": "plain",
        "input gradient, 10": "b",
        "Jacobian, 0.1": "c",
    }


def test_the_weight_is_chosen_on_the_validation_part(monkeypatch):
    judged = []

    def area(self, name, images):
        judged.append((name, images.x.clone()))
        return torch.tensor(0.7 if name == "input_gradient_1" else 0.2)

    monkeypatch.setattr(Robustness, "area", area)
    fit()
    assert [name for name, _ in judged] == ["plain", "input_gradient_0", "input_gradient_1", "jacobian_0"]  # fmt: skip
    data = metrics(folder())
    assert any("test/input gradient, 10/PGD/0.1" in row for row in data)
    assert {len(x) for _, x in judged} == {50}


@DRAWN
def test_the_table_and_the_curves_agree(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    rows = metrics(folder())
    assert [int(row["step"]) for row in rows if row["train/plain"]] == [4, 9, 14, 19]
    last = rows[-1]
    (line,) = [x for x in table.splitlines() if re.match(r"plain +PGD", x)]
    for epsilon in ("0", "0.1", "0.2"):
        assert f"{float(last[f'test/plain/PGD/{epsilon}']):.1%}" in line
    assert float(last["test/plain/PGD/0.2"]) < float(last["test/plain/PGD/0"])


@DRAWN
def test_without_penalties_there_is_the_plain_network_alone():
    fit("--model.weights", "{}")
    table = (folder() / "table.txt").read_text()
    assert "plain" in table
    assert "chosen" not in table


def test_the_table():
    flags = lambda *counts: torch.stack([torch.arange(100) < c for c in counts])  # noqa: E731
    right = {"plain": {"FGSM": flags(90, 50)}, "J": {"FGSM": flags(90, 80)}}
    tried = [Tried("J", 0.5, 0.123, False), Tried("J", 2.0, 0.456, True)]
    lines = robustness_table([0.0, 0.1], right, tried, 70).splitlines()
    assert lines[2].split() == ["attack", "0", "0.1"]
    # 1.96 sqrt(0.9 0.1 / 100) = 5.9%; of 100 pairs 30 differ: 1.96 sqrt(0.3 0.7 / 100) = 9.0%
    assert lines[4].split() == ["plain", "FGSM", "90.0%", "±", "5.9%", "50.0%", "±", "9.8%"]
    assert lines[6].split() == ["J:", "gain", "FGSM", "0.0%", "±", "0.0%", "30.0%", "±", "9.0%"]
    assert lines[-4].split() == ["J", "0.5", "12.3%"]
    assert lines[-3].split() == ["J", "2", "45.6%", "<-", "chosen"]
    assert "on 70 other digits" in lines[-1]
