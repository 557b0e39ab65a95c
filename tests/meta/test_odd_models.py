"""Meta-gradients of models that break inner loops elsewhere, against differences of a loop written here.

The oracle shares no code with hoglib: `torch.func.functional_call`, first derivatives, torch.optim.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.long_tail import all_but
from tests.meta.odd_cases import CASES, WITHOUT, Case, x4
from tests.models import Fn
from tests.unchanged import unchanged

MEMORY = ("store", "remat", "checkpoint", "mixed")
STEPS, LR = 3, 0.05
REVERSE_ONLY = ("custom Function", "energy and force")  # refused by memory="mixed"


def build(name: str) -> Case:
    torch.manual_seed(3)
    case: Case = CASES[name]()
    return case


def adapted(case: Case, params: Any, batch: Any, rule: str) -> Any:
    """The parameters after the inner loop, by torch.optim."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    kinds = {
        "momentum": lambda p: torch.optim.SGD(p, LR, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, LR, eps=0.1),
    }
    optimizer = kinds[rule](list(leaves.values()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        value(case, leaves, batch).backward(inputs=list(leaves.values()))
        for p in leaves.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
    return {n: p.detach() for n, p in leaves.items()}


def value(case: Case, params: Any, batch: Any) -> torch.Tensor:
    buffers = {f"model.{n}": b.clone() for n, b in case.model.named_buffers()}
    named = {f"model.{n}": p for n, p in params.items()}
    return torch.func.functional_call(case, {**named, **buffers}, (batch,))


def meta_loss(case: Case, params: Any, tasks: Any, rule: str) -> torch.Tensor:
    token = WITHOUT.set(True)
    try:
        found = [value(case, adapted(case, params, s, rule), q).detach() for s, q in tasks]
    finally:
        WITHOUT.reset(token)
    return torch.stack(found).mean()


def learner(case: Case, rule: str, **options: Any) -> hog.MAML:
    return hog.MAML(
        case.model, case.criterion, forward=case.run, inner_lr=LR, inner_steps=STEPS, rule=rule,
        rule_options={"eps": 0.1} if rule == "adam" else None, **options,
    )  # fmt: skip


def along(grads: Any, v: Any) -> float:
    real = lambda x: torch.view_as_real(x) if x.is_complex() else x  # noqa: E731
    return sum(float((real(grads[n]) * real(part)).sum()) for n, part in v.items())


# A rule sees tensors by name, whatever model they are of: adam gets those whose tensors are odd.
BY_ADAM = (
    "complex", "tied", "lists of parameters", "numbers", "frozen part", "unused and empty", "remat inside",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of vmap
@pytest.mark.parametrize(
    ("name", "rule"),
    all_but(
        lambda name, rule: rule == "momentum" or name in BY_ADAM,
        itertools.product(CASES, ["momentum", "adam"]),
    ),
)
def test_meta_gradient(name, rule):
    case = build(name)
    tasks, model = case.tasks(), case.model
    params = {n: p.detach().clone() for n, p in hog.trainable_params(model).items()}
    expected = meta_loss(case, params, tasks, rule)
    found: list[Any] = []
    modes = ("loop", "vmap") if case.vmap else ("loop",)
    memories = MEMORY[: 3 if name in REVERSE_ONLY else 4] if rule == "momentum" else MEMORY[:2]
    for memory, over in itertools.product(memories, modes):
        if case.vmap and (memory, over) in (("remat", "vmap"), ("checkpoint", "loop")):
            continue
        maml = learner(case, rule, memory=memory, over_tasks=over)
        maml.zero_grad()
        with unchanged(model, grads=False):
            loss = maml.loss(tasks)
            loss.backward()
        assert abs(loss.detach() - expected) < 1e-11 * max(1, abs(expected))
        found.append({n: p.grad for n, p in hog.trainable_params(model).items()})
        apart = sum((found[-1][n] - found[0][n]).abs().square().sum() for n in params) ** 0.5
        assert apart < 1e-10 * sum(g.abs().square().sum() for g in found[0].values()) ** 0.5
    if not case.vmap:
        with pytest.raises(RuntimeError, match="over_tasks='loop'"), unchanged(model):
            learner(case, rule, over_tasks="vmap").loss(tasks)
    if rule == "momentum" and case.differences:  # Adam's step has kinks
        torch.manual_seed(1)
        v = {n: torch.randn_like(p) for n, p in params.items()}

        def at(h):
            moved = {n: p + h * v[n] for n, p in params.items()}
            return float(meta_loss(case, moved, tasks, rule))

        coarse, fine = ((at(h) - at(-h)) / (2 * h) for h in (2e-4, 1e-4))
        slope = (4 * fine - coarse) / 3
        assert abs(along(found[0], v) - slope) < 1e-6 * max(abs(slope), 1e-2)


def test_models_that_make_their_input_require_grad():
    """Which leaves the tasks as they were, so that they can be given again; and values alone."""

    def run(net, x):
        x.requires_grad_()
        return torch.autograd.grad(net.energy(x).sum(), x, create_graph=True)[0]

    torch.manual_seed(0)
    model = Fn(run, energy=nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
    case = Case(model, x4, (4,), vmap=False)
    tasks, options = case.tasks(), {"inner_lr": LR, "over_tasks": "loop"}
    maml = hog.MAML(model, F.mse_loss, inner_steps=STEPS, **options)
    first = maml.loss(tasks)
    with torch.no_grad():
        assert_close(maml.loss(tasks), first)
    assert not any(x.requires_grad for task in tasks for part in task for x in part)
    reptile = hog.meta.Reptile(model, F.mse_loss, inner_steps=STEPS, **options)
    implicit = hog.meta.IMAML(model, F.mse_loss, inner_lr=LR, inner_steps=STEPS)
    for one in (reptile, implicit):
        assert_close(one.loss(tasks), one.loss(tasks))


class Fails(nn.Module):
    """Raises in its n-th call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.left, self.error = 0, RuntimeError

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise self.error("planned")
        return self.body(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("over", ["loop", "vmap"])
def test_an_exception_leaves_the_model_as_it_was(over, memory, error):
    case = Case(Fails(), x4)
    tasks = case.tasks()
    maml = learner(case, "momentum", memory=memory, over_tasks=over, batch_norm="per_step")
    whole = maml.loss(tasks).detach()
    raised = 0
    for call in range(1, 2 * STEPS + 1):
        case.model.left, case.model.error = call, error
        kept = {n: b.clone() for n, b in maml.statistics.named_buffers()}
        try:
            with unchanged(case.model):
                maml.loss(tasks)
        except (ValueError, RuntimeError, KeyboardInterrupt):
            raised += 1
            assert all(torch.equal(b, kept[n]) for n, b in maml.statistics.named_buffers())
    assert raised >= STEPS
    case.model.left = 0
    assert torch.equal(maml.loss(tasks).detach(), whole)
