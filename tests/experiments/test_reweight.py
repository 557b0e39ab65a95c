"""Reweighted digits: the weights, the split, runs end to end, resume, bad input."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch.testing import assert_close

import hoglib as hog
from experiments.data.noisy_digits import Examples, NoisyDigits, NoisyStream, split
from experiments.models.networks import mlp
from experiments.reweight import LABELS, Weighted, even_weights, learned_weights, weighted_loss
from experiments.tables.classifiers import Detection, detect_wrong_labels, reweighting_table
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
def test_the_weights_are_those_of_a_double_backward_by_hand(act):
    objective, params = problem(act)
    noisy, clean = examples(8, 1), examples(5, 2)
    e = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    losses = F.cross_entropy(by_hand(params, act, noisy.x), noisy.label, reduction="none")
    grads = torch.autograd.grad((e * losses).sum(), [*params.values()], create_graph=True)
    after = {n: p - 0.3 * g for (n, p), g in zip(params.items(), grads, strict=True)}
    clean_loss = F.cross_entropy(by_hand(after, act, clean.x), clean.label)
    (slope,) = torch.autograd.grad(clean_loss, e)
    useful = torch.relu(-slope)
    assert 0 < (useful > 0).sum() < 8
    weights = learned_weights(objective, params, noisy, clean)
    assert weights.dtype == torch.float64
    assert_close(weights, useful / useful.sum(), rtol=1e-12, atol=1e-14)
    assert not weights.requires_grad


def test_the_weights_are_the_products_of_gradients():
    objective, params = problem("tanh")
    noisy, clean = examples(8, 3), examples(5, 4)

    def gradient(part):
        loss = F.cross_entropy(by_hand(params, "tanh", part.x), part.label)
        grads = torch.autograd.grad(loss, [*params.values()])
        return torch.cat([g.flatten() for g in grads])

    one = [Examples(*(field[i : i + 1] for field in noisy)) for i in range(8)]
    products = torch.stack([gradient(example) for example in one]) @ gradient(clean)
    useful = products.clamp(min=0)
    weights = learned_weights(objective, params, noisy, clean)
    assert_close(weights, useful / useful.sum(), rtol=1e-12, atol=1e-14)


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


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4, 0.77])
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


def test_the_truth_is_that_of_scikit_learn():
    from sklearn.datasets import load_digits

    images, truth = load_digits(return_X_y=True)
    for part in split("uniform", 0.4, 100, 500, seed=0):
        assert part.truth.tolist() == truth[part.number].tolist()
        assert_close(part.x, torch.tensor(images[part.number] / 8 - 1).float(), rtol=0, atol=0)


def test_the_split_belongs_to_the_seed():
    same = [split("uniform", 0.4, 100, 500, seed) for seed in (0, 0, 1)]
    assert_close(same[0], same[1], rtol=0, atol=0)
    assert not torch.equal(same[0].test.number, same[2].test.number)
    background = split("background", 0.2, 100, 500, 0)
    assert torch.equal(background.noisy.number, same[0].noisy.number)  # other labels, same images


def test_the_stream_goes_on_where_it_was_and_never_repeats():
    data = split("uniform", 0.4, 100, 500, seed=0)
    stream = NoisyStream(data, 4, 30, seed=1)
    whole = list(stream)
    assert len({tuple(noisy.number.tolist()) for noisy, _ in (*whole, *stream)}) == 8
    for noisy, clean in whole:
        assert len(noisy.number.unique()) == 30
        assert torch.isin(noisy.number, data.noisy.number).all()
        assert clean is data.clean
    label = dict(zip(data.noisy.number.tolist(), data.noisy.label.tolist(), strict=True))
    assert [label[n] for n in whole[0][0].number.tolist()] == whole[0][0].label.tolist()
    again, resumed = NoisyStream(data, 4, 30, seed=1), NoisyStream(data, 4, 30, seed=9)
    iterator = iter(again)
    next(iterator), next(iterator)
    resumed.load_state_dict(again.state_dict())
    assert_close(list(resumed), whole[2:], rtol=0, atol=0)


def test_wrong_labels_in_words():
    words = [NoisyDigits(kind, 0.4, seed=0).noise for kind in ("uniform", "background")]
    assert words == [
        "479 of 1197 training labels are wrong (any other digit)",
        "479 of 1197 training labels are wrong (all say 0)",
    ]


@DRAWN
def test_the_table_and_the_curves_agree(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    assert all(label in table for label in LABELS.values())
    rows = metrics(folder())
    assert [int(r["step"]) for r in rows if r["train/reweighted"]] == [4, 9, 14, 19]
    curve = [float(r["val/clean"]) for r in rows if r["val/clean"]]
    assert len(curve) == 2
    (line,) = [line for line in table.splitlines() if line.startswith(LABELS["clean"])]
    assert f"{max(curve):.1%}" == line.split()[-1]
    assert f"{curve[-1]:.1%}" in line  # the test is on the digits of the curve


def test_wrong_labels_are_found_and_cost_plain_training_more():
    fit("--data.iterations", "150", "--trainer.val_check_interval", "50")
    last = metrics(folder())[-1]
    assert float(last["test/auc"]) > 0.9
    assert float(last["test/accuracy_reweighted"]) > float(last["test/accuracy_noisy"]) + 0.15
    assert float(last["test/accuracy_reweighted"]) > 0.85


def test_all_networks_start_alike_and_none_depends_on_the_others():
    for version, against in enumerate(("[noisy,clean,both]", "[clean]", "[]")):
        fit("--model.against", against, "--test_after_fit", "false")
        assert folder(version).exists()
    every, some, alone = (checkpoint(folder(v))["state_dict"] for v in range(3))
    assert len(alone) < len(some) < len(every)
    for fewer in (some, alone):
        assert_close(fewer, {name: every[name] for name in fewer}, rtol=0, atol=0)
    once = ("--trainer.max_steps", "1", "--model.lr", "1e-12", "--checkpoint_every", "1")
    fit(*once, "--test_after_fit", "false")
    start = checkpoint(folder(3))["state_dict"]
    for name in ("noisy", "clean", "both"):
        ours, theirs = (
            [v for k, v in start.items() if k.startswith(f"networks.{which}.")]
            for which in ("reweighted", name)
        )
        assert len(ours) == 6
        assert_close(ours, theirs, rtol=0, atol=1e-9)


@FULL  # that it is the same, resumed runs show
def test_the_same_seed_is_the_same_run_and_another_is_not():
    for seed in (0, 0, 1):
        fit("--seed_everything", seed, "--test_after_fit", "false")
    assert_same_run(folder(), folder(1))
    first, other = (checkpoint(folder(v))["state_dict"] for v in (0, 2))
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_test_and_validate_judge_the_checkpoint_in_its_own_folder(capsys):
    fit("--seed_everything", "1")
    table = (folder() / "table.txt").read_text()
    (folder() / "table.txt").unlink()
    capsys.readouterr()
    config = folder() / "config.yaml"
    assert run("test", "--config", config) == 0
    assert (folder() / "table.txt").read_text() == table
    assert table in capsys.readouterr().out
    assert run("validate", "--config", config) == 0
    assert "val/reweighted" in capsys.readouterr().out
    assert not folder(1).exists()


OTHER = {
    "another split": (
        (),
        "expected one trained with data.seed 0, .* got one trained with data.seed 1",
    ),
    "other noise": (
        ("--seed_everything", "1", "--data.noise", "0.2"),
        "data.noise 0.2, .* data.noise 0.4",
    ),
    "another network": (("--seed_everything", "1", "--model.hidden", "[9]"), r"hidden \[9\]"),
}


@pytest.mark.parametrize("command", ["test", "fit"])
def test_a_checkpoint_is_not_judged_on_what_it_was_trained_on(trained, command, capsys):
    trained(SMOKE, "--seed_everything", "1", "--test_after_fit", "false")
    for args, message in OTHER.values():
        assert run(command, "--config", SMOKE, *args, "--ckpt_path", "last") == 2
        error = capsys.readouterr().err
        assert re.search(message, error)
        assert "config.yaml that lies beside" in error
    assert not (folder() / "table.txt").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(capsys, monkeypatch):
    honest = NoisyStream.__iter__

    def poisoned(self):
        for number, (noisy, clean) in enumerate(honest(self)):
            yield noisy._replace(x=noisy.x * (float("nan") if number == 15 else 1)), clean

    monkeypatch.setattr(NoisyStream, "__iter__", poisoned)
    assert run("fit", "--config", SMOKE) == 2
    assert re.search("expected (a )?finite", capsys.readouterr().err)
    assert checkpoint(folder())["global_step"] == 10


@pytest.mark.parametrize("args", [("--data.noise", "0"), ("--data.batch", "1")], ids=" ".join)
@DRAWN
def test_a_run_without_examples_of_a_kind_ends_with_its_table(args):
    fit(*args)
    assert (folder() / "weights.png").exists()
    if args[1] == "0":
        line = (folder() / "table.txt").read_text().splitlines()[4]
        assert line.split()[-2:] == ["-", "-"]


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
    assert lines[4].split() == ["a", "90.0%", "±", "5.9%", "95.0%", "1.50", "-", "0.90"]
    assert lines[5].split() == ["b", "50.0%", "±", "9.8%", "40.0%", "±", "9.6%", "-"]
    assert lines[6].split() == ["c", "0.0%", "±", "0.0%", "90.0%", "±", "5.9%", "-"]
