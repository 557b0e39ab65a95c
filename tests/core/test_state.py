"""Saving and restoring random numbers, settings, and the state of modules."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from hoglib._core.modules.state import RandomState, StateGuard, preserve_random_state, same
from tests.rows import rows


class Drawing(nn.Module):
    """Keeps generators of its own, and changes all that a module can change as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.history: list[torch.Tensor] = []
        self.total = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.add_(1)
        self.history.append(x)
        self.total += 1
        self.calls = len(self.history)
        with torch.no_grad():
            self.weight.add_(1)
        return x * self.weight + self.python.random() + self.numpy.random()


def draws(generator: torch.Generator) -> list[float]:
    numbers = torch.rand(1).item(), torch.rand(1, generator=generator).item()
    return [*numbers, random.random(), np.random.rand()]


def test_all_random_generators_are_restored() -> None:
    generator = torch.Generator()
    with preserve_random_state(generator, None):
        first = draws(generator)
    with preserve_random_state(generator):
        assert draws(generator) == first
    with preserve_random_state():
        again = draws(generator)
    assert again == first
    assert draws(generator)[1] != first[1]  # it was not among those given


def test_a_generator_that_has_drawn_is_named() -> None:
    generator, module = torch.Generator(), Drawing()
    state = RandomState([generator], [module])
    torch.rand(1)
    assert state.drawn() == []
    module.numpy.random()
    assert state.drawn() == ["a generator that it keeps"]
    draws(generator)
    assert len(state.drawn()) == 4
    state.restore()
    assert state.drawn() == []


@pytest.mark.parametrize("double", [False, True])
def test_a_module_runs_again_alike_and_is_left_as_it_was(double: bool) -> None:
    module, x = Drawing(), torch.ones(2)
    buffer, weight, history = module.mean, module.weight, module.history
    with StateGuard([module], double=double) as state:
        runs = []
        for _ in range(2):
            state.begin()
            runs.append(module(x.double() if double else x).detach())
        assert torch.equal(*runs)
        assert (module, "calls") in state.changed_attributes()
        assert module.mean.dtype is (torch.float64 if double else torch.float32)
    assert (module.mean is buffer, module.weight is weight, module.history is history) == (
        True,
    ) * 3
    assert torch.equal(buffer, torch.zeros(2))
    assert torch.equal(weight, torch.ones(2))
    assert torch.equal(module.total, torch.zeros(2))
    assert history == []
    assert not hasattr(module, "calls")
    assert module.python.random() == random.Random(0).random()


NAN, INF, LARGEST = float("nan"), float("inf"), torch.finfo(torch.float32).max


@rows(
    "a, b, alike", [(NAN, NAN, True), (NAN, 0.0, False), (INF, LARGEST, False), (-INF, INF, False)]
)
def test_values_that_are_not_finite_are_told_apart(a: float, b: float, alike: bool) -> None:
    assert same(torch.tensor([1.0, a]), torch.tensor([1.0, b])) == alike
    assert same(torch.tensor([1.0 + 0j, a]), torch.tensor([1.0 + 0j, b])) == alike
