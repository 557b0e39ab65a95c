"""What store, remat and checkpoint keep, and that what changes meanwhile does not change backward."""

import random
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from tests.functions import OnceDifferentiable, Sine
from tests.memory import Watch, peak_bytes
from tests.meta.networks import as_list, image_tasks, meta_gradient, network
from tests.models import Checkpointed, Fn
from tests.oracles import relative
from tests.refused import refused
from tests.rows import rows

MEMORY = ["store", "remat", "checkpoint", "mixed"]
# with Adam's own eps a step is a sign, almost, whose slopes differences cannot follow
RULES = {"sgd": {"inner_lr": 0.05}, "adam": {"inner_lr": 0.02, "rule_options": {"eps": 0.1}}}
STEPS = 3


def learner(name, rule, **options):
    model = name if isinstance(name, nn.Module) else network(name)
    options = {"inner_steps": STEPS, "rule": rule, **RULES[rule], **options}
    return hog.MAML(model, F.mse_loss, **options)


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


@pytest.mark.parametrize("memory", MEMORY[1:])
def test_adapt_is_differentiable_twice_whatever_changes_after_it(memory):
    """Modes and random numbers are those of the first run."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 2)).double()  # fmt: skip
    (support, query), *_ = as_list(image_tasks())
    found = []
    for kind in ("store", memory):
        torch.manual_seed(5)
        maml = learner(model.train(), "sgd", memory=kind)
        adapted, params = maml.adapt(support), list(model.parameters())
        model.eval()
        loss = F.mse_loss(maml(query[0], params=adapted), query[1])
        torch.rand(3)
        g = torch.autograd.grad(loss, params, create_graph=True)
        found.append([*g, *torch.autograd.grad(sum(x.square().sum() for x in g), params)])
    assert relative(*found) < 1e-12


@rows("memory, of", product(MEMORY[1:], ["model", "criterion", "adapt"]))
def test_generators_draw_again_and_data_is_a_constant(memory, of):
    drawn, x = torch.Generator(), torch.randn(5, 2, dtype=torch.float64)
    loss = lambda out, x: (out * torch.rand(5, 2, generator=drawn)).sin().square().sum()  # noqa: E731
    model = Fn(lambda net, x: net.a(x) * net.a(x).data, a=nn.Linear(2, 2)).double()
    if of == "model":
        model = Fn(lambda net, x: net.a(x * torch.rand(5, 2, generator=net.drawn)).sin(), a=model.a)
        model.drawn, loss = drawn, F.mse_loss
    found, w = [], x[0].clone().requires_grad_()
    for kind in ("store", memory):
        drawn.manual_seed(0)
        if of == "adapt":
            of_params = lambda p, x: loss(x * p, x)  # noqa: E731
            adapted = hog.meta.adapt(of_params, w, x, hog.meta.sgd(0.1), steps=3, memory=kind)
            found.append(torch.autograd.grad(adapted.sum(), w))
        else:
            maml = hog.MAML(model, loss, inner_steps=3, memory=kind, over_tasks="loop")
            found.append(meta_gradient(maml, [((x, x), (x, x))]))
    assert relative(*found) < 1e-12


def mixed(layer=lambda h: h, **options):
    model = nn.Sequential(
        nn.Flatten(),
        Fn(lambda net, x: net.b(layer(net.a(x))), a=nn.Linear(16, 6), b=nn.Linear(6, 2)),
    )
    return learner(model.double(), "sgd", memory="mixed", **options).loss(image_tasks())


GENERATOR = random.Random(0)
test_what_mixed_refuses = refused({
    "compile": (lambda: mixed(compile="eager"), ValueError, "a graph of all.*Leave out one of the two"),
    "no stand-ins": (lambda: mixed(stand_ins=False), ValueError, "no_grad stops no tangents.*'remat'"),
    "no stand-ins, hypergradient": (lambda: hog.meta.hypergradient(
        lambda p, h: p * h, lambda p, h: p * h, torch.tensor(1.0), torch.tensor(1.0), steps=1,
        rule=hog.meta.sgd(0.1), memory="mixed", stand_ins=False), ValueError, "hypergradient.memory='mixed', stand_ins"),
    "no jvp": (lambda: mixed(Sine.apply), RuntimeError, "got Sine, which has no forward mode. Take"),
    "@once_differentiable": (lambda: mixed(OnceDifferentiable.apply), RuntimeError, "@once_differentiable"),
    "differentiates inside": (lambda: mixed(lambda h: h + h.detach().requires_grad_(), over_tasks="loop"), RuntimeError, "forward mode.*requires_grad_.*Take memory='remat'"),
    "an operation": (lambda: mixed(lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -9, 9)), RuntimeError, "expected operations that torch can differentiate in forward mode.*Take memory='remat'"),
    "other random numbers": (lambda: mixed(lambda h: h * GENERATOR.random()), RuntimeError, "the same when it is run again.*NumPy"),
})  # fmt: skip


def test_mixed_holds_less_of_a_step():
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)]
    batch, peaks = (torch.randn(2, 128, 16), torch.randn(2, 128, 16)), {}
    for memory, remat in product(("remat", "mixed"), (False, True)):
        maml = learner(nn.Sequential(*layers), "sgd", memory=memory, remat=remat, over_tasks="loop")
        peaks[memory, remat] = peak_bytes(partial(maml.loss, [(batch, batch)]), torch.device("cpu"))
    assert peaks["remat", False] > 1.5 * peaks["mixed", False]
    assert peaks["remat", True] > 1.3 * peaks["mixed", True]


# of 7 steps checkpoint keeps every second: the last 2 begin within a chunk
@pytest.mark.parametrize("options", [{}, {"first_order": True}, {"truncate": 2}], ids=str)
@pytest.mark.parametrize("memory", MEMORY[1:])
def test_adapt_of_a_loss_is_differentiable_by_all_that_it_depends_on(memory, options):
    """By parameters that adapt, those that do not, and the batch; twice."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 2)).double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model, "0.*")
    x, found = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), []
    inputs = [*params.values(), x, model[3].weight]
    for kind in ("store", memory):
        torch.manual_seed(3)
        adapted = hog.meta.adapt(
            loss, params, (x, x[:, :2].detach()), hog.meta.adam(0.05, eps=0.1), steps=7, memory=kind,
            **options,
        )  # fmt: skip
        value = sum(p.sin().sum() for p in adapted.values())
        g = torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)
        squares = sum(part.square().sum() for part in g)
        found.append([*g, *torch.autograd.grad(squares, inputs, materialize_grads=True)])
    assert relative(*found) < 1e-12


