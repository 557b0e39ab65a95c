"""Store, remat and checkpoint, by loop and by vmap, give one meta-gradient: that of finite differences."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from tests.long_tail import all_but
from tests.meta.networks import NETWORKS, as_list, image_tasks, meta_gradient, network
from tests.oracles import random_like, relative

MEMORY = ["store", "remat", "checkpoint"]
# with Adam's own eps a step is a sign, almost, whose slopes differences cannot follow
RULES = {
    "sgd": {"inner_lr": 0.05},
    "momentum": {"inner_lr": 0.05},
    "adam": {"inner_lr": 0.02, "rule_options": {"eps": 0.1}},
}
STEPS = 3


def learner(name, rule, **options):
    model = name if isinstance(name, nn.Module) else network(name)
    options = {"inner_steps": STEPS, "rule": rule, **RULES[rule], **options}
    return hog.MAML(model, F.mse_loss, **options)


@functools.cache
def by_differences(name, rule):
    """The oracle, once for all ways to memory and tasks."""
    maml, tasks = learner(name, rule), image_tasks()

    def meta_loss(params):
        with torch.no_grad():
            losses = [
                maml.objective(maml.adapt(support, params=params), query)
                for support, query in as_list(tasks)
            ]
        return torch.stack(losses).mean()

    params = {n: p.detach() for n, p in hog.trainable_params(maml.model).items()}
    torch.manual_seed(1)
    return [(v, slope(meta_loss, params, v)) for v in (random_like(params) for _ in range(3))]


def slope(function, params, v, eps=1e-5):
    """d function(params + t v) / dt at 0, by Richardson's central differences."""
    at = lambda t: function({n: p + t * v[n] for n, p in params.items()})  # noqa: E731
    coarse, fine = ((at(h) - at(-h)) / (2 * h) for h in (2 * eps, eps))
    return (4 * fine - coarse) / 3


@functools.cache
def stored(name, rule):
    return meta_gradient(learner(name, rule, over_tasks="loop"), image_tasks())


# All ways with the rule that keeps most, and each of them with the others
WAYS = [("store", "loop"), ("store", "vmap"), ("remat", "loop"), ("remat", "vmap"), ("checkpoint", "loop"), ("checkpoint", "vmap")]  # fmt: skip
FEW = [("store", "loop"), ("remat", "vmap"), ("checkpoint", "loop")]


@pytest.mark.parametrize(
    ("name", "rule", "memory", "over_tasks"),
    all_but(
        lambda name, rule, *way: rule == "adam" or way in FEW,
        [(name, rule, *way) for name in NETWORKS for rule in RULES for way in WAYS],
    ),
)
def test_one_meta_gradient(name, rule, memory, over_tasks):
    ours = meta_gradient(learner(name, rule, memory=memory, over_tasks=over_tasks), image_tasks())
    assert relative(ours, stored(name, rule)) < 1e-12
    for v, expected in by_differences(name, rule):
        along = sum((ours[f"model.{n}"] * part).sum() for n, part in v.items())
        assert abs(along - expected) < 1e-6 * abs(expected)


@pytest.mark.parametrize("over_tasks", ["loop", "vmap"])
@pytest.mark.parametrize("memory", MEMORY[1:])
def test_dropout_draws_once(memory, over_tasks):
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 2)
    ).double()
    found = []
    for kind in ("store", memory):
        torch.manual_seed(5)
        maml = learner(model, "sgd", memory=kind, over_tasks=over_tasks)
        found.append(meta_gradient(maml, image_tasks()))
    assert relative(*found) < 1e-12


@pytest.mark.parametrize("memory", MEMORY)
def test_steps_that_do_not_divide(memory):
    options = {"inner_steps": 7, "over_tasks": "loop"}
    ours = meta_gradient(learner("LayerNorm", "adam", memory=memory, **options), image_tasks())
    expected = meta_gradient(learner("LayerNorm", "adam", **options), image_tasks())
    assert relative(ours, expected) < 1e-12


