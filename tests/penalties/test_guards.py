"""Penalties without effect, or with another one than it seems: each mistake is named."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hoglib import penalties
from hoglib.verification import entry_points
from tests.functions import (
    BackwardWithoutGrad,
    ClassicCube,
    KeepsIntermediate,
    OnceDifferentiable,
    ThroughNumpy,
)
from tests.models import Fn
from tests.penalties.critics import build, draw, plain

X, FAKE = draw(5, 3), draw(5, 3, seed=1)


class Detaching(nn.Module):
    def forward(self, x):
        return x.detach() * 2


FIRST, LAST = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
through = lambda function: lambda x: LAST(function(FIRST(x)))  # noqa: E731
beside = lambda function: lambda x: LAST(FIRST(x).tanh() + function(FIRST(x)))  # noqa: E731

WITHOUT_EFFECT = {
    "detached input": (lambda x: LAST(FIRST(x.detach())), r"does not depend on the points.*\.detach\(\) at .*test_guards\.py:\d+"),
    "data": (lambda x: LAST(FIRST(x.data)), r"\.data at .*test_guards\.py"),
    "a layer that detaches": (nn.Sequential(FIRST, Detaching(), LAST), r"\.detach\(\) at .*test_guards\.py:\d+.* in Detaching"),
    "no_grad around the critic": (torch.no_grad()(nn.Sequential(FIRST, LAST)), r"`linear` under torch\.no_grad in Linear"),
    "inference mode in the critic": (torch.inference_mode()(nn.Sequential(FIRST, LAST)), r"under torch\.inference_mode"),
    "through NumPy": (lambda x: LAST(torch.from_numpy(FIRST(x).detach().numpy())), r"\.detach\(\), then \.numpy\(\),"),
    "a number in Python": (lambda x: LAST.weight.sum() * torch.tensor([row.sum().item() for row in x], dtype=x.dtype), r"\.item\(\)"),
    "rounded": (lambda x: LAST(FIRST(x.round().detach())), r"\.detach\(\)"),
    "weights detached": (lambda x: F.linear(x, FIRST.weight.detach()).tanh().sum(1) + LAST.bias, "does not reach any parameter"),
    "all weights detached": (lambda x: (LAST(FIRST(x)).detach() * x).sum(1), r"does not reach any parameter.*\.detach\(\) at .*test_guards"),
    "a frozen path": (lambda x: x.square().sum(1) * 2 + LAST.bias, "does not reach any parameter.*frozen, or the gradient by the points is the same"),
    "once differentiable": (through(OnceDifferentiable.apply), "because its gradient is detached.*OnceDifferentiable.*once_differentiable"),
    "once differentiable beside a path": (beside(OnceDifferentiable.apply), "detached in a custom Function.*OnceDifferentiable"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["r1", "wgan_gp", "jacobian", "lipschitz", "r1 in micro-batches"])
@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_a_penalty_without_effect_raises_and_names_what_detaches(case, kind):
    critic, message = WITHOUT_EFFECT[case]
    call = {
        "r1": lambda: penalties.r1(critic, X),
        "r1 in micro-batches": lambda: penalties.r1(critic, X, micro_batch=2),
        "wgan_gp": lambda: penalties.wgan_gp(critic, X, FAKE),
        "jacobian": lambda: penalties.jacobian(critic, X),
        "lipschitz": lambda: penalties.lipschitz(critic, X),
    }[kind]
    name = kind.removesuffix(" in micro-batches")
    with pytest.raises(RuntimeError, match=rf"(?s)^{name}: this penalty has no effect.*{message}"):
        call()


@pytest.mark.parametrize("case", [case for case in WITHOUT_EFFECT if "once" not in case])
def test_validation_is_not_refused(case):
    critic, _ = WITHOUT_EFFECT[case]
    with torch.no_grad():
        assert not penalties.r1(critic, X).requires_grad


def test_a_critic_without_parameters_that_require_grad_is_not_refused():
    frozen = nn.Sequential(nn.Linear(3, 4), Detaching(), nn.Linear(4, 1)).double()
    assert penalties.r1(frozen.requires_grad_(False), X) == 0
    model = build(plain).requires_grad_(False)
    assert not penalties.r1(model, X).requires_grad
    x = X.clone().requires_grad_()  # but the samples learn
    penalties.r2(model, x).backward()
    assert x.grad.any()


@pytest.mark.parametrize(
    "function", [KeepsIntermediate, BackwardWithoutGrad, ThroughNumpy], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("make", [through, beside], ids=["through", "beside"])
def test_a_function_that_loses_a_part_is_named(function, make):
    with pytest.warns(
        UserWarning, match=rf"r1: the second derivative of {function.__name__} is wrong"
    ):
        penalties.r1(make(function.apply), X)


@pytest.mark.parametrize("make", [through, beside], ids=["through", "beside"])
def test_a_right_function_is_not_accused(make):
    for kind in (penalties.r1, penalties.jacobian, penalties.lipschitz):
        kind(make(ClassicCube.apply), X)
    generator = torch.Generator()
    critic = make(ClassicCube.apply)
    first = penalties.dragan(critic, X, generator=generator.manual_seed(0))
    after = generator.get_state()
    entry_points.forget_verdicts()
    # the examination draws no random numbers of it
    assert penalties.dragan(critic, X, generator=generator.manual_seed(0)) == first
    assert torch.equal(after, generator.get_state())


# Samples that depend on one another


def batch_norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


class MinibatchDeviation(nn.Module):
    """A feature of the whole batch, as in StyleGAN's critic."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(torch.cat([x, x.std(0).mean().expand(len(x), 1)], 1))


