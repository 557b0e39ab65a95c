"""Few-shot classification: the network, prototypes, what is counted, runs end to end, resume, bad input."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.testing import assert_close

from experiments.few_shot import FewShotClassification
from experiments.models.networks import conv4
from experiments.models.prototypes import Prototypes, class_means, nearest_centroid
from experiments.plots.few_shot import plot_episode
from experiments.tables import few_shot as tables
from experiments.tables.layout import mean_and_interval
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    metrics,
    run,
    smoke,
)
from tests.long_tail import FULL, all_but, only

SMOKE, fit, folder = smoke("maml/glyphs_5w1s")
pytestmark = COMMAND_LINE


@pytest.mark.parametrize(("size", "inputs"), [(28, 1), (84, 3), (17, 2)])
def test_the_network_is_four_strided_convolutions(size, inputs):
    torch.manual_seed(0)
    network = conv4(7, 6, inputs, size, statistics=False)
    x = torch.rand(5, inputs, size, size)
    expected = x
    for i in range(0, 12, 3):
        expected = F.conv2d(expected, network[i].weight, stride=2, padding=1)
        expected = F.batch_norm(expected, None, None, *network[i + 1].parameters(), training=True)
        expected = F.relu(expected)
    expected = F.linear(expected.flatten(1), network[13].weight, network[13].bias)
    assert_close(network(x), expected)


def test_prototypes_are_means_and_logits_distances():
    torch.manual_seed(0)
    x, y = torch.randn(6, 3), torch.tensor([2, 0, 1, 1, 0, 2])
    expected = torch.stack([x[y == k].mean(0) for k in range(3)])
    assert_close(class_means(x, y), expected)
    learner, asked = Prototypes(torch.nn.Identity()), torch.randn(4, 3)
    logits = learner(asked, params=learner.adapt((x, y)))
    by_hand = [[-(((a - c) ** 2).sum()) for c in expected] for a in asked]
    assert_close(logits, torch.tensor(by_hand))
    assert nearest_centroid((x, y), asked).tolist() == logits.argmax(1).tolist()


def test_the_loss_of_prototypes_is_the_mean_over_tasks():
    torch.manual_seed(0)
    learner = Prototypes(torch.nn.Linear(3, 2))
    x, y = torch.randn(4, 6, 3), torch.tensor([0, 1, 2, 0, 1, 2]).expand(4, 6)
    asked, label = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
    losses = [
        F.cross_entropy(learner(asked[i], params=learner.adapt((x[i], y[i]))), label[i])
        for i in range(4)
    ]
    assert_close(learner.loss(((x, y), (asked, label))), torch.stack(losses).mean())


@DRAWN
def test_the_table_and_the_curves_agree(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    assert "Accuracy on 20 held-out tasks, 5-way 1-shot, glyphs" in table
    (line,) = [line for line in table.splitlines() if "<- this run" in line]
    accuracy = float(metrics(folder())[-1]["test/accuracy"])
    assert f"{accuracy:.1%}" in line
    assert line.split()[-4] == "12"


@FULL
def test_it_learns_and_a_run_of_another_kind_adds_its_row():
    more = ("--data.iterations", "60", "--data.tasks", "4", "--model.channels", "16")
    fit(*more)
    fit(*more, "--model.algorithm", "prototypes")
    table = (folder(1) / "table.txt").read_text()
    rows = {line.split("  ")[0]: line for line in table.splitlines()[4:]}
    assert set(rows) == {"MAML, lr 0.4, steps 1", "prototypes", "nearest mean image"}
    assert "<- this run" in rows["prototypes"]
    shares = {name: float(re.search(r"([\d.]+)%", line)[1]) for name, line in rows.items()}
    assert shares["MAML, lr 0.4, steps 1"] > 65  # by chance 20


ALGORITHMS = {
    "first order": ["--model.first_order", "true"],
    "ANIL": ["--model.options", '{inner_params: ["13"]}'],
    "Meta-SGD": ["--model.options", "{learn_lr: element}"],
    "MAML++": ["--model.inner_steps", "2", "--model.options", "{learn_lr: parameter, lr_per_step: true}"],
    "Reptile": ["--model.algorithm", "reptile", "--model.inner_lr", "0.05", "--model.inner_steps", "2"],
    "iMAML": ["--model.algorithm", "imaml", "--model.inner_lr", "0.05", "--model.inner_steps", "4", "--model.options", "{strength: 10}"],
    "prototypes": ["--model.algorithm", "prototypes"],
}  # fmt: skip


# iMAML at the start of a training, where the loss of four steps is at no minimum
@pytest.mark.filterwarnings("ignore:.*The solution found before that direction")
# options of MAML are passed on alike
@pytest.mark.parametrize(
    "name", all_but(only("MAML++", "Reptile", "iMAML", "prototypes"), ALGORITHMS)
)
def test_every_algorithm_is_trained_and_told_by_its_options(name):
    fit(*ALGORITHMS[name], "--data.iterations", "4", "--data.test_tasks", "2")
    rows = metrics(folder())
    assert 0 <= float(rows[-1]["test/accuracy"]) <= 1
    assert "<- this run" in (folder() / "table.txt").read_text()


def test_twenty_ways_and_five_shots():
    fit("--data.ways", "20", "--model.ways", "20", "--data.shots", "5", "--data.iterations", "4",
        "--data.test_tasks", "2")  # fmt: skip
    assert "20-way 5-shot" in (folder() / "table.txt").read_text()


def test_images_of_a_folder():
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for name in range(6):
            where = Path("own") / split / f"class{name}"
            where.mkdir(parents=True)
            tone = np.array([40 * name, 255 - 40 * name, 90])
            for i in range(6):
                noise = rng.integers(0, 30, (20, 20, 3))
                pixels = np.clip(tone + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(where / f"{i}.png")
    fit("--data.source", "own", "--data.size", "16", "--data.channels", "3", "--model.size", "16",
        "--model.inputs", "3", "--data.queries", "2", "--data.test_queries", "3")  # fmt: skip
    assert "5-way 1-shot, own" in (folder() / "table.txt").read_text()


@FULL  # test_verify.py has the config, and test_spectrum.py the spectrum of MAML
@pytest.mark.parametrize("algorithm", ["maml", "prototypes"])
@DRAWN
def test_the_derivatives_are_verified_and_the_spectrum_is_drawn(algorithm):
    how = ("--model.algorithm", algorithm, "--model.channels", "4")
    fit(*how, "--test_after_fit", "false")
    assert run("verify", "--config", SMOKE, *how) == 0
    few = ("--k", "1", "--num_samples", "2", "--steps", "9")
    assert run("spectrum", "--config", SMOKE, *how, *few) == 0


def test_what_is_counted_is_right_by_hand():
    torch.manual_seed(0)
    model = FewShotClassification(ways=3, channels=4, inner_steps=1, test_steps=2)
    x, y = torch.rand(2, 3, 1, 28, 28), torch.arange(3).expand(2, 3)
    asked, label = torch.rand(2, 6, 1, 28, 28), torch.arange(3).repeat(2, 2)
    right = model.accuracies(((x, y), (asked, label)))
    assert right.shape == (2, 2)
    for i in range(2):
        params = model.learner.adapt((x[i], y[i]), steps=2)
        guesses = model.learner(asked[i], params=params).argmax(1)
        assert right[i, 0] == (guesses == label[i]).double().mean()
        distances = torch.stack([((asked[i] - c) ** 2).sum((1, 2, 3)) for c in x[i]])
        assert right[i, 1] == (distances.argmin(0) == label[i]).double().mean()


def test_the_table_has_the_newest_run_of_each_method():
    rows = [
        tables.LearnerResult(name, share, 0.01, 99, 7)
        for name, share in (("a", 0.5), ("b", 0.9), ("a", 0.8))
    ]
    pixels = tables.LearnerResult("pixels", 0.3, 0.02, 0, 0)
    lines = tables.classification_table(rows[0], rows[1:], pixels, "title", 600).splitlines()
    assert lines[0] == "Accuracy on 600 held-out tasks, title, mean ± 95% interval"
    assert [line.split() for line in lines[4:]] == [
        ["b", "90.0%", "±", "1.0%", "99", "7"],
        ["a", "50.0%", "±", "1.0%", "99", "7", "<-", "this", "run"],
        ["pixels", "30.0%", "±", "2.0%"],
    ]


def test_the_interval():
    values = torch.tensor([0.0, 0.5, 1.0, 0.5], dtype=torch.float64)
    mean, interval = mean_and_interval(values)
    assert mean == 0.5
    assert interval == pytest.approx(1.96 * (0.5 / 3) ** 0.5 / 2)


def test_a_learner_in_words():
    options = {
        "inner_lr": 0.4,
        "inner_steps": 5,
        "first_order": True,
        "learn_lr": "element",
        "x": False,
    }
    assert (
        tables.describe_learner("maml", options)
        == "MAML, lr 0.4, steps 5, first order, learn_lr element"
    )


@pytest.mark.parametrize("channels", [1, 3])
@DRAWN
def test_the_picture_of_many_ways_is_drawn(channels, tmp_path):
    support, query = torch.rand(60, channels, 28, 28), torch.rand(80, channels, 28, 28)
    label = torch.arange(20).repeat_interleave(4)
    file = plot_episode(tmp_path / "episode.png", support, query, label, label.flip(0), "title")
    assert file.stat().st_size > 10_000
