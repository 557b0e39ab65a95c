"""Reptile by its definition: copies of the model, torch's own optimizers, and differences of weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from tests.meta.networks import as_list, image_tasks, meta_gradient, network
from tests.oracles import relative

# with its own eps a step of Adam is a sign, almost: of rounding, for a bias before batch norm
RULES = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {"betas": (0.0, 0.999), "eps": 0.1}),  # the paper's betas
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "eps": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.9, "eps": 0.1}),
}
NAMES = ["none", "BatchNorm", "LayerNorm", "attention", "hoglib ops"]


def moved(model, tasks, steps, rule="sgd", lr=0.05, adapting=""):
    """mean_i (theta - theta_i) and mean_i L(theta_i; query_i)."""
    optimizer, options = RULES[rule]
    total, value = {n: torch.zeros_like(p) for n, p in model.named_parameters()}, 0.0
    for (x, y), (qx, qy) in tasks:
        twin = copy.deepcopy(model)
        chosen = [p for n, p in twin.named_parameters() if n.startswith(adapting)]
        inner = optimizer(chosen, lr=lr, **options)
        for _ in range(steps):
            inner.zero_grad()
            F.mse_loss(twin(x), y).backward()
            inner.step()
        value += F.mse_loss(twin(qx), qy).item() / len(tasks)
        for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            total[n] += (p - q).detach() / len(tasks)
    return {f"model.{n}": g for n, g in total.items()}, value


@pytest.mark.parametrize("over_tasks", ["loop", "vmap"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_definition(name, rule, over_tasks):
    tasks = image_tasks()
    learner = hog.meta.Reptile(
        network(name), F.mse_loss, inner_lr=0.05, inner_steps=4, rule=rule,
        rule_options=RULES[rule][1], over_tasks=over_tasks,
    )  # fmt: skip
    expected, value = moved(learner.model, as_list(tasks), 4, rule)
    assert abs(learner.loss(tasks).item() - value) < 1e-10
    assert relative(meta_gradient(learner, tasks), expected) < 1e-12


def test_uneven_tasks_and_a_part_that_adapts():
    tasks = [image_tasks(1, shots, queries) for shots, queries in ((2, 3), (5, 1))]
    tasks = [as_list(task)[0] for task in tasks]
    learner = hog.meta.Reptile(
        network("none"), F.mse_loss, inner_lr=0.05, inner_steps=3, inner_params=["3"]
    )
    ours = meta_gradient(learner, tasks)
    assert not ours["model.0.weight"].any()
    assert relative(ours, moved(learner.model, tasks, 3, adapting="3")[0]) < 1e-10


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0].tanh() ** 2)


class UsesOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, x):
        return Once.apply(self.layer(x.flatten(1)))


def test_nothing_is_differentiated_twice():
    torch.manual_seed(0)
    model = UsesOnce().double()
    learner = hog.meta.Reptile(model, F.mse_loss, inner_lr=0.05, inner_steps=3, over_tasks="loop")
    expected, _ = moved(model, as_list(image_tasks()), 3)
    assert relative(meta_gradient(learner, image_tasks()), expected) < 1e-12


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return self.size * F.mse_loss(outputs, targets)


@pytest.mark.parametrize("which", ["inner_loss", "criterion"])
def test_a_learned_loss_would_get_no_gradient(which):
    criterion, options = (
        (Learned(), {}) if which == "criterion" else (F.mse_loss, {which: Learned()})
    )
    with pytest.raises(ValueError, match=f"without parameters of their own, got {which}.size"):
        hog.meta.Reptile(network("none"), criterion, **options)
    frozen = Learned().requires_grad_(False)
    criterion, options = (frozen, {}) if which == "criterion" else (F.mse_loss, {which: frozen})
    assert hog.meta.Reptile(network("none"), criterion, **options).loss(image_tasks()) > 0
