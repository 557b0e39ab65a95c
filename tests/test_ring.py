"""The ring, once with every algorithm: options leave results as they are, and everything as it was."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree

import hoglib as hog
from hoglib.ring import ring
from tests.device_threads import backward_in_another_thread
from tests.functions import Cube
from tests.models import Through
from tests.tensors import randn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        # a stand-in replaces the distance, whose gradient has no derivative in torch
        return x + torch.tanh(self.linear(x)) + torch.cdist(x, x + 1).mean() * 0.1


torch.manual_seed(0)
MODEL = nn.Sequential(nn.BatchNorm1d(4), Block(), Block(), nn.Linear(4, 1)).double()
MODEL[0].eval()  # its examples are apart
SMOOTH = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
CRITIC = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
PACKAGE = str(Path(hog.__file__).parent)
LOSS, PARAMS = hog.functional_loss(MODEL, F.mse_loss), hog.trainable_params(MODEL)
BATCH = X, Y = randn(5, 4), randn(5, 1, seed=1)
V = {name: randn(*p.shape, seed=i) for i, (name, p) in enumerate(PARAMS.items())}
ONES = torch.ones_like(X)
ALGORITHMS = {
    "hvp": lambda **o: hog.hvp(LOSS, PARAMS, V, BATCH, **o),
    "ggn_vp": lambda **o: hog.ggn_vp(LOSS, PARAMS, V, BATCH, **o),
    "fisher_vp": lambda **o: hog.fisher_vp(LOSS, PARAMS, V, BATCH, **o),
    "hessian": lambda **o: hog.hessian(LOSS, PARAMS, BATCH, **o),
    "ggn": lambda **o: hog.ggn(LOSS, PARAMS, BATCH, **o),
    "jvp": lambda **o: hog.jvp(MODEL, X, ONES, **o),
    "jvp, reverse": lambda **o: hog.jvp(MODEL, X, ONES, mode="reverse", **o),
    "jet": lambda **o: hog.jet(SMOOTH, X, [ONES, None], **o),
    "laplacian": lambda **o: hog.laplacian(SMOOTH, X, **o),
    "bilaplacian": lambda **o: hog.bilaplacian(SMOOTH, X, **o),
    "directional": lambda **o: hog.directional(SMOOTH, X, ONES, 3, **o),
    "partial_derivative": lambda **o: hog.partial_derivative(SMOOTH, X, index=(0, 1), **o),
    "per_example_gradients": lambda **o: hog.per_example_gradients(
        hog.functional_loss(SMOOTH, F.mse_loss), hog.trainable_params(SMOOTH), (X, X), **o
    ),
    "HessianOperator": lambda **o: hog.HessianOperator(LOSS, PARAMS, BATCH, **o) @ V,
    "GGNOperator": lambda **o: hog.GGNOperator(LOSS, PARAMS, BATCH, **o) @ V,
    "FisherOperator": lambda **o: hog.FisherOperator(LOSS, PARAMS, BATCH, **o) @ V,
}
OPTIONS = {
    "remat": {"remat": ["1", "2"]},
    "compile": {"compile": "eager"},
    "compiled blocks": {"remat": ["1", "2"], "compile": "eager"},
}


def numbers(tree):
    return torch.cat([x.detach().reshape(-1) for x in _pytree.tree_leaves(tree)])


def around():
    """What a call must leave as it was."""
    modules = [*MODEL.modules(), *SMOOTH.modules()]
    return [
        *(id(p) for module in modules for p in module._parameters.values()),
        *(float(b.sum()) for module in modules for b in module.buffers(recurse=False)),
        *(module.__dict__.get("forward") for module in modules),
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        len(torch.overrides._get_current_function_mode_stack()),
        torch.autograd.Function.apply, float(torch.get_rng_state().sum()),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_option_leaves_the_result_and_what_is_around_as_they_are(name, options):
    call, given = ALGORITHMS[name], OPTIONS[options]
    before, expected = around(), numbers(call())
    assert around() == before
    if name == "per_example_gradients" and "compile" in given:
        with pytest.raises(hog.errors.ArgumentTypeError, match="stand_ins, remat, got 'compile'"):
            call(**given)
    else:
        torch.testing.assert_close(numbers(call(**given)), expected, rtol=1e-10, atol=1e-12)
    assert around() == before


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.parametrize("compiled", ["a module", "a module in place", "a function"])
def test_pieces_that_the_user_compiled_run_uncompiled(compiled):
    """torch loses the second derivative of a custom Function in them, without an error."""
    plain, block = Through(Cube.apply), Through(Cube.apply)
    if compiled == "a module in place":
        block.compile(backend="aot_eager")
    elif compiled == "a module":
        block = torch.compile(block, backend="aot_eager")
    else:
        block = Through(torch.compile(Cube.apply, backend="aot_eager"))

    def found(cubes):
        model = nn.Sequential(MODEL[3], cubes)
        loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        ones = {name: torch.ones_like(p) for name, p in params.items()}
        yield hog.hvp(loss, params, ones, BATCH)[1]
        yield hog.HessianOperator(loss, params, BATCH) @ ones
        yield hog.jvp(model, X, ONES)[1]
        yield torch.autograd.grad(hog.penalties.r1(model, X), model[0].weight)
        task = (BATCH, BATCH)
        meta_loss = hog.MAML(model, F.mse_loss, inner_lr=0.1, inner_steps=2).loss([task])
        yield torch.autograd.grad(meta_loss, model[0].weight)

    pairs = zip(found(block), found(plain), strict=True)
    for of_block, expected in pairs:
        torch.testing.assert_close(numbers(of_block), numbers(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_option_is_checked_by_name(name):
    with pytest.raises(hog.errors.ArgumentTypeError, match=r"got 'remats'; did you mean 'remat'\?"):
        ALGORITHMS[name](remats=True)
    with pytest.raises(hog.errors.ArgumentTypeError, match="stand_ins: expected"):
        ALGORITHMS[name](stand_ins="yes")


@pytest.mark.parametrize("where", ["no_grad", "inference_mode", "a thread"])
def test_it_works_wherever_the_caller_stands(where):
    def run():
        found.append([numbers(call()) for call in ALGORITHMS.values()])

    found = []
    run()
    if where == "a thread":
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        with getattr(torch, where)():
            run()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def learned(memory, over_tasks):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    for i, p in enumerate(model.parameters()):
        p.data = randn(*p.shape, seed=i)
    learner = hog.MAML(
        model, F.mse_loss, inner_lr=0.1, inner_steps=3, memory=memory, over_tasks=over_tasks
    )
    learner.loss([(BATCH, BATCH), ((X + 1, Y), BATCH)]).backward()
    return [p.grad for p in model.parameters()]


IN_THREADS = {
    **{f"{name}, remat": partial(call, remat=["1", "2"]) for name, call in ALGORITHMS.items()},
    **{f"MAML {m} {o}": partial(learned, m, o) for m in ("store", "remat", "checkpoint", "mixed") for o in ("loop", "vmap")},
    "r1": lambda: torch.autograd.grad(hog.penalties.r1(CRITIC, X, remat=["0"]), CRITIC[0].weight),
    "KFACOperator": lambda: hog.KFACOperator(
        hog.functional_loss(SMOOTH, F.mse_loss), hog.trainable_params(SMOOTH), (X, X)).update().trace(),
}  # fmt: skip


# In Taylor mode, forward mode and torch.func no backward runs, or one that torch runs where it is called.
OF_TRANSFORMS = (
    "jet", "laplacian", "bilaplacian", "directional", "partial_derivative", "jvp, remat", "per_example",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_THREADS)
def test_backward_may_run_in_a_thread_of_a_device(name):
    expected, before = numbers(IN_THREADS[name]()), around()
    with backward_in_another_thread() as runs:
        found = numbers(IN_THREADS[name]())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert runs or name.startswith(OF_TRANSFORMS)
    assert around() == before


class Broken(Exception):
    pass


def test_all_is_left_where_something_inside_raises():
    before = around()
    with (
        pytest.raises(Broken),
        ring(hog.curvature.maps.products.Policy("test", remat=("1",)), MODEL),
    ):
        raise Broken
    assert around() == before