def test_a_loss_or_rule_that_closes_over_a_tensor_is_not_recomputed():
    constant, given = torch.tensor(2.0, requires_grad=True), (torch.tensor(1.0), 2.0)
    for loss, rule, says in (
        (lambda p, x: (p * constant).square(), hog.meta.sgd(0.1), "closes over .* in `batch`"),
        (lambda p, x: p.square(), hog.meta.sgd(constant), r"rule=\.\.\..*memory='store', or"),
    ):
        with pytest.raises(ValueError, match=f"adapt.*{says}"):
            hog.meta.adapt(loss, *given, rule, steps=3, memory="remat")


def checkpointed(again=True):
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh())
    return Checkpointed(body, nn.Linear(6, 2), again).double()


@pytest.mark.filterwarnings("ignore:MAML loops over the tasks")
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("first_order", [False, True])
def test_models_with_checkpoints_in_them(memory, first_order):
    tasks = image_tasks()
    torch.manual_seed(0)
    plain, again = checkpointed(again=False), checkpointed()
    again.load_state_dict(plain.state_dict())
    options = {"memory": memory, "first_order": first_order}
    expected = meta_gradient(learner(plain, "sgd", **options), tasks)
    assert relative(meta_gradient(learner(again, "sgd", **options), tasks), expected) < 1e-12


def test_adapted_parameters_and_checkpoints_raise_where_they_would_be_wrong():
    maml = learner(checkpointed(), "sgd")
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
    def held(memory, steps):
        maml = learner("none", "sgd", memory=memory, inner_steps=steps, over_tasks="loop")
        (support, _), *_ = as_list(image_tasks(shots=50))
        with Watch() as watch:
            kept = maml.adapt(support)
        return watch.now if kept else None

    parameters = sum(p.numel() * 8 for p in network("none").parameters())
    growth = {memory: held(memory, 12) - held(memory, 6) for memory in MEMORY}
    assert growth["remat"] <= growth["mixed"] <= 6 * (parameters + 16)  # a loss, and its weight
    assert growth["checkpoint"] < growth["remat"]
    assert growth["store"] > 3 * growth["remat"]
