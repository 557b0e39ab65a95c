"""iMAML on tasks whose minima are solutions of linear equations, which autograd goes through; Reptile by
its definition: copies of the model, torch's own optimizers, and differences of weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

import hoglib as hog
from tests.functions import OnceDifferentiable
from tests.meta.networks import Scaled, as_list, image_tasks, meta_gradient, network
from tests.models import Through
from tests.oracles import relative
from tests.refused import refused

LAMBDA = 2.0
ENOUGH = {"strength": LAMBDA, "inner_lr": 0.2, "inner_steps": 100, "iterations": 20}


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def stack(count, features=3):
    x = rand(3, count, features)
    return x, x @ rand(features, 1) + 0.3 * rand(3, count, 1)


TASKS = stack(6), stack(4)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False).double()


def with_body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)).double()


def body_of(found, x):
    return x @ found["model.0.weight"].T if "model.0.weight" in found else x


def minimum(found, support):
    """argmin_w size mean (h w - y)^2 + lambda / 2 |w - theta|^2, with h what the body gives."""
    x, y = support
    head = "model.1.weight" if "model.1.weight" in found else "model.weight"
    theta, h = found[head], body_of(found, x)
    size = found["inner_loss.log_size"].exp() if "inner_loss.log_size" in found else 1.0
    A = 2 * size / len(y) * h.T @ h + LAMBDA * torch.eye(h.shape[1], dtype=h.dtype)
    return torch.linalg.solve(A, 2 * size / len(y) * h.T @ y + LAMBDA * theta.T).T


def closed_form(learner):
    found = {n: p.detach().requires_grad_() for n, p in learner.named_parameters()}
    losses = [
        F.mse_loss(body_of(found, x) @ minimum(found, support).T, y)
        for support, (x, y) in as_list(TASKS)
    ]
    value = torch.stack(losses).mean()
    grads = torch.autograd.grad(value, list(found.values()))
    return value.detach(), dict(zip(found, grads, strict=True))


CASES = {
    "everything adapts": (linear, {}),
    "the head adapts (ANIL)": (with_body, {"inner_params": ["1"]}),
    "a learned inner loss": (linear, {"inner_loss": Scaled()}),
    "both": (with_body, {"inner_params": ["1"], "inner_loss": Scaled()}),
    "neumann": (linear, {"solver": "neumann", "iterations": 100}),
    "by another rule": (linear, {"rule": "momentum", "rule_options": {"momentum": 0.5}}),
    "tasks as a list": (linear, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_closed_form(case):
    model, options = CASES[case]
    learner = hog.meta.IMAML(model(), F.mse_loss, **{**ENOUGH, **options})
    value, expected = closed_form(learner)
    tasks = as_list(TASKS) if "list" in case else TASKS
    assert_close(learner.loss(tasks).detach(), value, rtol=1e-10, atol=0)
    ours = meta_gradient(learner, tasks)
    assert ours.keys() == expected.keys()
    for name in expected:
        assert_close(ours[name], expected[name], rtol=1e-9, atol=1e-12)
    assert learner.residual.system.max() < 1e-10
    assert learner.residual.stationarity.max() < 1e-10


def test_the_residual_tells_how_far_it_is_from_both_assumptions():
    """For each task: after two steps from theta, and with one step of conjugate gradients."""
    model = linear()
    learner = hog.meta.IMAML(
        model, F.mse_loss, strength=LAMBDA, inner_lr=0.1, inner_steps=2, iterations=1
    )
    learner.loss(TASKS)
    theta = model.weight.detach()
    for i, ((x, y), (qx, qy)) in enumerate(as_list(TASKS)):
        A = 2 / len(y) * x.T @ x + LAMBDA * torch.eye(3, dtype=x.dtype)
        slope = lambda w, A=A, x=x, y=y: w @ A - 2 / len(y) * y.T @ x - LAMBDA * theta  # noqa: E731
        w = theta - 0.1 * slope(theta)
        w = w - 0.1 * slope(w)
        assert_close(learner.residual.stationarity[i], slope(w).norm())
        v = (2 / len(qy) * (qx @ w.T - qy).T @ qx)[0]
        step = v * (v @ v) / (v @ A @ v)
        assert_close(learner.residual.system[i], (v - A @ step).norm() / v.norm())


def test_where_the_inner_loop_converges_it_is_the_gradient_of_all_its_steps():
    tasks, model = image_tasks(), network("LayerNorm")
    options = {"strength": 10.0, "inner_lr": 0.03, "inner_steps": 100, "iterations": 200}
    ours = meta_gradient(hog.meta.IMAML(model, F.mse_loss, **options), tasks)
    theta, values = dict(model.named_parameters()), []
    for (sx, sy), (qx, qy) in as_list(tasks):
        params = theta
        for _ in range(100):
            value = F.mse_loss(functional_call(model, params, (sx,)), sy)
            value = value + 5 * sum((params[n] - theta[n]).square().sum() for n in theta)
            grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
            params = {n: p - 0.03 * g for (n, p), g in zip(params.items(), grads, strict=True)}
        values.append(F.mse_loss(functional_call(model, params, (qx,)), qy))
    expected = torch.autograd.grad(torch.stack(values).mean(), list(theta.values()))
    assert relative(list(ours.values()), list(expected)) < 1e-8


class Saddle(nn.Module):
    """f(w) = -w^2 near 0 and growing far from it: no minimum where it starts."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.1, 0.2], dtype=torch.float64))

    def forward(self, x):
        return x * (self.w**4 - 5 * self.w**2).sum()


