"""Reweighted digits: the weights, the split, runs end to end, resume, bad input."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch.testing import assert_close

import hoglib as hog
from experiments.reweight.experiment import learned_weights
from experiments.reweight.table import Detection, detect_wrong_labels, reweighting_table
from experiments.shared.networks import mlp
from experiments.shared.noisy_digits import Examples, split
from experiments.shared.weights import Weighted, even_weights, weighted_loss
from tests.experiments.command import COMMAND_LINE, DRAWN, smoke

SMOKE, fit, folder = smoke("meta/reweight_digits")
pytestmark = COMMAND_LINE


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    label = torch.randint(0, 3, (count,), generator=generator)
    return Examples(x, label, label, torch.arange(count))


def problem(act):
    torch.manual_seed(0)
    network = mlp([6, 5, 3], act).double()
    return hog.functional_loss(network, weighted_loss), hog.trainable_params(network)


def by_hand(params, act, x):
    """Logits of the network in plain torch."""
    w, b, v, c = params.values()
    return F.linear({"tanh": torch.tanh, "relu": torch.relu}[act](F.linear(x, w, b)), v, c)


@pytest.mark.parametrize("act", ["tanh", "relu"])
def test_the_weights_are_the_products_of_gradients(act):
    objective, params = problem(act)
    noisy, clean = examples(8, 3), examples(5, 4)

    def gradient(part):
        loss = F.cross_entropy(by_hand(params, act, part.x), part.label)
        grads = torch.autograd.grad(loss, [*params.values()])
        return torch.cat([g.flatten() for g in grads])

    one = [Examples(*(field[i : i + 1] for field in noisy)) for i in range(8)]
    useful = (torch.stack([gradient(example) for example in one]) @ gradient(clean)).clamp(min=0)
    assert 0 < (useful > 0).sum() < 8
    weights = learned_weights(objective, params, noisy, clean)
    assert_close(weights, useful / useful.sum(), rtol=1e-12, atol=1e-14)
    assert not weights.requires_grad


def test_no_example_that_helps_is_no_weight():
    objective, params = problem("tanh")
    clean = examples(1, 5)
    against = clean._replace(label=(clean.label + 1) % 3)
    # a step towards another label for the same image raises the loss of the clean one
    assert learned_weights(objective, params, against, clean).tolist() == [0.0]
    assert learned_weights(objective, params, clean, clean).tolist() == [1.0]


def test_the_loss_is_weighted():
    logits, label = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    losses = F.cross_entropy(logits, label, reduction="none")
    weight = torch.tensor([0.5, 0.0, 0.25, 0.25])
    assert_close(weighted_loss(logits, Weighted(label, weight)), weight @ losses)
    even = Weighted(label, even_weights(Examples(logits, label, label, label)))
    assert_close(weighted_loss(logits, even), losses.mean())


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["uniform", "background"])
def test_the_split(kind, noise):
    noisy, clean, test = split(kind, noise, 50, 300, seed=3)
    numbers = torch.cat([noisy.number, clean.number, test.number])
    assert numbers.sort().values.tolist() == list(range(1797))  # each image once
    assert (len(clean.x), len(test.x)) == (50, 300)
    assert torch.bincount(clean.truth).tolist() == [5] * 10
    for part in (clean, test):
        assert torch.equal(part.label, part.truth)
    wrong = noisy.label != noisy.truth
    assert int(wrong.sum()) == round(noise * 1447)
    assert noisy.x.shape == (1447, 64)
    assert (noisy.x.min(), noisy.x.max()) == (-1, 1)
    if noise and kind == "background":
        assert noisy.label[wrong].unique().tolist() == [0]
    elif noise:
        steps = torch.bincount((noisy.label - noisy.truth)[wrong] % 10, minlength=10)
        assert steps[0] == 0
        expected = int(wrong.sum()) / 9
        assert ((steps[1:] - expected).abs() < 5 * math.sqrt(expected)).all()


@DRAWN
def test_a_run_without_examples_of_a_kind_ends_with_its_table():
    fit("--data.noise", "0", "--data.batch", "1")
    assert (folder() / "weights.png").exists()
    assert "wrong labels -; AUC" in (folder() / "table.txt").read_text()


def test_the_area_under_the_curve():
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(300, generator=generator) < 0.3
    weights = torch.randint(0, 9, (300,), generator=generator) - 2.0 * wrong  # with ties
    found = detect_wrong_labels(weights, wrong)
    assert found.auc == pytest.approx(roc_auc_score(wrong, -weights))
    assert found.wrong == pytest.approx(weights[wrong].mean().item())
    assert detect_wrong_labels(torch.tensor([0.0, 1.0]), torch.tensor([True, False])).auc == 1
    assert detect_wrong_labels(torch.tensor([0.0, 1.0]), torch.tensor([False, True])).auc == 0
    assert math.isnan(detect_wrong_labels(torch.ones(2), torch.zeros(2).bool()).auc)


def test_the_table():
    right = {"a": torch.arange(100) < 90, "b": torch.arange(100) < 50, "c": torch.arange(100) < 0}
    curves = {"a": [(1, 0.95), (2, 0.9)], "b": []}
    lines = reweighting_table(right, curves, Detection(1.5, math.nan, 0.9), "x").splitlines()
    assert lines[0] == "Accuracy on 100 held-out digits, ± 95% interval; x"
    # sqrt(0.9 * 0.1 / 100) = 0.03; 40 of 100 pairs differ: sqrt(0.4 * 0.6 / 100) = 0.049
    assert lines[4].split() == ["a", "90.0%", "±", "5.9%", "95.0%"]
    assert "right labels 1.50, wrong labels -; AUC" in lines[-2]
    assert lines[-1].endswith("labels: 0.90.")
    assert lines[5].split() == ["b", "50.0%", "±", "9.8%", "40.0%", "±", "9.6%", "-"]
    assert lines[6].split() == ["c", "0.0%", "±", "0.0%", "90.0%", "±", "5.9%", "-"]
