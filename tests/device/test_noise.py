"""Where a GPU adds in another order at each run, and rounds convolutions to TF32, nothing that is right is
refused, and results differ by that noise alone."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import hoglib as hog
from hoglib import curvature, meta, penalties
from tests.device import simulation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(simulation.C is None, reason="noise is switched on for the simulated GPU"),
]


def network(out=5):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.Softplus(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, out)).cuda()


def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(16, 1, 8, 8, generator=draw).cuda()
    return x, torch.randint(0, 5, (16,), generator=draw).cuda()


def of_the_loss(compute):
    def run():
        net = network()
        loss, params = hog.functional_loss(net, cross_entropy), hog.trainable_params(net)
        vector = {name: torch.ones_like(p) for name, p in params.items()}
        return compute(loss, params, vector, data())

    return run


def operator(kind, compute):
    def run(loss, params, vector, batch):
        made = kind(loss, params, [batch, batch])
        return compute(made, torch.ones(made.shape[0], device="cuda"))

    return of_the_loss(run)


def penalty():
    critic = network(1)
    penalties.r1(critic, data()[0]).backward()
    return [p.grad for p in critic.parameters() if p.grad is not None]


def maml(memory):
    net = network()
    learner = meta.MAML(net, cross_entropy, inner_lr=0.1, inner_steps=2, memory=memory)
    learner.loss([(data(), data())] * 2).backward()
    return [p.grad for p in net.parameters()]


def hypergradient(memory):
    net, (x, y) = network(), data()

    def inner(params, hyper):
        decay = hyper.exp() * sum(p.square().sum() for p in params.values())
        return cross_entropy(functional_call(net, params, (x,)), y) + decay

    found = meta.hypergradient(
        lambda params, hyper: cross_entropy(functional_call(net, params, (x.flip(0),)), y), inner,
        hog.trainable_params(net), torch.tensor(-2.0, device="cuda"), rule=meta.sgd(0.1, momentum=0.5),
        steps=6,
        memory=memory,
    )  # fmt: skip
    return found.gradient


def forces():
    energy, x = network(1), data()[0][:2]
    return penalties.forces(lambda x: energy(x).squeeze(-1), x, hessian=True)


def attention():
    """In blocks, which a device takes for more than 2^20 scores."""
    draw = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 1, 1100, 4, generator=draw).cuda()

    def loss(weight):
        return scaled_dot_product_attention(q * weight, k, v, is_causal=True).square().mean()

    one = torch.ones(4, device="cuda")
    return hog.hvp(loss, one, one)


def unused():
    params = {"used": torch.ones(3, device="cuda"), "unused": torch.ones(2, device="cuda")}
    return hog.hvp(lambda p: p["used"].pow(4).sum() + 0 * p["unused"].sum(), params, params)


ROWS = {
    "hvp": of_the_loss(hog.hvp),
    "ggn_vp": of_the_loss(hog.ggn_vp),
    "Hessian": operator(curvature.HessianOperator, lambda H, v: H @ v),
    "solve": operator(curvature.GGNOperator, lambda G, v: G.solve(v, damping=1.0)),
    "eigenvalues": operator(curvature.HessianOperator, lambda H, v: H.eigsh(2, which="LA").values),
    "KFAC": operator(curvature.KFACOperator, lambda K, v: K.inverse(damping=1.0) @ v),
    "exp(G)": operator(curvature.GGNOperator, lambda G, v: G.matrix_function(v, torch.exp)),
    "trace": operator(curvature.HessianOperator, lambda H, v: H.trace(num_samples=4)),
    "forces and their Hessian": forces,
    "attention": attention,
    "an unused parameter": unused,
    "r1": penalty,
    **{
        f"{call.__name__}, {memory}": partial(call, memory)
        for call in (maml, hypergradient)
        for memory in ("store", "remat", "checkpoint")
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_noise_is_no_fault(name):
    expected = torch.utils._pytree.tree_leaves(ROWS[name]())
    simulation.nondeterministic(), simulation.tf32()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = torch.utils._pytree.tree_leaves(ROWS[name]())
    finally:
        simulation.nondeterministic(False), simulation.tf32(convolutions=False)
    for a, b in zip(found, expected, strict=True):
        assert a.is_cuda
        assert (a - b).norm() <= 2e-2 * b.norm()
    assert len(found) > 0
