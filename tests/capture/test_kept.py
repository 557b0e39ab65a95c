"""compile=True by blocks: the products of the whole network, from graphs that are compiled once."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib.capture import backend, kept, recomputed
from tests import test_remat_option as networks
from tests.oracles import random_like, relative

DOUBLE = torch.float64
PRODUCTS = {
    "hvp": hog.hvp,
    "ggn_vp": hog.ggn_vp,
    "fisher_vp": lambda *args, **options: hog.fisher_vp(*args, kind="empirical", **options),
}


@pytest.fixture
def graphs(monkeypatch):
    """The names of what is compiled, which torch runs here; blocks are compiled whatever they cost."""
    names = []

    def run(options, graph, inputs):
        if options.backend == "inductor":
            names.append(options.name)
        graph.recompile()
        return backend.Runner(graph.forward, 0.0, "compiled"), "eager"

    monkeypatch.setattr(backend, "make_runner", run)
    monkeypatch.setattr(recomputed, "_TEMPLATES", type(recomputed._TEMPLATES)())
    monkeypatch.setattr(kept, "FEWEST", 1)
    monkeypatch.setattr(kept, "MOST_LOST", math.inf)
    monkeypatch.setattr(kept, "SAVING", math.inf)
    return names


def flat(tree):
    return torch.cat([x.reshape(-1) for x in tree.values()])


def check(loss, batch, product=hog.hvp, limit=1e-11):
    params = hog.trainable_params(loss.model)
    v = random_like(params)
    value, expected = product(loss, params, v, batch)
    for _ in range(2):  # the first call compiles
        same, found = product(loss, params, v, batch, compile=True)
        assert relative(same, value) < limit
        assert relative(flat(found), flat(expected)) < limit


def problem(block, count, width=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(block(width) for _ in range(count)), nn.Linear(width, 2)).double()
    x = torch.randn(3, width, dtype=DOUBLE)
    return hog.functional_loss(model, F.mse_loss), (x, torch.randn(3, 2, dtype=DOUBLE))


class Dense(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class WithFunction(Dense):
    """With a custom Function of the user."""

    def forward(self, x):
        return super().forward(Sine.apply(x))


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class WithDropout(Dense):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3)


class Constant(nn.Module):
    """Does not depend on its input, so that nothing goes back through the blocks before it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight.sin() * torch.ones_like(x)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", ["ResNet", "transformer", "shared codec", "GPT-2", "T5"])
def test_networks(name, product, graphs):
    loss, _, _, batch = networks.problem(name, train=False)
    if product != "hvp" and name in networks.PEERS:
        pytest.skip("these losses have no outputs and criterion")
    check(loss, batch, PRODUCTS[product], 1e-6 if name == "T5" else 1e-11)
    assert graphs
    assert not any("forward" in vars(module) for module in loss.model.modules())


@pytest.mark.parametrize("block", [Dense, WithFunction, Constant])
def test_blocks(block, graphs):
    check(*problem(block, 4))
    assert {*graphs} == {block.__name__}


def test_the_number_of_graphs_does_not_grow_with_depth(graphs):
    counts = []
    for depth in (4, 12):
        graphs.clear()
        recomputed._TEMPLATES.clear()
        check(*problem(Dense, depth))
        counts.append(len(graphs))
    assert counts == [4, 4]  # forward, vjp, and both of its derivatives


def test_frozen_parameters_and_several_vectors(graphs):
    loss, batch = problem(Dense, 4)
    loss.model[1].requires_grad_(False)
    loss.model[0].norm.weight.requires_grad_(False)
    check(loss, batch)
    params = hog.trainable_params(loss.model)
    block = {name: torch.randn(*p.shape, 3, dtype=DOUBLE) for name, p in params.items()}
    _, expected = hog.hvp(loss, params, block, batch)
    _, found = hog.hvp(loss, params, block, batch, compile=True)
    assert relative(flat(found), flat(expected)) < 1e-11


def test_what_is_one_graph(graphs):
    """Dropout inside a block; other modes; a product with a graph of its own."""
    loss, batch = problem(WithDropout, 4)
    params = hog.trainable_params(loss.model)
    v = random_like(params)
    hog.hvp(loss, params, v, batch, compile=True)
    torch.manual_seed(1)
    _, expected = hog.hvp(loss, params, v, batch)
    torch.manual_seed(1)
    _, found = hog.hvp(loss, params, v, batch, compile=True)
    assert relative(flat(found), flat(expected)) < 1e-11
    loss, batch = problem(Dense, 4)
    params = hog.trainable_params(loss.model)
    v = random_like(params)
    hog.hvp(loss, params, v, batch, compile=True, create_graph=True)
    hog.hvp(loss, params, v, batch, compile=True, mode="forward-over-reverse")
    assert len(graphs) == 3
    assert all(name.startswith("hvp of") for name in graphs)


def test_small_blocks_are_one_graph(graphs, monkeypatch):
    monkeypatch.setattr(kept, "MOST_LOST", 0.1)
    check(*problem(Dense, 6))
    assert len(graphs) == 1


def test_wrong_code_is_told(graphs, monkeypatch):
    """Blocks whose compiled code is wrong are left to one graph, which is compared too."""
    run = backend.make_runner

    def wrong(options, graph, inputs):
        runner, name = run(options, graph, inputs)
        if options.backend == "eager":  # a trace
            return runner, name
        return runner._replace(run=lambda *x: [2 * y for y in runner.run(*x)]), "inductor"

    monkeypatch.setattr(backend, "make_runner", wrong)
    loss, batch = problem(Dense, 4)
    params = hog.trainable_params(loss.model)
    with pytest.raises(hog.errors.NoSecondDerivative):
        hog.hvp(loss, params, random_like(params), batch, compile=True)