@pytest.mark.parametrize("memory", MEMORY[1:])
def test_adapt_is_differentiable_to_second_order(memory):
    """A Hessian-vector product of a meta-loss that is written with adapt."""
    (support, query), *_ = as_list(image_tasks())
    found = []
    for kind in ("store", memory):
        maml = learner("LayerNorm", "sgd", memory=kind)
        params = list(maml.parameters())
        loss = F.mse_loss(maml(query[0], params=maml.adapt(support)), query[1])
        g = torch.autograd.grad(loss, params, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in g), params))
    assert relative(*found) < 1e-12


@pytest.mark.parametrize("memory", MEMORY[1:])
def test_what_changes_after_adapt_does_not_change_its_backward(memory):
    """Modes and random numbers are those of the first run."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Dropout(0.4), nn.Linear(6, 2)).double()
    (support, query), *_ = as_list(image_tasks())
    found = []
    for kind in ("store", memory):
        torch.manual_seed(5)
        model.train()
        maml = learner(model, "sgd", memory=kind)
        adapted = maml.adapt(support)
        model.eval()
        loss = F.mse_loss(maml(query[0], params=adapted), query[1])
        torch.rand(3)
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert relative(*found) < 1e-12


class Checkpointed(nn.Module):
    """Runs its first part again in backward, where its own parameters are back in their places."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Plain(Checkpointed):
    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.filterwarnings("ignore:MAML loops over the tasks")
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("first_order", [False, True])
def test_models_with_checkpoints_in_them(memory, first_order):
    tasks = image_tasks()
    torch.manual_seed(0)
    plain, checkpointed = Plain().double(), Checkpointed().double()
    checkpointed.load_state_dict(plain.state_dict())
    options = {"memory": memory, "first_order": first_order}
    expected = meta_gradient(learner(plain, "sgd", **options), tasks)
    assert relative(meta_gradient(learner(checkpointed, "sgd", **options), tasks), expected) < 1e-12


def test_adapted_parameters_and_checkpoints_raise_where_they_would_be_wrong():
    maml = learner(Checkpointed().double(), "sgd")
    (support, query), *_ = as_list(image_tasks())
    with pytest.raises(RuntimeError, match=r"use .*memory='remat'|Use memory='remat'"):
        maml.adapt(support)
    maml.memory = "remat"
    adapted = maml.adapt(support)
    with pytest.raises(RuntimeError, match=r"maml.loss\(tasks\)"):
        maml(query[0], params=adapted)
    with torch.no_grad():
        assert maml(query[0], params=maml.adapt(support)).shape == (4, 2)


def test_remat_keeps_parameters_only():
    """Tensors that autograd saves, beyond parameters, do not grow with the number of steps."""

    def saved(memory, steps):
        maml = learner("none", "sgd", memory=memory, inner_steps=steps, over_tasks="loop")
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        (support, _), *_ = as_list(image_tasks(shots=50))
        if memory == "store":
            del pack
        graph = maml.adapt(support)
        seen, pending = {}, [p.grad_fn for p in graph.values()]
        visited = set()
        while pending:
            node = pending.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            for name in dir(node):
                if name.startswith("_saved_") or name == "saved_tensors":
                    found = getattr(node, name)
                    for x in found if isinstance(found, tuple | list) else [found]:
                        if isinstance(x, torch.Tensor):
                            storage = x.untyped_storage()
                            seen[storage.data_ptr()] = storage.nbytes()
            pending += [parent for parent, _ in node.next_functions]
        return sum(seen.values())

    parameters = sum(p.numel() * 8 for p in network("none").parameters())
    growth = {memory: saved(memory, 12) - saved(memory, 6) for memory in MEMORY}
    assert growth["remat"] <= 6 * parameters * 1.1
    assert growth["checkpoint"] < growth["remat"]
    assert growth["store"] > 3 * growth["remat"]
