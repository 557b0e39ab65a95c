"""The meta-gradient: loop against vmap, against finite differences, first- against second-order."""

import copy
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.meta.tasks import prefer_vmap, to_stacks
from tests.long_tail import FULL
from tests.meta.networks import as_list
from tests.models import MODELS, Fn, build
from tests.oracles import random_like, relative, slopes_by_differences
from tests.refused import refused
from tests.unchanged import unchanged

STEPS = [1, 3]
ORDERS = pytest.mark.parametrize("first_order", [False, True], ids=["second order", "first order"])


def stacks(tasks=3, shots=4, queries=5):
    rand = lambda n: torch.randn(tasks, n, 2, dtype=torch.float64)  # noqa: E731
    return (rand(shots), rand(shots)), (rand(queries), rand(queries))


def maml(name, **options):
    return hog.MAML(build(name), F.mse_loss, **{"inner_lr": 0.1, **options})


def meta_gradient(learner, tasks):
    learner.zero_grad()
    learner.loss(tasks).backward()
    return {n: p.grad.clone() for n, p in hog.trainable_params(learner.model).items()}


@ORDERS
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_loop_equals_vmap(name, steps, first_order):
    tasks = stacks()
    options = {"inner_steps": steps, "first_order": first_order}
    by_vmap = meta_gradient(maml(name, over_tasks="vmap", **options), tasks)
    by_loop = meta_gradient(maml(name, over_tasks="loop", **options), tasks)
    of_list = meta_gradient(maml(name, **options), as_list(tasks))
    assert relative(by_vmap, by_loop) < 1e-12
    assert relative(of_list, by_loop) < 1e-12


def test_parameters_that_share_one_gradient():
    # autograd returns one tensor as the gradient of both summands, into which a loop must not add twice
    def shift():
        return nn.Parameter(torch.zeros(2, dtype=torch.float64))

    torch.manual_seed(0)
    net = nn.Linear(2, 2, bias=False).double()
    made = Fn(lambda fn, x: fn.net(x) + (fn.a + fn.b), net=net, a=shift(), b=shift())
    tasks = stacks()
    found = [
        meta_gradient(
            hog.MAML(made, F.mse_loss, inner_lr=0.1, first_order=True, over_tasks=over),
            tasks,
        )
        for over in ("vmap", "loop")
    ]
    assert relative(*found) < 1e-12


