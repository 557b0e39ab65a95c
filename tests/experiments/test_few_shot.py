"""Few-shot classification: the network, prototypes, what is counted, runs end to end, resume, bad input."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from experiments.few_shot import table as tables
from experiments.few_shot.experiment import FewShotClassification
from experiments.few_shot.prototypes import Prototypes, class_means, nearest_centroid
from experiments.shared.networks import conv4
from tests.experiments.command import COMMAND_LINE, metrics, smoke

SMOKE, fit, folder = smoke("maml/glyphs_5w1s")
pytestmark = COMMAND_LINE


@pytest.mark.parametrize(("size", "inputs"), [(28, 1), (84, 3), (17, 2)])
def test_the_network_is_four_strided_convolutions(size, inputs):
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
    x, y = torch.randn(6, 3), torch.tensor([2, 0, 1, 1, 0, 2])
    expected = torch.stack([x[y == k].mean(0) for k in range(3)])
    assert_close(class_means(x, y), expected)
    learner, asked = Prototypes(torch.nn.Identity()), torch.randn(4, 3)
    logits = learner(asked, params=learner.adapt((x, y)))
    by_hand = [[-(((a - c) ** 2).sum()) for c in expected] for a in asked]
    assert_close(logits, torch.tensor(by_hand))
    assert nearest_centroid((x, y), asked).tolist() == logits.argmax(1).tolist()


def test_the_loss_of_prototypes_is_the_mean_over_tasks():
    learner = Prototypes(torch.nn.Linear(3, 2))
    x, y = torch.randn(4, 6, 3), torch.tensor([0, 1, 2, 0, 1, 2]).expand(4, 6)
    asked, label = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
    losses = [
        F.cross_entropy(learner(asked[i], params=learner.adapt((x[i], y[i]))), label[i])
        for i in range(4)
    ]
    assert_close(learner.loss(((x, y), (asked, label))), torch.stack(losses).mean())


ALGORITHMS = {
    "MAML++, 20 ways": ["--model.inner_steps", "2", "--model.options", "{learn_lr: parameter, lr_per_step: true}",
                        "--data.ways", "20", "--model.ways", "20", "--data.shots", "5"],
    "Reptile": ["--model.algorithm", "reptile", "--model.inner_lr", "0.05", "--model.inner_steps", "2"],
    "iMAML": ["--model.algorithm", "imaml", "--model.inner_lr", "0.05", "--model.inner_steps", "4", "--model.options", "{strength: 10}"],
    "prototypes": ["--model.algorithm", "prototypes"],
}  # fmt: skip


# iMAML at the start of a training, where the loss of four steps is at no minimum
@pytest.mark.filterwarnings("ignore:.*The solution found before that direction")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_trained_and_told_by_its_options(name):
    fit(*ALGORITHMS[name], "--data.iterations", "4", "--data.test_tasks", "2")
    assert 0 <= float(metrics(folder())[-1]["test/accuracy"]) <= 1
    table = (folder() / "table.txt").read_text()
    assert "<- this run" in table
    assert ("20-way 5-shot" in table) == ("20 ways" in name)


def test_what_is_counted_is_right_by_hand():
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


def test_a_learner_in_words():
    options = {"inner_lr": 0.4, "inner_steps": 5, "first_order": True, "learn_lr": "element", "x": False}  # fmt: skip
    words = "MAML, lr 0.4, steps 5, first order, learn_lr element"
    assert tables.describe_learner("maml", options) == words
