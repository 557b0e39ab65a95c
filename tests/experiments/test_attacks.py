"""Attacks on networks where the worst image is known, and what they promise of any network."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.evaluation.attacks import fgsm, input_gradient, is_correct, margin, pgd
from experiments.models.networks import mlp

WIDE = (-100.0, 100.0)


def linear(weight, bias=0.0):
    """Logits (0, w x + b): class 1 where w x + b is above 0."""
    network = nn.Linear(len(weight), 2).double()
    with torch.no_grad():
        network.weight.copy_(torch.stack([torch.zeros(len(weight)), torch.tensor(weight)]))
        network.bias.copy_(torch.tensor([0.0, bias]))
    return network


@pytest.fixture
def problem():
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
    ids=["right", "wrong", "worse", "tie", "nan"],
)
def test_the_margin(logits, label, expected):
    found = margin(torch.tensor([logits]), torch.tensor([label]))
    assert_close(found, torch.tensor([expected]))
    network = nn.Identity()
    assert bool(is_correct(network, torch.tensor([logits]), torch.tensor([label]))) == (
        expected < 0
    )


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
def test_a_linear_network_falls_where_the_bound_passes_its_distance(attack):
    """w x + b = 0.6 changes by up to epsilon |w|_1 = 3 epsilon: a mistake from 0.2 on."""
    network, x = linear([2.0, -1.0], 0.1), torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    label = torch.tensor([1])
    for epsilon, right in ((0.0, True), (0.19, True), (0.21, False)):
        found = attack(network, x, label, epsilon, bounds=WIDE)
        assert bool(is_correct(network, found, label)) == right, epsilon


@pytest.mark.parametrize("attack", [fgsm, pgd])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.7])
def test_images_stay_within_the_bound_and_between_white_and_black(attack, epsilon, problem):
    network, x, label = problem
    found = attack(network, x, label, epsilon)
    assert (found - x).abs().max() <= epsilon * (1 + 1e-12)
    assert found.min() >= -1
    assert found.max() <= 1
    assert torch.equal(found, x) == (epsilon == 0)


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 0.5])
def test_pgd_is_at_least_as_strong_as_fgsm_and_as_no_attack(epsilon, problem):
    network, x, label = problem
    once, many = fgsm(network, x, label, epsilon), pgd(network, x, label, epsilon)
    with torch.no_grad():
        margins = [margin(network(y), label) for y in (x, once, many)]
    assert (margins[2] >= margins[0]).all()
    assert (margins[2] >= margins[1]).all()
    assert margins[2].sum() > margins[1].sum()


def test_restarts_find_more(problem):
    network, x, label = problem
    found = [pgd(network, x, label, 0.5, 5, n, generator=torch.Generator().manual_seed(0)) for n in (1, 9)]  # fmt: skip
    with torch.no_grad():
        one, more = (margin(network(y), label) for y in found)
    assert (more >= one).all()
    assert (more > one + 1e-6).any()


def test_the_generator_says_where_restarts_begin(problem):
    network, x, label = problem
    state = torch.get_rng_state()
    same, again, other = (
        pgd(network, x, label, 0.5, 2, 3, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(same, again)
    assert not torch.equal(same, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_no_gradient_is_left_and_none_is_missed(mode, problem):
    network, x, label = problem
    expected = pgd(network, x, label, 0.2, 3, 1)
    with mode():
        given = x.clone(), label.clone()  # tensors of that mode
        found = pgd(network, *given, 0.2, 3, 1)
        once = fgsm(network, *given, 0.2)
    assert_close(found, expected, rtol=0, atol=0)
    for p in network.parameters():
        assert p.grad is None
    assert not any(y.requires_grad for y in (found, once, given[0]))


def test_the_gradient_is_that_of_each_image_alone(problem):
    network, x, label = problem
    every = input_gradient(network, x, label)
    for i in (0, 7):
        y = x[i : i + 1].clone().requires_grad_()
        nn.functional.cross_entropy(network(y), label[i : i + 1]).backward()
        assert_close(every[i : i + 1], y.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -0.1}, "epsilon: expected"),
        ({"epsilon": float("nan")}, "epsilon: expected"),
        ({"epsilon": 0.1, "steps": 0}, "steps: expected a whole number of at least 1"),
        ({"epsilon": 0.1, "restarts": 0}, "restarts: expected a whole number of at least 1"),
    ],
    ids=["negative", "nan", "no step", "no start"],
)
def test_what_is_refused(options, message, problem):
    with pytest.raises(ValueError, match=message):
        pgd(*problem, **options)
