"""Robust classifiers of digits: losses, choice, table, runs end to end, resume, bad input."""

import re
from pathlib import Path

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
    ROOT,
    assert_refused,
    assert_same_run,
    checkpoint,
    metrics,
    run,
)

SMOKE = ROOT / "configs/smoke/penalty/digits_robust.yaml"
pytestmark = COMMAND_LINE


def fit(*args):
    assert run("fit", "--config", SMOKE, *args) == 0


def folder(version=0, root="runs"):
    return Path(root) / "smoke/penalty/digits_robust" / f"version_{version}"


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
def test_a_fit_ends_with_table_picture_and_checkpoint(trained):
    printed = trained(SMOKE)
    assert {p.name for p in folder().iterdir()} == {
        "config.yaml", "last.ckpt", "metrics.csv", "table.txt", "robust.png",
    }  # fmt: skip
    table = (folder() / "table.txt").read_text()
    assert table in printed
    assert checkpoint(folder())["global_step"] == 20
    rows = metrics(folder())
    assert [int(row["step"]) for row in rows if row["train/plain"]] == [4, 9, 14, 19]
    last = rows[-1]
    (line,) = [x for x in table.splitlines() if re.match(r"plain +PGD", x)]
    for epsilon in ("0", "0.1", "0.2"):
        assert f"{float(last[f'test/plain/PGD/{epsilon}']):.1%}" in line
    assert float(last["test/plain/PGD/0.2"]) < float(last["test/plain/PGD/0"])


@DRAWN
def test_resume_is_bit_for_bit_the_uninterrupted_run(trained):
    trained(SMOKE, into="whole")
    fit("--trainer.max_steps", "13", "--test_after_fit", "false")
    assert checkpoint(folder())["global_step"] == 10
    fit("--ckpt_path", "last")
    assert not folder(1).exists()
    assert_same_run(folder(), folder(root="whole"))
    for name in ("table.txt", "robust.png"):
        assert (folder() / name).read_bytes() == (folder(root="whole") / name).read_bytes()


def test_test_and_validate_judge_the_checkpoint_in_its_own_folder(trained, capsys):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    (folder() / "table.txt").unlink()
    config = folder() / "config.yaml"
    assert run("test", "--config", config) == 0
    assert (folder() / "table.txt").read_text() == table
    assert run("validate", "--config", config) == 0
    assert "val/jacobian_0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model.weights", "{jacobian: [2]}"), "trained with weights {'jacobian': .2.0.}"),
        (("--data.val", "60"), "trained with data.val 60, .* one trained with data.val 50"),
    ],
    ids=["weights", "validation part"],
)
def test_a_checkpoint_of_another_run_is_refused(trained, args, message, capsys):
    trained(SMOKE)
    assert run("test", "--config", SMOKE, *args, "--ckpt_path", "last") == 2
    assert re.search(message, capsys.readouterr().err)


@DRAWN
def test_without_penalties_there_is_the_plain_network_alone():
    fit("--model.weights", "{}")
    table = (folder() / "table.txt").read_text()
    assert "plain" in table
    assert "chosen" not in table


@DRAWN
def test_the_spectrum_is_drawn(trained, capsys):
    trained(SMOKE)
    assert run("spectrum", "--config", SMOKE, "--k", "1", "--num_samples", "2", "--steps", "9") == 0
    assert "largest" in capsys.readouterr().out


BAD = {
    "unknown penalty": (["--model.weights", "{r1: [1]}"], "weights: expected one of input_gradient"),
    "no weight": (["--model.weights", "{jacobian: [0]}"], "weights.jacobian: expected a finite"),
    "no units": (["--model.hidden", "[0]"], "hidden: .*at least 1"),
    "no rate": (["--model.lr", "0"], "lr: expected a finite number greater than 0"),
    "no bound": (["--model.epsilons", "[]"], "epsilons: expected at least one"),
    "zero": (["--model.epsilons", "[0, 0.1]"], "epsilons: expected a finite number greater than 0"),
    "bounds in disorder": (["--model.epsilons", "[0.2, 0.1]"], "epsilons: .*in ascending order"),
    "no steps": (["--model.steps", "0"], "steps: expected a whole number of at least 1"),
    "no restarts": (["--model.restarts", "0"], "restarts: .*at least 1"),
    "more than there are": (["--data.val", "1500"], "train, test, val: expected 1797 images in all"),
    "nothing to choose by": (["--data.val", "0"], "val: expected images to choose a weight by"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_paragraph(case, capsys):
    assert_refused(SMOKE, *BAD[case], capsys)


def test_a_weight_that_is_too_large_stops_the_run(capsys):
    args = ("--model.lr", "1e30", "--model.weights", "{jacobian: [1e30]}")
    assert run("fit", "--config", SMOKE, *args) == 2
    assert "Lower lr, or the weights" in capsys.readouterr().err


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
