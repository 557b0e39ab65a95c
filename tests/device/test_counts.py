"""What waits for a device: after the first call at a signature no product does, that of an operator once. What is not finite is reported all the same, one call later."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hoglib as hog
from hoglib import curvature, meta, penalties
from tests.device import simulation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(simulation.C is None, reason="waits are counted on the simulated GPU"),
]


H, G = curvature.HessianOperator, curvature.GGNOperator


def ones():
    return torch.ones(501, device="cuda")


def network(out=5):
    torch.manual_seed(0)
    widths = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, out)]
    return nn.Sequential(*widths).cuda()


def batches(count, device="cuda"):
    draw = torch.Generator().manual_seed(1)
    xs = [torch.randn(16, 8, generator=draw) for _ in range(count)]
    ys = [torch.randint(0, 5, (16,), generator=draw) for _ in range(count)]
    return [(x.to(device), y.to(device)) for x, y in zip(xs, ys, strict=True)]


def product(function, **options):
    net = network()
    loss, params = hog.functional_loss(net, cross_entropy), hog.trainable_params(net)
    vector = {name: torch.ones_like(p) for name, p in params.items()}
    batch = batches(1)[0]
    return lambda: function(loss, params, vector, batch, **options)


def operator(kind, data, **options):
    net = network()
    made = kind(hog.functional_loss(net, cross_entropy), hog.trainable_params(net), data, **options)
    vector = torch.ones(made.shape[0], device="cuda")
    return lambda: made @ vector


def penalty(function):
    critic, real = network(1), batches(2)
    points = [real[0][0]] if function is penalties.r1 else [real[0][0], real[1][0]]
    return lambda: function(critic, *points)


def forces():
    energy, x = network(1), batches(1)[0][0]
    return lambda: penalties.forces(lambda x: energy(x).squeeze(-1), x)


def laplacian():
    u, x = network(1), batches(1)[0][0]
    return lambda: hog.laplacian(lambda x: u(x).squeeze(-1), x)


def step():
    net, (support, query) = network(), batches(2)
    maml = meta.MAML(net, cross_entropy, inner_lr=0.1, inner_steps=2)
    return lambda: maml.loss([(support, query)]).backward()


def of(make, data=None):
    """make: what is called, of a loss, its parameters and a batch, or data."""

    def made():
        net = network()
        loss, params = hog.functional_loss(net, cross_entropy), hog.trainable_params(net)
        return make(loss, params, data() if data else batches(1)[0])

    return made


# at most so many waits in a call after the first ones
ROWS = {
    "hvp": (0, lambda: product(hog.hvp)),
    "hvp, forward over reverse": (0, lambda: product(hog.hvp, mode="forward-over-reverse")),
    "ggn_vp": (0, lambda: product(hog.ggn_vp)),
    "fisher_vp": (0, lambda: product(hog.fisher_vp)),
    "r1": (0, lambda: penalty(penalties.r1)),
    "wgan_gp": (0, lambda: penalty(penalties.wgan_gp)),
    "forces": (0, forces),
    "laplacian": (0, laplacian),
    "MAML": (0, step),
    "Hessian, a batch": (1, lambda: operator(curvature.HessianOperator, batches(1))),
    "Hessian, three batches": (1, lambda: operator(curvature.HessianOperator, batches(3))),
    "Hessian, batches of the CPU": (1, lambda: operator(curvature.HessianOperator, batches(4, "cpu"))),
    "GGN, three batches": (1, lambda: operator(curvature.GGNOperator, batches(3))),
    "Fisher, three batches": (1, lambda: operator(curvature.FisherOperator, batches(3))),
    "value and gradient": (2, of(lambda *given: G(*given).gradient)),
    "dense": (2, of(lambda *given: G(*given).to_dense)),
    "trace": (4, of(lambda *given: partial(H(*given).trace, 4))),
    # of 11 iterations, 20 steps, 36 products
    "solve": (6, of(lambda *given: partial(G(*given).solve, ones(), damping=0.1))),
    "solve, batches": (6, of(lambda *given: partial(G(*given).solve, ones(), damping=0.1), partial(batches, 3))),
    "density": (3, of(lambda *given: partial(H(*given).spectral_density, 4, steps=20))),
    "exp(G)": (7, of(lambda *given: partial(G(*given).matrix_function, ones(), torch.exp, steps=20))),
    "eigsh": (12, of(lambda *given: partial(H(*given).eigsh, 3), partial(batches, 3))),
    "KFAC's factors": (4, of(lambda *given: lambda: curvature.KFACOperator(*given).update())),
    "KFAC's inverse": (2, of(lambda *given: partial(curvature.KFACOperator(*given).update().inverse, 1.0))),
    "influence": (11, of(lambda *given: partial(curvature.influence, *given, given[-1], damping=1.0))),
    "self-influence": (11, of(lambda *given: partial(curvature.influence, *given, None, damping=1.0, solver=curvature.KFACOperator(*given)))),
    "Jacobian": (2, of(lambda *given: partial(curvature.JacobianOperator(*given).__matmul__, ones()))),
    "J @ J.T": (4, of(lambda *given: partial((lambda J: (J @ J.T).__matmul__)(curvature.JacobianOperator(*given)), torch.ones(240, device="cuda")), partial(batches, 3))),
    "a given function": (1, lambda: partial(curvature.LinearOperator.from_matvec(lambda v: 2 * v, ones()).__matmul__, ones())),
    "NewtonCG": (10, of(lambda *given: partial(curvature.NewtonCG(*given[:2]).step, given[2]))),
    "NewtonCG, KFAC": (10, of(lambda *given: partial(curvature.NewtonCG(*given[:2], preconditioner="kfac").step, given[2]))),
    "curvature.KFAC": (10, of(lambda *given: partial(curvature.KFAC(*given[:2]).step, given[2]))),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_waits(name):
    most, make = ROWS[name]
    call = make()
    for _ in range(3):
        call()
    with simulation.record() as found:
        call()
    assert found.launches > 0
    assert found.stalls <= most, str(found)


def likelihood(x, device="cuda"):
    net = network()
    loss, params = hog.functional_loss(net, cross_entropy), hog.trainable_params(net)
    return hog.fisher_vp(loss, params, params, (x, torch.zeros(3, dtype=torch.long, device=device)))


LABELS = torch.arange(3)
# a function that is finite at ones, and a call of it at some point
LATE = {
    "hvp": lambda x: hog.hvp(lambda x: x.pow(1.5).sum(), x[0], x[0]),
    "laplacian": lambda x: hog.laplacian(lambda x: x.pow(1.5).sum(-1), x),
    "forces": lambda x: penalties.forces(lambda x: x.pow(1.5).sum(-1), x, hessian=True),
    "fisher_vp": likelihood,
    "Hessian": lambda x: hog.HessianOperator(lambda p, x: p.pow(1.5).sum(), x[0], x) @ x[0],
    "MAML": lambda x: meta.MAML(network(), cross_entropy, inner_lr=0.1).loss([((x, LABELS.cuda()),) * 2]),
}  # fmt: skip
RAISES = {
    "fisher_vp": "outputs: .* one call ago", "Hessian": "in an earlier product", "MAML": "one call later"
}  # fmt: skip


def reported(warned):
    return [w for w in warned.list if "infinite" in str(w.message)]


@pytest.mark.parametrize("name", LATE)
def test_what_is_not_finite_is_reported_at_the_next_call(name, recwarn):
    call, good = LATE[name], torch.ones(3, 8, device="cuda")
    call(good), call(good)
    call(good * torch.nan if name in ("fisher_vp", "MAML") else 0 * good)
    assert not reported(recwarn)
    torch.cuda.synchronize()
    if name in RAISES:
        with pytest.raises(hog.errors.NonFiniteError, match=RAISES[name]):
            call(good)
    else:
        with pytest.warns(UserWarning, match="infinite or NaN, first behind"):
            call(good)
    recwarn.clear()
    torch.cuda.synchronize()
    call(good), call(good)  # once
    assert not reported(recwarn)


def test_a_change_that_no_version_counts_is_seen():
    """By a graph that is kept, too, and in an algorithm."""

    def check(*given):
        kept = H(*given)
        for change in (0.0, 0.1, 0.0, 0.2):
            for p in given[1].values():
                p.data.add_(change)
            assert torch.equal(kept @ ones(), H(*given) @ ones())
            assert torch.equal(kept.eigsh(2).values, H(*given).eigsh(2).values)

    of(check)()


def test_a_loss_that_draws_is_told_when_the_next_product_begins():
    noisy = lambda o, y: cross_entropy(o, y) + torch.rand((), device="cuda")  # noqa: E731
    net = network()
    loader = DataLoader(batches(1), batch_size=None)
    made = H(hog.functional_loss(net, noisy), hog.trainable_params(net), loader)
    made @ ones(), made @ ones()
    with pytest.raises(hog.errors.NondeterministicError, match="random numbers are drawn at"):
        made @ ones()