DEPENDENT = {
    "batch norm": (batch_norm, r"through BatchNorm1d '1' in training mode.*LayerNorm"),
    "batch norm without running statistics": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1)).eval(),
        "through BatchNorm1d '1', which",
    ),
    "later samples": (lambda: nn.Sequential(Fn(lambda _, x: x.flip(0).cumsum(0).flip(0)), nn.Linear(3, 1)), "depends on the others"),
    "a feature of the batch": (MinibatchDeviation, r"depends on the others\. .*attention along the batch"),
}  # fmt: skip


@pytest.mark.parametrize("case", DEPENDENT)
@pytest.mark.parametrize("call", ["module", "method", "lambda"])
def test_samples_that_depend_on_one_another_are_warned_of(case, call):
    make, message = DEPENDENT[case]
    model = build(make)
    critic = {"module": model, "method": model.forward, "lambda": lambda x: model(x)}[call]
    if call == "lambda":
        message = message.replace(" '1'", "")
    for _ in range(2):  # at every call: the filter of warnings is the user's
        with pytest.warns(UserWarning, match=f"r1: .*{message}") as caught:
            penalties.r1(critic, X)
        assert len(caught) == 1
        assert caught[0].filename == __file__
    with torch.no_grad():
        penalties.r1(critic, X)


def test_samples_on_their_own_are_not_accused():
    penalties.r1(nn.Sequential(nn.Dropout(), build(plain)), X)
    model = build(batch_norm).eval()
    penalties.r1(model, X)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        penalties.r1(model.train(), X)
    first, whole = build(plain), lambda y: y - y.mean()
    for output in (None, whole, None):  # of one critic
        with pytest.warns(UserWarning, match="depends on the others") if output else nullcontext():
            penalties.r1(first, X, output=output)
    index = torch.tensor([0, 0, 1, 1, 2])
    node = build(plain)
    pooled = lambda x, i: torch.zeros(3, dtype=x.dtype).index_add(0, i, node(x)[:, 0]) ** 2  # noqa: E731
    penalties.r1(pooled, X, index, batch=index)
    with pytest.warns(UserWarning, match="depends on the others"):
        penalties.r1(lambda x, i: pooled(x, i) + pooled(x, i).sum(), X, index, batch=index)