# That a loop over tasks equals vmap is tested above.
@pytest.mark.parametrize("over_tasks", [pytest.param("vmap", marks=FULL), "loop"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_second_order_equals_finite_differences_of_the_meta_loss(name, steps, over_tasks):
    tasks = stacks()
    learner = maml(name, inner_steps=steps, over_tasks=over_tasks)
    ours = meta_gradient(learner, tasks)

    def meta_loss(params):
        with torch.no_grad():
            losses = [
                learner.objective(learner.adapt(support, params=params), query)
                for support, query in as_list(tasks)
            ]
        return torch.stack(losses).mean()

    params = {n: p.detach() for n, p in hog.trainable_params(learner.model).items()}
    assert_close(meta_loss(params), learner.loss(tasks).detach())
    directions = random_like(params)  # in each tensor one, which a wrong element is a part of
    along = {n: (ours[n] * v).sum() for n, v in directions.items()}
    assert relative(along, slopes_by_differences(meta_loss, params, directions)) < 1e-6


def test_the_usual_layout_is_still_wrong_in_torch():
    # why vmap is outermost here; if this fails, torch has mended vmap(task).mean().backward()
    learner, tasks = maml("LayerNorm", stand_ins=False), stacks()
    params = {n: p.detach() for n, p in hog.trainable_params(learner.model).items()}

    def loss(params, support, query):
        return learner.objective(learner.adapt(support, params=params), query)

    usual = torch.func.grad(lambda p: torch.func.vmap(loss, (None, 0, 0))(p, *tasks).mean())(params)
    assert relative(usual, meta_gradient(learner, tasks)) > 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_meta_loss_written_with_adapt_has_the_same_gradient(name):
    learner, tasks = maml(name, inner_steps=2), stacks()
    expected = meta_gradient(learner, tasks)
    learner.zero_grad()
    losses = [
        F.mse_loss(learner(x, params=learner.adapt(support)), y)
        for support, (x, y) in as_list(tasks)
    ]
    torch.stack(losses).mean().backward()
    ours = {n: p.grad for n, p in hog.trainable_params(learner.model).items()}
    assert relative(ours, expected) < 1e-12


def test_adapt_from_given_parameters_and_steps():
    learner, support = maml("plain", inner_steps=4), as_list(stacks())[0][0]
    halfway = learner.adapt(support, steps=1)
    assert_close(learner.adapt(support, params=halfway, steps=3), learner.adapt(support))
    assert_close(learner.adapt(support, steps=0), hog.trainable_params(learner.model))


def test_the_frozen_part_stays_and_the_tied_weight_moves_as_one():
    learner = maml("tied and frozen")
    adapted = learner.adapt(as_list(stacks())[0][0])
    assert list(adapted) == ["first.weight", "first.bias", "second.bias"]
    x = torch.randn(3, 2, dtype=torch.float64)
    w, a, b = adapted.values()
    assert_close(learner(x, params=adapted), F.linear(torch.tanh(F.linear(x, w, a)), w, b))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_steps_of_a_plain_function_without_grad(context):
    rule = hog.meta.sgd(0.1)
    with context():
        w, x = torch.tensor(1.0), torch.tensor(2.0)
        loss = lambda w, x: (w * x).square()  # noqa: E731
        stepped, _ = hog.meta.inner_step(loss, w, x, rule, rule.init(w))
        adapted = hog.meta.adapt(loss, w, x, rule, steps=2)
    assert_close(stepped, torch.tensor(0.2))
    assert_close(adapted, torch.tensor(0.04))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_value_and_the_adaptation_are_there(context):
    learner, tasks = maml("fused layers", inner_steps=2), stacks()
    expected, adapted = learner.loss(tasks).detach(), learner.adapt(as_list(tasks)[0][0])
    with context():
        for given in (tasks, as_list(tasks)):
            value = learner.loss(given)
            assert not value.requires_grad
            assert_close(value.clone(), expected)
        assert_close(learner.adapt(as_list(tasks)[0][0]), adapted)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_untouched(name):
    learner, tasks = maml(name, inner_steps=2), stacks()
    with unchanged(learner.model):
        learner.loss(tasks)
        learner.adapt(as_list(tasks)[0][0])


def test_gradients_accumulate_and_scale_like_any_loss():
    learner, tasks = maml("plain"), stacks()
    once = meta_gradient(learner, tasks)
    (learner.loss(tasks) * 3).backward()
    for n, p in hog.trainable_params(learner.model).items():
        assert_close(p.grad, 4 * once[n])


def test_uneven_tasks_count_once_each():
    tasks = as_list(stacks(tasks=1, shots=2, queries=3)) + as_list(
        stacks(tasks=1, shots=6, queries=9)
    )
    learner = maml("plain")
    parts = [meta_gradient(learner, [task]) for task in tasks]
    mean = {n: (parts[0][n] + parts[1][n]) / 2 for n in parts[0]}
    assert relative(meta_gradient(learner, tasks), mean) < 1e-12


class Branches(nn.Linear):
    """Control flow that depends on the data, which vmap cannot follow."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else super().forward(-x)


def recurrent():
    """Fills a state in place, as recurrent networks do, which vmap refuses in words of its own."""

    def run(net, x):
        state = torch.zeros(x.shape, dtype=x.dtype)
        for _ in range(2):
            state += net.cell(x + state).tanh()
        return state

    return Fn(run, cell=nn.Linear(2, 2))


BEYOND_VMAP = {
    "branches": lambda: Branches(2, 2),
    "in place": recurrent,
}


@pytest.mark.parametrize("name", BEYOND_VMAP)
def test_a_model_that_vmap_cannot_run_is_looped_over(name):
    model, tasks = BEYOND_VMAP[name]().double(), stacks()
    expected = meta_gradient(hog.MAML(model, F.mse_loss, over_tasks="loop"), tasks)
    learner = hog.MAML(model, F.mse_loss)
    with pytest.warns(UserWarning, match="loops over the tasks"):
        assert relative(meta_gradient(learner, tasks), expected) < 1e-12
    for each in (learner, hog.MAML(model, F.mse_loss)):  # and says so once
        assert relative(meta_gradient(each, tasks), expected) < 1e-12
    with pytest.raises(RuntimeError, match="over_tasks='loop'"):
        hog.MAML(model, F.mse_loss, over_tasks="vmap").loss(tasks)


def test_convolutions_and_large_layers_loop_over_the_tasks():
    small, conv, large = (
        dict(net.named_parameters())
        for net in (nn.LSTM(4, 8), nn.Conv1d(64, 64, 3), nn.Linear(600, 600))
    )
    assert prefer_vmap({**small, **dict(nn.Conv1d(2, 2, 1).named_parameters())})
    assert not prefer_vmap({**small, **conv})
    assert not prefer_vmap({**small, **large})
    # Of any device but the CPU
    assert prefer_vmap({n: p.to("meta") for n, p in {**conv, **large}.items()})


def test_attributes_that_are_changed_later_take_effect():
    learner, tasks = maml("plain"), stacks()
    learner.inner_lr, learner.inner_steps, learner.first_order = 0.2, 2, True
    expected = meta_gradient(maml("plain", inner_lr=0.2, inner_steps=2, first_order=True), tasks)
    assert relative(meta_gradient(learner, tasks), expected) < 1e-14
    learner.model = build("fused layers")
    expected = maml("fused layers", inner_lr=0.2, inner_steps=2).loss(tasks)
    assert_close(learner.loss(tasks), expected)


def test_it_can_be_pickled():
    learner, tasks = maml("plain"), stacks()
    learner.loss(tasks)
    assert_close(pickle.loads(pickle.dumps(learner)).loss(tasks), learner.loss(tasks))


def test_tasks_made_in_inference_mode():
    with torch.inference_mode():
        made = stacks()
    copies = torch.utils._pytree.tree_map(torch.clone, made)
    learner = maml("plain")
    assert relative(meta_gradient(learner, made), meta_gradient(learner, copies)) == 0
    assert_close(learner.adapt(as_list(made)[0][0]), learner.adapt(as_list(copies)[0][0]))


def test_a_step_between_loss_and_backward_raises():
    learner = maml("plain")
    loss = learner.loss(stacks())
    with torch.no_grad():
        next(learner.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_and_state_are_those_of_the_model():
    learner = maml("plain")
    assert [id(p) for p in learner.parameters()] == [id(p) for p in learner.model.parameters()]
    assert list(learner.state_dict()) == [f"model.{n}" for n in learner.model.state_dict()]
    twin = copy.deepcopy(learner)
    with torch.no_grad():
        next(learner.parameters()).zero_()
    assert next(twin.parameters()).abs().sum() > 0
    x = torch.randn(3, 2, dtype=torch.float64)
    # The copy's loss runs the copy's model
    assert_close(twin.objective.outputs({}, (x, x)), twin(x))
    assert "inner_steps=1" in repr(learner)
    assert "truncate" not in repr(learner)
    assert "truncate=1" in repr(maml("plain", truncate=1))


def test_tasks_with_other_leaves_than_tensors_are_no_stack():
    assert to_stacks([((SX, "a"), (QX, "a"))] * 2) is None
    assert [x.shape for x in to_stacks([(SX, QX)] * 2)] == [(2, *SX.shape), (2, *QX.shape)]


def diverging():
    learner = maml("plain", inner_lr=1e200)
    return lambda: learner.loss(stacks())


def bad_task(number):
    (sx, sy), query = stacks()
    sy[number] = float("nan")
    return (sx, sy), query


(SX, SY), (QX, QY) = stacks()
LEARNER = maml("plain")
ERRORS = {
    "no inner step": (lambda: maml("plain", inner_steps=0), ValueError, "inner_steps.*at least 1, got 0"),
    "half a step": (lambda: maml("plain", inner_steps=1.5), TypeError, "integer, got float 1.5"),
    "negative rate": (lambda: maml("plain", inner_lr=-0.1), ValueError, "inner_lr.*got -0.1"),
    "rate is NaN": (lambda: maml("plain", inner_lr=float("nan")), ValueError, "inner_lr.*finite"),
    "rate is a word": (lambda: maml("plain", inner_lr="big"), TypeError, "inner_lr.*str 'big'"),
    "unknown memory": (lambda: maml("plain", memory="files"), ValueError, "memory: expected one of store"),
    "unknown order of tasks": (lambda: maml("plain", over_tasks="map"), ValueError, "vmap, loop"),
    "frozen model": (lambda: hog.MAML(nn.Linear(2, 2).requires_grad_(False), F.mse_loss), ValueError, "all 2 are frozen"),
    "model is no module": (lambda: hog.MAML(F.relu, F.mse_loss), TypeError, "torch.nn.Module"),
    "criterion is a name": (lambda: hog.MAML(nn.Linear(2, 2), "mse"), TypeError, "criterion: expected a function"),
    "loss is not a scalar": (lambda: hog.MAML(build("plain"), nn.MSELoss(reduction="none")).loss(stacks()), ValueError, r"criterion\(outputs, targets\): expected a scalar, got .*\(4, 2\)"),
    "loss is not finite": (diverging(), FloatingPointError, "lower inner_lr"),
    "one task is NaN": (lambda: maml("plain").loss(bad_task(2)), FloatingPointError, "inner loss.*task 2 of 3, step 1 of 1"),
    "empty support": (lambda: maml("plain").loss(((SX[:, :0], SY[:, :0]), (QX, QY))), ValueError, "support: .*at least one example"),
    "empty support of one task": (lambda: maml("plain").adapt((SX[0, :0], SY[0, :0])), ValueError, "support: .*empty set"),
    "no tasks": (lambda: maml("plain").loss([]), ValueError, "at least one task"),
    "other number of query sets": (lambda: maml("plain").loss(((SX, SY), (QX[:2], QY[:2]))), ValueError, "3 support and 2 query"),
    "other number of targets": (lambda: maml("plain").loss(((SX, SY[:, :1]), (QX, QY))), ValueError, r"support: .*\(3, 4\), \(3, 1\)"),
    "other number of targets in a list": (lambda: maml("plain").loss([((SX[0], SY[0, :1]), (QX[0], QY[0]))]), ValueError, r"tasks\[0\]: support.* 4, 1"),
    "one task that is no list": (lambda: maml("plain").loss(((SX[0, 0], SY[0, 0]), (QX[0, 0], QY[0, 0]))), ValueError, "for one task pass a list"),
    "a task is a tensor": (lambda: maml("plain").loss([SX]), ValueError, r"tasks\[0\]: expected a pair \(support, query\).*got a float64 tensor"),
    "tasks are one tensor": (lambda: maml("plain").loss(SX), ValueError, r"pair \(support, query\)"),
    "tasks that require grad": (lambda: maml("plain").loss(((SX.clone().requires_grad_(), SY), (QX, QY))), RuntimeError, "Detach them"),
    "differentiated twice": (lambda: maml("plain").loss(stacks()).backward(create_graph=True), RuntimeError, "maml.adapt"),
    "inside a transform": (lambda: torch.func.vmap(lambda x: LEARNER.loss(((x, SY), (QX, QY))))(SX[None]), NotImplementedError, "outside of torch.func transforms"),
    "misspelt parameter": (lambda: maml("plain").adapt((SX[0], SY[0]), params={"0.weigth": SX}), ValueError, "did you mean '0.weight'"),
    "parameters of a model": (lambda: maml("plain").adapt((SX[0], SY[0]), params=nn.Linear(3, 1).parameters()), TypeError, "params: expected a dict of tensors"),
    "misspelt option": (lambda: maml("plain", inner_step=3), TypeError, "did you mean 'inner_steps'"),
    "support and query apart": (lambda: maml("plain").loss((SX, SY), (QX, QY)), TypeError, r"loss: expected tasks, .* `tasks=\(..., ...\)`"),
    "a rate without its name": (lambda: hog.MAML(build("plain"), F.mse_loss, 0.1), TypeError, "MAML: expected model, criterion, and inner_steps, .* by name"),
    "first_order is a word": (lambda: maml("plain", first_order="no"), TypeError, "first_order: expected True or False"),
    "empty containers": (lambda: maml("plain").adapt(([], [])), ValueError, "support: expected a batch of tensors"),
    "negative steps": (lambda: maml("plain").adapt((SX[0], SY[0]), steps=-1), ValueError, "steps.*at least 0"),
}  # fmt: skip


test_errors = refused(ERRORS)


def test_an_error_of_the_model_says_how_the_tasks_were_read():
    task = {"x": SX[0]}  # a batch, where a stack of batches is expected
    loss = hog.MAML(nn.Linear(7, 1).double(), lambda o, b: o.mean(), forward=lambda m, b: m(b["x"]))
    told = pytest.warns(UserWarning, match="no feature dimension")
    with told, pytest.raises(RuntimeError) as raised:
        loss.loss((task, task))
    assert f"stacks of {len(SX[0])} tasks" in raised.value.__notes__[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name):
    tasks = stacks()
    expected = meta_gradient(maml(name, inner_steps=3, over_tasks="loop"), tasks)
    moved = torch.utils._pytree.tree_map(torch.Tensor.cuda, tasks)
    for over_tasks in ("vmap", "loop"):
        ours = meta_gradient(maml(name, inner_steps=3, over_tasks=over_tasks).cuda(), moved)
        assert relative({n: g.cpu() for n, g in ours.items()}, expected) < 1e-10


def test_an_inner_loop_in_float16_names_the_eps_that_it_loses():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).half()
    batch = torch.ones(5, 3, dtype=torch.float16), torch.zeros(5, 1, dtype=torch.float16)
    model[0].weight.data.fill_(-1.0)  # dead units, whose gradient is zero
    model[0].bias.data.fill_(-1.0)
    learner = hog.MAML(model, F.mse_loss, rule=hog.meta.adam(1e-3), inner_steps=2)
    with pytest.raises(hog.errors.NonFiniteError, match=r"is 0 in float16: give eps=1e-4"):
        learner.loss([(batch, batch)])


def examples(*shape, dtype=torch.float64):
    x = torch.arange(math.prod(shape)).reshape(shape) % 7
    return x.to(dtype), x.to(torch.float64)


ONE = examples(10, 1)
TOLD = {
    "one task as a pair": ((ONE, ONE), "stacks of 10 tasks, whose \\[1\\] inputs"),
    "one task as a list of two sets": ([ONE, ONE], "the list as two tasks"),
    "one task of dicts": (({"x": ONE[0], "y": ONE[1]},) * 2, "stacks of 10 tasks"),
    "one task of dicts in two lists": ([{"x": ONE[0], "y": ONE[1]}] * 2, "stacks of 10 tasks"),
    "one task of inputs alone": ((ONE[0], ONE[0]), "stacks of 10 tasks"),
    "one task of several inputs": (((*ONE, ONE[1]),) * 2, "stacks of 10 tasks"),
    "a stack of dicts": ((dict(zip("xy", examples(3, 5, 1), strict=True)),) * 2, ""),
    "a stack of inputs alone": ((examples(3, 5, 1)[0],) * 2, ""),
    "one task in a list": ([(ONE, ONE)], ""),
    "two tasks in a list": ([(ONE, ONE)] * 2, ""),
    "three tasks of their own targets": ([(ONE[0], ONE[0])] * 3, ""),
    "a stack": ((examples(3, 5, 1),) * 2, ""),
}


@pytest.mark.parametrize("learner", [hog.MAML, hog.meta.Reptile, hog.meta.IMAML])
@pytest.mark.parametrize("name", TOLD)
def test_one_task_that_may_be_read_as_several_is_told(learner, name):
    tasks, text = TOLD[name]

    def call(model, batch):
        named, alone = isinstance(batch, dict), isinstance(batch, torch.Tensor)
        return model(batch["x"] if named else batch if alone else batch[0])

    model, criterion = nn.Linear(1, 1).double(), lambda outputs, batch: outputs.square().mean()
    one = learner(model, criterion, forward=call, inner_lr=0.01, inner_steps=2)
    with pytest.warns(UserWarning, match=text) if text else nullcontext():
        one.loss(tasks)


def test_stacks_of_tokens_are_no_single_task():
    model = nn.Sequential(nn.Embedding(7, 2), nn.Linear(2, 1), nn.Flatten(0)).double()
    tokens = examples(4, 6, dtype=torch.long)
    hog.MAML(model, F.mse_loss, inner_lr=0.01).loss((tokens, tokens))