def test_negative_curvature_warns_and_its_solution_is_used():
    batch = torch.ones(2, 1, dtype=torch.float64)
    tasks = [((batch, batch), (batch, batch))]
    learner = hog.meta.IMAML(
        Saddle(), lambda out, y: out.mean(), strength=1.0, inner_lr=1e-3, inner_steps=1
    )
    with pytest.warns(UserWarning, match=r"direction of zero or negative curvature.*more damping"):
        loss = learner.loss(tasks)
    loss.backward()
    assert torch.isfinite(learner.model.w.grad).all()
    assert learner.residual.system > 0.5
    steady = hog.meta.IMAML(
        Saddle(), lambda out, y: out.mean(), strength=1.0, inner_lr=1e-3, inner_steps=1,
        damping=20.0,
    )  # fmt: skip
    steady.loss(tasks)
    assert steady.residual.system < 1e-8


ERRORS = {
    "no strength": ({"strength": 0}, ValueError, "strength: expected a number greater than 0"),
    "an unknown solver": ({"solver": "lu"}, ValueError, "solver: expected one of cg, neumann"),
    "statistics per step": ({"batch_norm": "per_step"}, ValueError, "a minimum does not depend on the steps"),
    "no iterations": ({"iterations": 0}, ValueError, "iterations: expected an integer of at least 1"),
}  # fmt: skip


test_errors = refused(ERRORS, lambda given: hog.meta.IMAML(linear(), F.mse_loss, **given))


# Reptile

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
def test_reptile_by_its_definition(name, rule, over_tasks):
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


def test_nothing_is_differentiated_twice():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 2), Through(OnceDifferentiable.apply)
    ).double()
    learner = hog.meta.Reptile(model, F.mse_loss, inner_lr=0.05, inner_steps=3, over_tasks="loop")
    expected, _ = moved(model, as_list(image_tasks()), 3)
    assert relative(meta_gradient(learner, image_tasks()), expected) < 1e-12


@pytest.mark.parametrize("which", ["inner_loss", "criterion"])
def test_a_learned_loss_would_get_no_gradient(which):
    criterion, options = (Scaled(), {}) if which == "criterion" else (F.mse_loss, {which: Scaled()})
    with pytest.raises(ValueError, match=f"without parameters of their own, got {which}.log_size"):
        hog.meta.Reptile(network("none"), criterion, **options)
    frozen = Scaled().requires_grad_(False)
    criterion, options = (frozen, {}) if which == "criterion" else (F.mse_loss, {which: frozen})
    assert hog.meta.Reptile(network("none"), criterion, **options).loss(image_tasks()) > 0
