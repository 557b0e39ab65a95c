"""Steps with Kronecker factors: as a preconditioner of solvers and NewtonCG, and KFAC by itself."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature import KFAC, NewtonCG
from tests.curvature.problems import F64, draw
from tests.curvature.test_kfac import routed_problem
from tests.refused import refused
from tests.rows import rows


def network(seed=1, size=10):
    torch.manual_seed(seed)
    first, last = nn.Linear(3 * size, 2 * size), nn.Linear(2 * size, size)
    return nn.Sequential(first, nn.Tanh(), last).double()


def task(count=200, size=10):
    """Inputs of unlike scales, as make matrices ill-conditioned, and labels."""
    n = 3 * size
    x = (draw(count, n, seed=2) * torch.logspace(-1, 1, n, dtype=F64)) @ draw(n, n, seed=3)
    return x / n**0.5, draw(count, size, seed=4).argmax(1)


def problem(seed=1, size=10):
    loss = hog.functional_loss(network(seed, size), F.cross_entropy)
    return loss, hog.trainable_params(loss.model), task(size=size)


def products(steps, **options):
    loss, _, batch = problem()
    optimizer = NewtonCG(loss, damping=1e-4, stagnation_tol=1e-5, **options)
    counts = []
    for _ in range(steps):
        optimizer.step(batch)
        counts.append(optimizer.info.products)
    return sum(counts), optimizer.info.loss_after


def test_newton_steps_take_half_of_the_products():
    without, plain = products(4)
    needed, found = products(4, preconditioner="kfac")
    assert 2 * needed < without
    assert found < 1.05 * plain
    made = []

    def diagonal(G, damping):
        made.append(damping)
        return G.diagonal(8, generator=torch.Generator().manual_seed(0)).clamp(min=0) + damping

    products(4, preconditioner=diagonal, preconditioner_every=3)
    assert len(made) == 2
    with pytest.raises(hog.errors.ArgumentValueError, match="preconditioner"):
        NewtonCG(problem()[0], preconditioner="ilu")


def by_hand(loss, params, batch, damping, before):
    """A step of the definition: K from its blocks, and the minimizer by a small system."""
    K = hog.KFACOperator(loss, params, batch).to_dense()
    G = hog.GGNOperator(loss, params, batch).to_dense()
    eye = torch.eye(len(K), dtype=F64)
    _, gradient = hog.GGNOperator(loss, params, batch).gradient()
    g = torch.cat([x.reshape(-1) for x in gradient.values()])
    d = -torch.linalg.solve(K + damping * eye, g)
    V = d[:, None] if before is None else torch.stack([d, before], 1)
    return V @ torch.linalg.solve(V.T @ (G + damping * eye) @ V, -V.T @ g)


def test_the_definition_of_a_step():
    loss, params, batch = problem(size=3)
    optimizer = KFAC(loss, damping=0.05, decay=0.0, kind="exact")
    before = None
    for _ in range(2):
        start = torch.cat([p.detach().reshape(-1) for p in params.values()]).clone()
        damping = optimizer.param_groups[0]["damping"]
        expected = by_hand(loss, params, batch, damping, before)
        value = optimizer.step(batch)
        moved = torch.cat([p.detach().reshape(-1) for p in params.values()]) - start
        assert_close(moved, expected, rtol=1e-6, atol=1e-9)
        assert_close(torch.tensor(optimizer.info.length), moved.norm().float())
        before = moved
    assert value > loss(params, batch)
    assert all(p.grad is None for p in params.values())


def test_momentum_and_the_bound_without_rescaling():
    loss, params, batch = problem()
    options = {"damping": 0.05, "lr": 0.1, "kl_clip": 1e-4, "momentum": 0.5}
    optimizer = KFAC(loss, kind="exact", decay=0.0, rescale=False, **options)
    last = 0.0
    for _ in range(2):
        start = torch.cat([p.detach().reshape(-1) for p in params.values()]).clone()
        K = hog.KFACOperator(loss, params, batch)
        g = K.ravel(K.gradient()[1])
        d = -K.solve(g, damping=0.05)
        d = d * min(1, (1e-4 / (0.01 * abs(float(g @ d)))) ** 0.5)
        last = 0.1 * d + 0.5 * last
        optimizer.step(batch)
        moved = torch.cat([p.detach().reshape(-1) for p in params.values()]) - start
        assert_close(moved, last)


def test_factors_are_averages():
    loss, params, _ = problem()
    x, y = task()
    optimizer = KFAC(loss, damping=1.0, kind="exact", decay=0.8, lr=1e-9)
    optimizer.step((x[:20], y[:20]))
    optimizer.step((x[20:40], y[20:40]))
    parts = ((x[i : i + 20], y[i : i + 20]) for i in (0, 20))
    blocks = [hog.KFACOperator(loss, params, part).blocks()[0] for part in parts]
    expected = (0.8 * 0.2 * blocks[0].A + 0.2 * blocks[1].A) / (1 - 0.8**2)
    stored = optimizer.state[params["0.weight"]]["0:20 A"] / (1 - 0.8**2)
    assert_close(stored, expected, rtol=1e-6, atol=1e-8)


def test_experts_that_batches_leave_out():
    """A is averaged over the batches that call a layer; G is zero in the others."""
    loss, params, (x, y) = routed_problem()
    batches = [(x[:3], y[:3]), (x, y), (x[3:5], y[3:5]), (x[3:], y[3:])]
    kinds = {"kind": "exact", "lr": 1e-9, "decay": 0.8, "rescale": False}
    optimizer = KFAC(loss, damping=1.0, inverse_every=3, **kinds)
    averages = {0: [0.0, False, 0.0], 2: [0.0, False, 0.0]}  # by leaf: A, whether there is one, G
    for step, batch in enumerate(batches):
        optimizer.step(batch)
        for leaf, sign in ((0, -1), (2, 1)):
            average = averages[leaf]
            own = batch[0][batch[0][:, 0].sign() == sign]
            a = torch.cat([own, torch.ones(len(own), 1, dtype=F64)], 1)
            G = len(own) / len(batch[0]) * torch.eye(2, dtype=F64)
            average[2] = 0.8 * average[2] + 0.2 * G
            if len(own):
                weight = 0.2 / (1 - 0.8 ** (step + 1)) if average[1] else 1.0
                average[0] = (1 - weight) * average[0] + weight * a.T @ a / len(own)
                average[1] = True
    for leaf, name in ((0, "experts.0.weight"), (2, "experts.1.weight")):
        stored, correction = optimizer.state[params[name]], 1 - 0.8**4
        assert_close(stored["0:2 A"][0] / correction, averages[leaf][0])
        assert_close(stored["0:2 G"][0] / correction, averages[leaf][2] / correction)
    again = KFAC(loss, damping=1.0, inverse_every=3, **kinds)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = [p.detach().clone() for p in params.values()]
    optimizer.step(batches[0])
    moved = [p.detach().clone() for p in params.values()]
    with torch.no_grad():
        for p, value in zip(params.values(), before, strict=True):
            p.copy_(value)
    again.step(batches[0])
    assert all(torch.equal(p, value) for p, value in zip(params.values(), moved, strict=True))


@rows("options", [{}, {"method": "pi", "inverse_every": 3, "factors_every": 2}, {"rescale": False}], ids=["defaults", "seldom", "momentum"])  # fmt: skip
def test_a_resumed_run_is_the_same_run(options):
    whole, whole_params, batch = problem()
    optimizer = KFAC(whole, **options)
    for _ in range(6):
        optimizer.step(batch)
    first, _, _ = problem()
    optimizer = KFAC(first, **options)
    for _ in range(4):
        optimizer.step(batch)
    stored = io.BytesIO()
    torch.save((first.model.state_dict(), optimizer.state_dict()), stored)
    stored.seek(0)
    model, state = torch.load(stored, weights_only=True)
    second, params, _ = problem(seed=3)
    second.model.load_state_dict(model)
    optimizer = KFAC(second, **options)
    optimizer.load_state_dict(state)
    for _ in range(2):
        optimizer.step(batch)
    for name, p in params.items():
        assert torch.equal(p, whole_params[name])
    copied = copy.deepcopy(optimizer)
    copied.load_state_dict(optimizer.state_dict())
    copied.step(batch)


SGD = torch.optim.SGD([torch.ones(1)], 0.1)
REFUSED = {
    "an option of nothing": (lambda loss: KFAC(loss, momentums=1), hog.errors.ArgumentTypeError, "expected options among"),
    "no decay": (lambda loss: KFAC(loss, decay=1.0), hog.errors.ArgumentValueError, "decay"),
    "no damping": (lambda loss: KFAC(loss, damping=0.0), hog.errors.ArgumentValueError, "damping"),
    "no batch": (lambda loss: KFAC(loss).step(), hog.errors.ArgumentTypeError, "got None"),
    "the state of another": (lambda loss: KFAC(loss).load_state_dict(SGD.state_dict()), hog.errors.ArgumentValueError, "that of a KFAC"),
}  # fmt: skip
test_what_is_refused = refused(REFUSED, lambda call: call(problem()[0]))


def test_a_step_that_raises_changes_nothing():
    loss, params, batch = problem()
    optimizer = KFAC(loss)
    before = {name: p.detach().clone() for name, p in params.items()}
    with pytest.raises(hog.errors.NonFiniteError):
        optimizer.step((batch[0] * torch.nan, batch[1]))
    assert all(torch.equal(p, before[name]) for name, p in params.items())
    for kind in (KFAC, NewtonCG):
        made = kind(loss)
        loss.model[0].requires_grad_(False)
        with pytest.raises(hog.errors.ArgumentValueError, match=r"got 0\.weight, 0\.bias without"):
            made.step(batch)
        kind(loss).step(batch)  # of what is left
        loss.model[0].requires_grad_(True)
