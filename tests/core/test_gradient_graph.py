"""The walk of a gradient's graph, and its custom Functions: which are refused, and which are warned of."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import hoglib as hog
from hoglib._core.substrate import gradient_graph
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib.stand_ins.mode import _SecondOrder  # what the mode sees is not public
from tests.functions import Cube
from tests.models import Through

F64 = torch.float64


class Once(Cube):
    backward = staticmethod(once_differentiable(Cube.backward))


def net(function):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), Through(function), nn.Linear(3, 1))


def problem(function):
    model = net(function).double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    batch = (torch.ones(4, 2, dtype=F64), torch.zeros(4, 1, dtype=F64))
    return loss, params, {k: torch.ones_like(p) for k, p in params.items()}, batch


def test_a_summary_has_leaves_and_custom_functions():
    x, w, unused = (torch.randn(3, dtype=F64, requires_grad=True) for _ in range(3))
    y = (Cube.apply(x) * hog.ops.tanh(w) + x + Cube.apply(unused).detach()).sum()
    graph = graph_summary(y)
    assert set(graph.leaves) == {id(x), id(w)}
    assert graph.reached([unused, w, w.clone()]) == [1]
    assert [entry.function for entry in graph.user_functions] == [Cube]
    assert len(graph.functions) == 2
    assert graph.has_user_code
    assert not graph.has_compiled_code
    assert graph.needs_stand_ins
    assert not graph_summary(hog.ops.tanh(w)).has_user_code


def test_stand_ins_are_for_a_backward_that_may_call_torch_functions_which_have_one():
    class TorchCallsOfItsOwn(Cube):
        runs_user_code = False

    x = torch.randn(3, dtype=F64, requires_grad=True)
    assert not graph_summary(x.sin()).needs_stand_ins
    assert not graph_summary(TorchCallsOfItsOwn.apply(x)).needs_stand_ins
    assert graph_summary(TorchCallsOfItsOwn.apply(Cube.apply(x))).needs_stand_ins


def test_a_summary_ends_at_the_tensors_it_starts_from():
    x = torch.randn(3, dtype=F64, requires_grad=True)
    h = Cube.apply(x)
    since = graph_summary([Once.apply(h)], since=[h])
    assert [entry.function for entry in since.user_functions] == [Once]
    assert not since.leaves


@cache
def learner(function):
    """Checks its model in the first loss."""
    model = net(function).double()
    return hog.MAML(model, F.mse_loss, inner_lr=0.1, inner_steps=2, over_tasks="loop")


# what is differentiated -> how many graphs its derivatives have, each of which is walked
WALKS = {
    "hvp": (lambda loss, params, v, batch: hog.hvp(loss, params, v, batch), 1),
    "a block of hvp": (lambda loss, params, v, batch: hog.hvp(loss, params, {k: torch.stack([x] * 3, -1) for k, x in v.items()}, batch), 1),
    "hessian": (lambda loss, params, v, batch: hog.hessian(loss, params, batch), 1),
    "laplacian": (lambda loss, params, v, batch: hog.laplacian(lambda x: Cube.apply(x).sum(1), batch[0]), 1),
    "ggn_vp, of outputs and criterion": (lambda loss, params, v, batch: hog.ggn_vp(loss, params, v, batch), 2),
    "a penalty, of outputs and gradient norms": (lambda loss, params, v, batch: hog.penalties.r1(net(Cube.apply).double(), batch[0]), 2),
    "MAML, of two inner steps": (lambda loss, params, v, batch: learner(Cube.apply).loss([(batch, batch)]), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", WALKS)
def test_each_graph_is_walked_once(name, monkeypatch):
    derivative, graphs = WALKS[name]
    loss, params, v, batch = problem(Cube.apply)
    for _ in range(2):  # Cube is examined in the first one, rows are compared in both
        derivative(loss, params, v, batch)
    walks = []

    def counting(outputs, *given, **until):
        walks.append(outputs)
        return walk(outputs, *given, **until)

    walk = gradient_graph.walk
    monkeypatch.setattr(gradient_graph, "walk", counting)
    derivative(loss, params, v, batch)
    assert len(walks) == graphs


@pytest.mark.parametrize("name", ["hvp", "r1", "wgan_gp", "MAML"])
def test_how_often_the_mode_is_entered_and_that_it_is_sent_the_calls_of_the_function_alone(
    name, monkeypatch
):
    """Each torch call takes a microsecond longer where the mode sees it, also one for a shape."""
    loss, params, v, batch = problem(torch.tanh)
    critic, x = net(torch.tanh).double(), batch[0]
    tasks = [(batch, batch)]
    function, derivative, evaluations, entries = {
        "hvp": (lambda: loss(params, batch), lambda: hog.hvp(loss, params, v, batch), 1, 1),
        "r1": (lambda: critic(x), lambda: hog.penalties.r1(critic, x), 1, 1),
        "wgan_gp": (lambda: critic(x), lambda: hog.penalties.wgan_gp(critic, x, -x), 1, 1),
        # losses of two inner steps and of the query set; it is entered for all of it, and again for the
        # loss of each inner step
        "MAML": (lambda: loss(params, batch), lambda: learner(torch.tanh).loss(tasks), 3, 3),
    }[name]
    derivative()  # a critic is examined once for samples that depend on one another
    entered, seen = [], []
    enter, handle = _SecondOrder.__enter__, _SecondOrder.__torch_function__

    def counted(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return handle(self, func, types, args, kwargs)

    monkeypatch.setattr(_SecondOrder, "__torch_function__", counted)
    with hog.second_order():
        function()
    alone = list(seen)
    seen.clear()
    monkeypatch.setattr(_SecondOrder, "__enter__", lambda s: [entered.append(s), enter(s)][1])
    derivative()
    assert len(entered) == entries
    calls = evaluations * len(alone)
    assert calls <= len(seen) <= calls + 4 * entries  # of the value: shape, dtype, requires_grad


def test_once_differentiable_raises_by_name():
    loss, params, v, batch = problem(Once.apply)
    for mode in ("reverse-over-reverse", "forward-over-reverse"):
        with pytest.raises(RuntimeError, match=r"hvp: .* got Once, .*once_diff.*hoglib.verify"):
            hog.hvp(loss, params, v, batch, mode=mode)
    with pytest.raises(RuntimeError, match=r"hessian: .* got Once"):
        hog.hessian(loss, params, batch)


@pytest.mark.parametrize("over_tasks", ["vmap", "loop"])
def test_maml_checks_too(over_tasks):
    tasks = tuple((torch.ones(2, 3, 2), torch.zeros(2, 3, 1)) for _ in range(2))

    def run(function, **options):
        maml = hog.MAML(
            net(function.apply), nn.functional.mse_loss, over_tasks=over_tasks, **options
        )
        maml.loss(tasks).backward()

    with pytest.raises(RuntimeError, match=r"the inner step: .* got Once"):
        run(Once)
    run(Cube)
    run(Once, first_order=True)  # which differentiates once


def scripted():
    torch.manual_seed(0)
    inner = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).double())
    return nn.Sequential(inner, nn.Linear(3, 1).double())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules_are_refused_where_torch_gives_zero():
    model = scripted()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    batch = (torch.ones(4, 2, dtype=F64), torch.zeros(4, 1, dtype=F64))
    v = {k: torch.ones_like(p) for k, p in params.items()}
    hog.hvp(loss, params, v, batch)  # right in reverse
    with pytest.raises(NotImplementedError, match="got 0, which is scripted"):
        hog.hvp(loss, params, v, batch, mode="forward-over-reverse", stand_ins=False)
    with pytest.raises(TypeError, match="pass the module that was scripted"):
        hog.functional_loss(model[0], F.mse_loss)
