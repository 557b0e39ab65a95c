"""Robust classifiers of digits: attacks with a known worst image, losses, choice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from experiments.robust.attacks import fgsm, is_correct, margin, pgd
from experiments.robust.experiment import Penalty, Robustness, choose_weights
from experiments.shared.digits import Images
from experiments.shared.networks import mlp
from tests.experiments.command import COMMAND_LINE, metrics, smoke

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
    expected = {"plain": "plain", "input gradient, 10": "b", "Jacobian, 0.1": "c"}
    assert choose_weights(penalties, areas) == expected


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


WIDE = (-100.0, 100.0)


def linear(weight, bias=0.0):
    """Logits (0, w x + b): class 1 where w x + b is above 0."""
    network = nn.Linear(len(weight), 2).double()
    with torch.no_grad():
        network.weight.copy_(torch.stack([torch.zeros(len(weight)), torch.tensor(weight)]))
        network.bias.copy_(torch.tensor([0.0, bias]))
    return network


@pytest.fixture
def attacked():
    """A network that is no longer random, and images, some of them told wrong."""
    torch.manual_seed(0)
    network = mlp([6, 16, 3], "tanh").double()
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(3)
    x = 2 * torch.rand(200, 6, dtype=torch.float64) - 1
    return network, x, torch.where(torch.rand(200) < 0.9, network(x).argmax(1), 0)


@pytest.mark.parametrize(
    ("logits", "label", "expected"),
    [
        ([1.0, 3.0, 2.0], 1, -1.0),
        ([1.0, 3.0, 2.0], 2, 1.0),
        ([1.0, 3.0, 2.0], 0, 2.0),
        ([2.0, 2.0, 0.0], 0, 0.0),
        ([float("nan"), 1.0, 0.0], 1, float("inf")),
    ],
)
def test_the_margin(logits, label, expected):
    found = margin(torch.tensor([logits]), torch.tensor([label]))
    assert_close(found, torch.tensor([expected]))
    right = is_correct(nn.Identity(), torch.tensor([logits]), torch.tensor([label]))
    assert bool(right) == (expected < 0)


@pytest.mark.parametrize("attack", [fgsm, pgd])
@pytest.mark.parametrize(
    ("label", "expected"), [(1, [0.3, 0.7, 0.1]), (0, [0.7, 0.3, 0.1])], ids=["class 1", "class 0"]
)
def test_of_a_linear_network_the_worst_image_is_a_corner(attack, label, expected):
    """The loss rises along -+ sign(w); a pixel without a weight stays as it is."""
    x = torch.tensor([[0.5, 0.5, 0.1]], dtype=torch.float64)
    found = attack(linear([2.0, -1.0, 0.0]), x, torch.tensor([label]), 0.2, bounds=WIDE)
    assert_close(found, torch.tensor([expected], dtype=torch.float64))


@pytest.mark.parametrize("attack", [fgsm, pgd])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.7])
def test_images_stay_within_the_bound_and_between_white_and_black(attack, epsilon, attacked):
    network, x, label = attacked
    found = attack(network, x, label, epsilon)
    assert (found - x).abs().max() <= epsilon * (1 + 1e-12)
    assert found.min() >= -1
    assert found.max() <= 1
    assert torch.equal(found, x) == (epsilon == 0)


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 0.5])
def test_pgd_is_at_least_as_strong_as_fgsm_and_as_no_attack(epsilon, attacked):
    network, x, label = attacked
    once, many = fgsm(network, x, label, epsilon), pgd(network, x, label, epsilon)
    with torch.no_grad():
        margins = [margin(network(y), label) for y in (x, once, many)]
    assert (margins[2] >= margins[0]).all()
    assert (margins[2] >= margins[1]).all()
    assert margins[2].sum() > margins[1].sum()


def test_restarts_find_more_and_begin_where_the_generator_says(attacked):
    network, x, label = attacked
    state = torch.get_rng_state()
    one, more, again, other = (
        pgd(network, x, label, 0.5, 3, restarts, generator=torch.Generator().manual_seed(seed))
        for restarts, seed in ((1, 0), (9, 0), (9, 0), (9, 1))
    )
    assert torch.equal(more, again)
    assert not torch.equal(more, other)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        few, many = (margin(network(found), label) for found in (one, more))
    assert (many >= few).all()
    assert (many > few + 1e-6).any()


@pytest.mark.parametrize(
    "options",
    [{"epsilon": -0.1}, {"epsilon": 0.1, "steps": 0}, {"epsilon": 0.1, "restarts": 0}],
    ids=str,
)
def test_what_is_refused(options, attacked):
    with pytest.raises(ValueError, match=f"{[*options][-1]}: expected"):
        pgd(*attacked, **options)
