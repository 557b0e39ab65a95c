"""Penalties of critics that change, cut, cast or run again what they are given."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from hoglib import penalties
from hoglib._core.runtime.source_location import forget_warned
from tests.penalties.critics import draw, generator
from tests.rows import rows
from tests.unchanged import unchanged

F64 = torch.float64
X, FAKE = draw(5, 4), draw(5, 4, seed=1)


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(F64)


def weights(func, model):
    """The gradients of a penalty by the parameters."""
    return torch.autograd.grad(func(), list(model.parameters()), allow_unused=True)


def same(a, b):
    for p, q in zip(a, b, strict=True):
        assert (p is None) == (q is None)
        assert p is None or torch.allclose(p, q, rtol=1e-12, atol=1e-14)


CHECKPOINTED = {
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)),
    "transformer": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True), nn.Flatten(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_what_a_checkpoint_runs_again_in_backward_runs_with_the_same_operations(name):
    block, last = CHECKPOINTED[name]().to(F64), nn.Linear(6, 1).to(F64)
    model = nn.ModuleList([block, last])
    plain = weights(lambda: penalties.r1(lambda x: last(block(x).tanh()), X), model)
    again = weights(
        lambda: penalties.r1(lambda x: last(checkpoint(block, x, use_reentrant=False).tanh()), X),
        model,
    )
    same(plain, again)


class ChangesItsInput(nn.Module):
    """Multiplies what it is given in place, as an activation with inplace=True that comes first."""

    def __init__(self, inplace=True):
        super().__init__()
        self.first, self.net = inplace, nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

    def forward(self, x):
        x = F.leaky_relu(x, 0.2, inplace=self.first)
        return self.net(x)


@pytest.mark.parametrize("x", [X, X[:1].expand(5, 4), X.clone().requires_grad_()])
def test_a_critic_that_changes_its_input_in_place_gets_a_copy(x):
    critic, before = ChangesItsInput().to(F64), x.detach().clone()
    found = weights(lambda: penalties.wgan_gp(critic, x, FAKE, generator=generator()), critic)
    found += weights(lambda: penalties.r1(critic, x), critic)
    critic.first = False
    wanted = weights(lambda: penalties.wgan_gp(critic, x, FAKE, generator=generator()), critic)
    wanted += weights(lambda: penalties.r1(critic, x), critic)
    same(found, wanted)
    assert torch.equal(x.detach(), before)


def test_functions_of_one_code_and_other_critics_are_checked_one_by_one():
    def scores(net, minus_mean):
        return lambda x: net(x) - minus_mean * net(x).mean()

    nets = [network() for _ in range(4)]
    for k in (0, 2):
        with pytest.warns(UserWarning, match="depends on the others"):
            penalties.r1(scores(nets[k], 1.0), X)
        penalties.r1(scores(nets[k + 1], 0.0), X)


def test_a_leaf_without_rows_adds_nothing():
    net, own = network(), torch.arange(5)

    def critic(graph):
        return net(graph["nodes"]).index_add(
            0, torch.zeros(0, dtype=torch.long), graph["edges"].sin()
        )

    def of(x):
        return {"nodes": x, "edges": x.new_zeros(0, 1)}

    batch = {"nodes": own, "edges": torch.zeros(0, dtype=torch.long)}
    found = penalties.wgan_gp(critic, of(X), of(FAKE), batch=batch, generator=generator())
    assert torch.allclose(found, penalties.wgan_gp(net, X, FAKE, generator=generator()))
    assert penalties.dragan(critic, of(X), batch=batch, generator=generator()).isfinite()


@pytest.mark.parametrize("kind", [penalties.wgan_gp, penalties.sobolev])
@pytest.mark.parametrize("data", [torch.float32, torch.bfloat16])
def test_a_module_in_half_precision_stays_in_it_under_autocast(kind, data):
    net = network().to(torch.bfloat16)
    x, fake = X.to(torch.bfloat16), FAKE.to(torch.bfloat16)
    plain = kind(net, x, fake, generator=generator())
    with torch.autocast("cpu", torch.bfloat16):
        under = kind(net, x.to(data), fake.to(data), generator=generator())
    assert torch.allclose(under, plain, rtol=0.02 if data is torch.float32 else 0)


def quadratic(params, x):
    return (x @ params["w"]).square().mean()


def test_the_parameter_gradient_is_the_same_under_autocast():
    params, x = {"w": draw(4, 4).float().requires_grad_()}, X.float()
    plain = penalties.parameter_gradient(quadratic, params, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(penalties.parameter_gradient(quadratic, params, x), plain)
        assert torch.equal(penalties.parameter_gradient(quadratic, params, x.bfloat16().float()),
                           penalties.parameter_gradient(quadratic, params, x.bfloat16()))  # fmt: skip
        asked = penalties.parameter_gradient(quadratic, params, x, autocast=True)
    assert not torch.equal(asked, plain)
    assert torch.allclose(asked, plain, rtol=0.02)


def test_the_norm_of_half_precision_gradients_does_not_overflow():
    params = {"w": torch.full((4,), 300.0, dtype=torch.float16, requires_grad=True)}
    found = penalties.parameter_gradient(
        lambda p: p["w"].square().sum() / 2, params, stand_ins=False
    )
    assert found == 600


# At points whose first row is zero. Of the first ones the value of a penalty is finite, and its gradient is not.
WITHOUT_DERIVATIVE = {
    "power": (lambda z: z.abs() ** 1.5, "Pow"),
    "angle": (lambda z: torch.atan2(z, z), "Atan2"),
    "square root": (lambda z: (z * z).sqrt(), "Sqrt"),
    "reciprocal": (lambda z: torch.where(z > 0, 1 / z, 0), "Reciprocal"),
}  # fmt: skip
WITH_DERIVATIVE = {
    "square": torch.square,
    "norm": lambda z: (z + 1).norm(dim=1, keepdim=True),
    "infinite": lambda z: z / 0.0,
    "kink": torch.relu,
    "safe root": lambda z: (z * z + 1e-6).sqrt(),
    "product": lambda z: z.prod(1, keepdim=True),
    "minGRU": lambda z: (lambda a: a + (F.logsigmoid(z) - F.softplus(-z) - a).logcumsumexp(1))(
        F.logsigmoid(-z).cumsum(1)
    ).exp()[:, -1:],
}
OF_CRITICS = {
    "r1": lambda critic, x: penalties.r1(critic, x),
    "wgan_gp": lambda critic, x: penalties.wgan_gp(critic, x, x),
    "micro_batch": lambda critic, x: penalties.r2(critic, x, micro_batch=2),
    "jacobian": lambda critic, x: penalties.jacobian(critic, x, num_projections=None),
    "forces": lambda critic, x: penalties.forces(critic, x).forces.square().sum(),
    "forces with Hessian": lambda critic, x: penalties.forces(critic, x, hessian=True).forces.square().sum(),
    "parameter_gradient": lambda critic, x: penalties.parameter_gradient(
        lambda p: functional_call(critic, p, (x,)).add(1).square().sum(), dict(critic.named_parameters())
    ),
}  # fmt: skip


class Bare(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.function = nn.Linear(4, 3, bias=False, dtype=F64), function

    def forward(self, x):
        return self.function(self.first(x)).sum(1)


@rows("name", OF_CRITICS)
def test_what_is_not_finite_is_told_by_its_operation(name):
    x = X.clone()
    x[0] = 0
    for function, operation in WITHOUT_DERIVATIVE.values():
        forget_warned()
        with pytest.warns(UserWarning, match=f"infinite or NaN, first behind {operation} at"):
            OF_CRITICS[name](Bare(function), x).backward()
    for function in WITH_DERIVATIVE.values():
        OF_CRITICS[name](Bare(function), x).backward()


def test_what_is_not_finite_reaches_the_gradient_of_an_exact_spectral_norm():
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).to(F64)
    x = X.clone()
    x[2] = torch.inf
    for given, index in ((x, None), (x, torch.arange(5))):
        value = penalties.lipschitz(net, given, bound=0.0, num_iterations=None, batch=index)
        (found,) = torch.autograd.grad(value, net[0].weight)
        assert not value.isfinite()
        assert not found.isfinite().any()


class Batched(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*deprecated",
    "ignore:.*depends on the others",
    "ignore::torch.jit.TracerWarning",  # of the branches of its forward
)
@pytest.mark.parametrize(
    "made", [torch.jit.script, lambda net: torch.jit.trace(net, X, check_trace=False)]
)
def test_the_statistics_of_scripted_modules_do_not_move(made):
    net = made(Batched().to(F64))
    with unchanged(net):
        penalties.r1(net, X)


def in_place(net):
    net.compile(backend="aot_eager")
    return net


COMPILED = {
    "module": lambda net: torch.compile(net, backend="aot_eager"),
    "in place": in_place,
    "function": lambda net: torch.compile(lambda x: net(x), backend="aot_eager"),
}


@pytest.mark.parametrize("how", COMPILED)
def test_the_own_code_of_a_compiled_critic_runs(how):
    net = network()
    plain = weights(lambda: penalties.r1(net, X), net)
    plain += weights(lambda: penalties.sobolev(net, X, FAKE), net)
    critic = COMPILED[how](net)
    found = weights(lambda: penalties.r1(critic, X), net)
    same(plain, found + weights(lambda: penalties.sobolev(critic, X, FAKE), net))


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`")
def test_compiled_code_inside_runs_uncompiled():
    net = network()
    part = torch.compile(net, backend="aot_eager")
    plain = weights(lambda: penalties.r1(net, X), net)
    same(plain, weights(lambda: penalties.r1(lambda x: part(x), X), net))


@pytest.mark.parametrize("outputs", [1, 2])
def test_sobolev_of_graphs(outputs):
    index, w = torch.tensor([1, 0, 1, 1, 2]), draw(4, 2).requires_grad_()

    def func(x):
        y = torch.tanh(x @ w[:, :outputs])
        return y.new_zeros(3, outputs).index_add(0, index, y)

    slopes = (1 - torch.tanh(X @ w[:, :outputs]).square())[:, :, None] * w[:, :outputs].T
    wanted = draw(*slopes.shape, seed=4)
    value = penalties.sobolev(func, X, wanted, batch=index)
    assert torch.allclose(value, (slopes - wanted).square().sum() / 3)
    if outputs == 1:
        assert torch.allclose(penalties.sobolev(func, X, wanted[:, 0], batch=index), value)


@pytest.mark.parametrize("cut", [torch.Tensor.detach_, lambda x: x.requires_grad_(False)])
def test_a_critic_that_detaches_its_input_in_place_is_named(cut):
    net = nn.Linear(4, 1).to(F64)
    with pytest.raises(RuntimeError, match="no effect"):
        penalties.r1(lambda x: net(cut(x)).tanh(), X.clone())


def test_a_backward_that_raises_leaves_no_hooks_that_stay():
    model = nn.Linear(4, 1).to(F64)

    def fail(_):
        raise ZeroDivisionError

    value = penalties.r1(lambda x: model(x).exp(), X)
    hook = model.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        value.backward(retain_graph=True)
    hook.remove()
    value.backward()
    assert not model.weight._backward_hooks
    assert not model.bias._backward_hooks
