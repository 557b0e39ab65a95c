"""compile=True: a penalty and its gradients as one graph are those without, from call to call."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib import penalties
from hoglib.capture import capturing
from tests.long_tail import FULL
from tests.penalties.critics import build, draw, generator, plain
from tests.rows import rows

X, FAKE = draw(5, 3), draw(5, 3, seed=1)
GRAPHS = torch.tensor([0, 0, 1, 1, 1])
SMOOTH = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))  # noqa: E731


def pooled(critic):
    return lambda x, index: torch.zeros(2, dtype=x.dtype).index_add(0, index, critic(x)[:, 0])


def mean_square(critic):
    return lambda params, x: torch.func.functional_call(critic, params, x).square().mean()


def with_outputs(found):
    value, outputs = found
    return value + sum(y.sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))


def forced(found):
    energies, forces, *rest = found
    return energies.sum() + forces.square().sum() + sum(h.square().sum() for h in rest)


# name: (critic, (critic, **options) -> scalar); the others are compiled in tests/conformance
KINDS = {
    "wgan_gp": (plain, lambda c, **o: penalties.wgan_gp(c, X, FAKE, generator=generator(), **o)),
    "r1": (plain, lambda c, **o: penalties.r1(c, X, **o)),
    "jacobian": (SMOOTH, lambda c, **o: penalties.jacobian(c, X, generator=generator(), **o)),
    "input_gradient": (SMOOTH, lambda c, **o: penalties.input_gradient(lambda x: c(x).square().sum(1), X, **o)),
    "parameter_gradient with outputs": (
        SMOOTH,
        lambda c, **o: with_outputs(
            penalties.parameter_gradient(
                mean_square(c), dict(c.named_parameters()), X, return_outputs=True, **o
            )
        ),
    ),
    "terms": (plain, lambda c, **o: (penalties.r1(c, X, reduction="none", **o) * X[:, 0]).sum()),
    "outputs of both": (plain, lambda c, **o: with_outputs(penalties.r1_r2(c, X, FAKE, return_outputs=True, **o))),
    "micro-batches of projections": (
        SMOOTH,
        lambda c, **o: penalties.jacobian(c, X, generator=generator(), micro_batch=2, **o),
    ),
    "between graphs": (
        plain,
        lambda c, **o: penalties.wgan_gp(pooled(c), X, FAKE, GRAPHS, batch=GRAPHS, generator=generator(), **o),
    ),
    "an output": (SMOOTH, lambda c, **o: penalties.r1(c, X, output=lambda y: y.square().mean(1), **o)),
    "outputs are forces": (plain, lambda c, **o: forced(penalties.forces(c, X, **o))),
    "outputs are forces and a Hessian": (plain, lambda c, **o: forced(penalties.forces(c, X, hessian=True, **o))),
    "outputs are those of one structure": (plain, lambda c, **o: forced(penalties.forces(lambda x: c(x).sum(), X, **o))),
    "outputs are forces in graphs": (plain, lambda c, **o: forced(penalties.forces(pooled(c), X, GRAPHS, batch=GRAPHS, **o))),
}  # fmt: skip


def gradients(critic, value):
    return torch.autograd.grad(
        value, list(critic.parameters()), allow_unused=True, materialize_grads=True
    )


def train(critic, penalty, steps=2, **options):
    """Values and gradients of some steps, each at other parameters."""
    found = []
    for _ in range(steps):
        torch.manual_seed(0)
        value = penalty(critic, **options)
        grads = gradients(critic, value)
        found.append((value.detach(), *grads))
        with torch.no_grad():
            for p, g in zip(critic.parameters(), grads, strict=True):
                p.sub_(0.3 * g)
    return found


@pytest.fixture
def calls(monkeypatch):
    """How many graphs are captured."""
    captures = []
    capture = capturing.capture

    def counted(function, *args):
        captures.append(function.name)
        return capture(function, *args)

    monkeypatch.setattr(capturing, "capture", counted)
    return captures


@pytest.mark.parametrize("name", KINDS)
def test_compiled_is_eager_while_parameters_change(name, calls):
    make, penalty = KINDS[name]
    expected = train(build(make), penalty)
    assert_close(train(build(make), penalty, compile="eager"), expected, rtol=1e-10, atol=1e-12)
    assert expected[0][0] != expected[-1][0]
    several = ("outputs", "terms", "micro")  # are two graphs
    most = 1 + any(word in name for word in several)
    assert 1 <= len(calls) <= most  # and not one a step, though functions are made anew


TASK = (X, X), (X, X)
BY_TRUE = {
    "penalty": lambda net: penalties.r1(lambda x: net(x).sum(1), X, compile=True),
    "product": lambda net: hog.hvp(lambda p: net(p).sum(), X, X, compile=True),
    "Laplacian": lambda net: hog.laplacian(net, X, compile=True),
    "inner loop": lambda net: hog.MAML(net, F.mse_loss, compile=True).loss([TASK]),
}


@rows("name", BY_TRUE)
def test_true_is_the_compiler_of_torch(name, monkeypatch):
    def compiles(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("torch._inductor.standalone_compile", compiles)
    with pytest.raises(ZeroDivisionError):
        BY_TRUE[name](build(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh())))


@FULL  # tests/capture has what inductor makes of graphs
@pytest.mark.parametrize("name", ["wgan_gp", "r1"])
def test_the_compiler_agrees(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    make, penalty = KINDS[name]
    expected = train(build(make), penalty)
    assert_close(train(build(make), penalty, compile=True), expected, rtol=1e-10, atol=1e-12)
    assert list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5)],
        lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh()],
        lambda: [nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh()],
        lambda: [hog.nn.LinearAct(3, 4, act="swish")],
    ],
    ids=["dropout", "spectral norm", "layer norm", "an op of hoglib"],
)
def test_layers_in_train_mode(layers):
    make = lambda: nn.Sequential(*layers(), nn.Linear(4, 1))  # noqa: E731
    for critic_of in (lambda c: c, lambda c: lambda x: c(x)):
        penalty = lambda c, of=critic_of, **o: penalties.wgan_gp(of(c), X, FAKE, **o)  # noqa: E731
        critic = build(make)
        before = copy.deepcopy(dict(critic.named_buffers()))
        expected = train(build(make), penalty)
        assert_close(train(critic, penalty, compile="eager"), expected, rtol=1e-10, atol=1e-12)
        assert_close(dict(critic.named_buffers()), before, rtol=0, atol=0)


def test_batch_norm_warns_once_and_keeps_its_statistics():
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)
    )
    penalty, critic = KINDS["r1"][1], build(make)
    statistics = copy.deepcopy(dict(critic.named_buffers()))
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        expected = train(build(make), penalty)
    with pytest.warns(UserWarning, match="BatchNorm1d") as caught:
        found = train(critic, penalty, compile="eager")
    assert len(caught) == 1
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert_close(dict(critic.named_buffers()), statistics, rtol=0, atol=0)
    critic.eval()
    value = penalty(critic, compile="eager")
    assert_close(value, penalty(critic), rtol=1e-10, atol=1e-12)


def test_random_numbers_are_those_without_a_graph():
    critic = build(SMOOTH)
    for options in ({}, {"compile": "eager"}):
        g = generator()
        states = []
        for count in (1, 2, 1):
            penalties.jacobian(critic, X, num_projections=count, generator=g, **options)
            penalties.dragan(lambda x: critic(x)[:, 0], X, generator=g, **options)
            states.append(g.get_state())
        if not options:
            expected = states
    assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))
    torch.manual_seed(0)
    penalties.jacobian(critic, X)
    state = torch.get_rng_state()
    for _ in range(2):
        torch.manual_seed(0)
        penalties.jacobian(critic, X, compile="eager")
        assert torch.equal(torch.get_rng_state(), state)


def test_numbers_and_tensors_in_functions_made_anew(calls):
    critic = build(plain)

    def times(factor, **options):
        return penalties.r1(lambda x: critic(x) * factor, X, **options)

    for factor in (1.0, 2.0, 1.0, 2.0):
        assert_close(times(factor, compile="eager"), times(factor))
    assert len(calls) == 2
    for factor in map(torch.tensor, (1.0, 2.0, 3.0)):
        assert_close(times(factor, compile="eager"), times(factor))
    assert len(calls) == 3


def test_gradients_by_points_and_twice():
    def found(**options):
        critic, x = build(plain), X.clone().requires_grad_()
        value = penalties.r1(critic, x * 2, **options)
        by_points, *grads = torch.autograd.grad(value, [x, critic[0].weight], create_graph=True)
        (again,) = torch.autograd.grad(
            by_points.square().sum() + grads[0].square().sum(), critic[0].weight
        )
        return by_points, *grads, again

    assert_close(found(compile="eager"), found(), rtol=1e-10, atol=1e-12)


def test_gradients_share_no_memory_with_one_another_or_the_graph():
    critic = build(plain)
    value = penalties.r1(critic, X, compile="eager")
    value.backward(retain_graph=True)
    first = [None if p.grad is None else p.grad.clone() for p in critic.parameters()]
    for p in critic.parameters():
        if p.grad is not None:
            p.grad.mul_(100)
    grads = gradients(critic, value)
    for a, b in zip(first, grads, strict=True):
        assert_close(b, torch.zeros_like(b) if a is None else a)


@pytest.mark.parametrize("on", [False, True], ids=["off inside", "on inside"])
def test_under_autocast(on):
    def found(**options):
        critic = build(plain).float()
        with torch.autocast("cpu", torch.bfloat16):
            value = penalties.r1(critic, X.float(), autocast=on, **options)
        return value, gradients(critic, value)

    assert_close(found(compile="eager"), found())


def test_where_nothing_is_learnt_nothing_is_captured(calls):
    critic = build(plain)
    expected = penalties.r1(critic, X).detach()
    with torch.no_grad():
        assert_close(penalties.r1(critic, X, compile="eager"), expected)
    with torch.inference_mode():
        assert_close(penalties.r1(critic, X, compile="eager"), expected)
    grads = torch.func.vmap(lambda x: penalties.r1(critic, x[None], compile="eager"))(X)
    assert_close(grads.mean(), expected)
    critic.requires_grad_(False)
    found = penalties.r1(critic, X, compile="eager")
    assert not found.requires_grad
    assert_close(found, expected)
    assert not calls
    critic.requires_grad_(True)
    assert penalties.r1(critic, X, compile="eager").requires_grad
    assert calls


CRITIC = build(plain)


def detached(x):
    return CRITIC(x.detach())


def reading(x):
    y = CRITIC(x)
    return y * 2 if y.sum() > 0 else y


@pytest.mark.parametrize(
    ("critic", "error", "says"),
    [
        (detached, RuntimeError, "no effect.*detach"),
        (reading, NotImplementedError, "reads them.*test_compiled"),
    ],
    ids=["a cut", "a value that is read"],
)
def test_what_cannot_be_captured_is_refused(critic, error, says):
    for _ in range(2):
        with pytest.raises(error, match=f"(?s){says}"):
            penalties.r1(critic, X, compile="eager")


def test_batch_dependence_is_warned_of():
    critic = build(plain)
    with pytest.warns(UserWarning, match="depends on the others"):
        penalties.r1(lambda x: critic(x) * critic(x).mean(), X, compile="eager")


def test_options():
    with pytest.raises(ValueError, match=r"compile.*'induktor'"):
        penalties.r1(build(plain), X, compile="induktor")
    with pytest.raises(ValueError, match=r"compile.*'induktor'"):
        hog.GradientPenalty("parameter_gradient", options={"compile": "induktor"})(
            lambda p: p.square().sum(), torch.ones(2, requires_grad=True)
        )
    ran = []

    def backend(graph, inputs):
        ran.append(len(inputs))
        return graph.forward

    penalties.r1(build(plain), X, compile=backend)
    assert ran


def step(critic, penalty):
    def loss(real, fake):
        return F.softplus(critic(fake) - critic(real)).mean() + 5 * penalty(critic, real, fake)

    return loss


@pytest.mark.parametrize(
    "kind", ["wgan_gp", "zero_centred", "r1", "r2", "r1_r2", "dragan", "lipschitz"]
)
def test_a_whole_step_is_one_graph(kind):
    critic, plainly, penalty = build(plain), build(plain), hog.GradientPenalty(kind)
    loss = hog.compiled_loss(step(critic, penalty), backend="eager")
    found = train(critic, lambda _: loss(X, FAKE), 3)
    expected = train(plainly, lambda _: step(plainly, penalty)(X, FAKE), 3)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert len(loss.signatures) == 1


def test_lazily_a_graph_cannot_count():
    critic, penalty = build(plain), hog.GradientPenalty("r1", every=2)
    with pytest.raises(NotImplementedError, match=r"penalty.factor\(\)"):
        hog.compiled_loss(step(critic, penalty), backend="eager")(X, FAKE)

    def loss(real, factor):
        value = critic(real).mean()
        return value + factor * penalty.value(critic, real) if factor else value

    fast = hog.compiled_loss(loss, backend="eager")
    factors = [penalty.factor() for _ in range(4)]
    assert factors == [20.0, 0.0, 20.0, 0.0]
    for factor in factors:
        assert_close(fast(X, factor), loss(X, factor))
    assert len(fast.signatures) == 2
