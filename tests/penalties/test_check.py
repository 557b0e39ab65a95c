"""`hog.penalties.check`: right penalties pass, and of wrong ones the row of the mistake fails.

Both are hand-written as published code is, so that this compares hoglib's own with other formulas.
"""

import random
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Generator, autograd, nn

import hoglib as hog
from hoglib.errors import HoglibError, VerificationError
from hoglib.penalties import check

# Penalties by hand, of parts that can be replaced


def column(real):
    """One uniform number for each sample."""
    return torch.rand(len(real), *[1] * (real.dim() - 1), dtype=real.dtype)


def mix(e):
    return lambda real, fake: torch.lerp(fake, real, e(real))


def noisy(noise):
    return lambda real, fake: real + 0.5 * noise(real)


def own(real, fake):
    return real


def slopes(critic, x, **options):
    score = critic(x)
    return autograd.grad(score, x, torch.ones_like(score), **({"create_graph": True} | options))[0]


def flat(g):
    return g.flatten(1).norm(2, dim=1)


def above(n):
    return (n - 1).clamp(min=0)


between = mix(column)


def gp(points=between, slope=slopes, norm=flat, term=lambda n: (n - 1) ** 2, mean=torch.mean):
    """A penalty: mean(term(norm(slope(critic, points(real, fake)))))."""

    def penalty(critic, real, fake=None):
        x = points(real, fake).detach().requires_grad_()
        return mean(term(norm(slope(critic, x))))

    return penalty


def r1(critic, real):
    return gp(own, term=lambda n: n**2 / 2)(critic, real)


def r1_r2(critic, real, fake):
    return r1(critic, real) + r1(critic, fake)


wgan_gp, zero_centred, dragan = gp(), gp(term=torch.square), gp(noisy(torch.randn_like))
one_sided = gp(term=lambda n: above(n) ** 2)


def lazy(penalty, every, times):
    """Acts at every so many calls, as a training loop with `if step % every == 0`."""
    calls = SimpleNamespace(count=0)

    def added(critic, real, fake):
        calls.count += 1
        return times * penalty(critic, real, fake) if calls.count % every == 0 else 0.0

    return added


def times(k, penalty=wgan_gp):
    return lambda critic, *samples: k * penalty(critic, *samples)


# Right ones, as others write them


def by_vmap(critic, x):
    return torch.func.vmap(torch.func.grad(lambda row: critic(row.unsqueeze(0)).squeeze()))(x)


def sample_by_sample(critic, x):
    return torch.cat([slopes(critic, row) for row in x.detach().unsqueeze(1).requires_grad_()])


def in_one_call(critic, real, fake):
    x = torch.cat([real, fake]).requires_grad_()
    return slopes(critic, x).square().sum() / 2 / len(real)


def with_a_score(critic, real, fake):
    critic(real), critic(fake)
    return wgan_gp(critic, real, fake)


def of_arrays(critic, real, fake):
    """With ones and coefficients of float32, whatever real is of, and ones for columns of scores."""
    e = torch.FloatTensor(np.random.random((len(real), *[1] * (real.dim() - 1))))
    x = torch.autograd.Variable(e * real + (1 - e) * fake, requires_grad=True)
    ones = torch.FloatTensor(len(real), 1).fill_(1.0)
    (g,) = autograd.grad(critic(x), x, ones, create_graph=True, retain_graph=True)
    return ((g.view(len(g), -1).norm(2, dim=1) - 1) ** 2).mean()


g = Generator().manual_seed(5)
RIGHT = {
    "wgan_gp": (wgan_gp, "wgan_gp", {}),
    "one-sided": (one_sided, "wgan_gp", {"one_sided": True}),
    "another target": (gp(term=lambda n: (n - 3) ** 2), "wgan-gp", {"target": 3.0}),
    "a target of zero": (zero_centred, "wgan_gp", {"target": 0.0}),
    "zero_centred": (zero_centred, "zero_centred", {}),
    "r1": (r1, "r1", {}),
    "r1 with an option": (lambda D, real, gamma=4.0: gamma * r1(D, real), "r1", {"weight": 4.0}),
    "r2": (r1, "r2", {}),
    "r1_r2": (r1_r2, "r1_r2", {"shape": (5, 7)}),
    "r1_r2 in one call": (in_one_call, "r1_r2", {}),
    "dragan": (dragan, "dragan", {}),
    "private noise": (gp(noisy(lambda x: torch.randn(x.shape, generator=g).to(x))), "dragan", {}),
    "epsilon": (gp(norm=lambda g: (g.square().flatten(1).sum(1) + 1e-12).sqrt()), "wgan_gp", {}),
    "vmap": (gp(slope=by_vmap), "wgan_gp", {}),
    "sample by sample": (gp(slope=sample_by_sample), "wgan_gp", {}),
    "the critic is run elsewhere too": (with_a_score, "wgan_gp", {}),
    "arrays and Variables": (of_arrays, "wgan_gp", {"dtype": torch.float32}),
    "lazy": (lazy(wgan_gp, 4, 4.0), "wgan_gp", {"every": 4}),
    "every call of several": (wgan_gp, "wgan_gp", {"every": 3}),
    "vectors": (wgan_gp, "wgan_gp", {"shape": (2,)}),
    "dragan in float32": (dragan, "dragan", {"dtype": torch.float32}),
    # hoglib's own
    "in micro-batches": (partial(hog.penalties.wgan_gp, micro_batch=2), "wgan_gp", {}),
    "dragan with noise": (partial(hog.penalties.dragan, noise=0.3), "dragan", {}),
    "the module, lazy": (hog.GradientPenalty("wgan_gp", every=4), "wgan_gp", {"weight": 10.0, "every": 4}),
    "the module, evaluated": (hog.GradientPenalty("r1", weight=1.0, every=4).eval(), "r1", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_penalty_passes(name):
    penalty, kind, options = RIGHT[name]
    report = check(penalty, kind, **options)
    drawn = ["points"] if "r1" not in kind and "r2" not in kind else []
    rows = ["value", *drawn, "reaches the critic", "parameter gradient", "zero gradient"]
    assert [(row.name, row.status) for row in report] == [(row, "pass") for row in rows], str(
        report
    )
    assert getattr(penalty, "calls", 0) == 0


# One mistake each


def half_detached(critic, real):
    g = slopes(critic, real.detach().requires_grad_())
    return (g * g.detach()).flatten(1).sum(1).mean() / 2


def frozen(critic, real):
    critic.requires_grad_(False)
    value = r1(critic, real)
    critic.requires_grad_()
    return value


def gradient_elsewhere(critic, real, fake):
    """The score at the points, and the gradient at others, where the critic is not seen."""
    critic(between(real, fake))
    calls, critic.calls = critic.calls, []
    value = gp(lambda r, f: 0.25 * r + 0.75 * f)(critic, real, fake)
    critic.calls = calls
    return value


def over(*dims):
    return gp(norm=lambda g: g.norm(2, dim=dims))


WRONG = {
    # value: the norm, the term, the mean, and constants
    "norm over channels": (over(1), "wgan_gp", "value", ["it returned", "flatten(1)"]),
    "square missing": (gp(term=lambda n: n - 1), "wgan_gp", "value", ["(|g_n| - target)^2"]),
    "one side only": (one_sided, "wgan_gp", "value", []),
    "another target than asked for": (wgan_gp, "wgan_gp target", "value", []),
    "summed": (gp(mean=torch.sum), "wgan_gp", "value", ["then the mean"]),
    "r1 without the half": (times(2, r1), "r1", "value", ["|g_n|^2 / 2 at real"]),
    "weight forgotten": (wgan_gp, "wgan_gp weight", "value", ["weight="]),
    "nothing": (times(0.0, r1), "r1", "value + reaches the critic", ["returned 0,"]),
    "lazy weight forgotten": (lazy(wgan_gp, 4, 1.0), "wgan_gp every", "value", []),
    "lazy weight at each call": (times(4), "wgan_gp every", "value", []),
    "lazy unsaid": (lazy(r1_r2, 4, 4.0), "r1_r2", "value + reaches the critic", ["every="]),
    "gradient at others": (gradient_elsewhere, "wgan_gp", "value", ["at the points that the critic was called with"]),
    "some samples": (lambda D, r, f: wgan_gp(D, r[:3], f[:3]), "wgan_gp", "value", ["fewer than 64", "each sample"]),
    "nan": (times(float("nan")), "wgan_gp", "value", ["returned nan"]),
    # points
    "one coefficient for the batch": (gp(mix(lambda r: torch.rand((), dtype=r.dtype))), "wgan_gp", "points", ["one coefficient for the whole batch", "one number for each"]),
    "half way": (gp(lambda r, f: (r + f) / 2), "wgan_gp", "points", ["whole batch, 0.5"]),
    "at fake": (gp(lambda r, f: f, term=torch.square), "zero_centred", "points", ["whole batch, 0"]),
    "a coefficient an element": (gp(mix(torch.rand_like)), "wgan_gp", "points", ["not between"]),
    "shuffled": (gp(lambda r, f: between(r, f.flip(0))), "wgan_gp", "points", ["not between", "same row"]),
    "normal coefficients": (gp(mix(lambda r: torch.randn_like(column(r)))), "wgan_gp", "points", ["coefficients are between -", "rand"]),
    "coefficients broadcast": (gp(mix(lambda r: torch.rand(len(r), 1, 1, 1).to(r))), "wgan_gp vector", "value + points", ["flatten(1)"]),
    "dragan without noise": (gp(own), "dragan", "points", ["no noise", "randn_like(real)"]),
    "dragan with one noise": (gp(noisy(lambda r: torch.randn_like(r[:1]))), "dragan", "points", ["one for all samples"]),
    "dragan with one number a sample": (gp(noisy(lambda r: torch.randn_like(column(r)))), "dragan", "points", ["one number per sample"]),
    # the graph
    "without create_graph": (gp(slope=partial(slopes, create_graph=False)), "wgan_gp", "reaches the critic", ["create_graph=True", "test_check.py"]),
    "a Python number": (lambda *given: wgan_gp(*given).item(), "wgan_gp", "reaches the critic", [".item()", "torch operations"]),
    "through .data": (gp(norm=lambda g: flat(g.data)), "wgan_gp", "reaches the critic", [".data"]),
    "critic frozen around it": (frozen, "r1", "reaches the critic", ["frozen while it ran"]),
    "half detached": (half_detached, "r1", "parameter gradient + zero gradient", [".detach()", "not the derivative"]),
    "NaN at zero": (gp(norm=lambda g: (g**2).flatten(1).sum(1).sqrt()), "wgan_gp", "zero gradient", ["NaN", "norm(2, dim=1)"]),
    # calls
    "not reduced": (gp(mean=lambda t: t), "wgan_gp", "runs", ["one number", "(64, 3, 4, 4)"]),
    "several things": (lambda D, r, f: (wgan_gp(D, r, f), 1), "wgan_gp", "runs", ["tuple"]),
    "called otherwise": (lambda a: a, "wgan_gp", "runs", ["penalty(critic, real, fake)"]),
    "only float32": (gp(norm=lambda g: (g.flatten(1).square() @ torch.ones(48)).sqrt()), "wgan_gp", "runs", ["dtype="]),
}  # fmt: skip

OPTIONS = {
    "one_sided": {"one_sided": True}, "target": {"target": 3.0}, "weight": {"weight": 10.0},
    "every": {"every": 4}, "vector": {"shape": (6,)},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_row_of_a_mistake_fails(name):
    penalty, words, rows, says = WRONG[name]
    kind, *options = words.split()
    report = check(penalty, kind, **(OPTIONS[options[0]] if options else {}))
    expected = rows.split(" + ")
    assert [row.name for row in report.failed] == expected, str(report)
    text = report[expected[0]].text
    assert all(word.lower() in text.lower() for word in says), text
    with pytest.raises(VerificationError):
        report.raise_if_failed()


# What was passed is left as it was


class Counting(nn.Module):
    """A lazy penalty that counts its calls, and learns nothing else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, critic, real):
        self.count += 1
        return 4 * r1(critic, real) if self.count % 4 == 0 else real.new_zeros(())


@pytest.mark.parametrize("form", [lambda m: m, lambda m: m.forward], ids=["object", "method"])
def test_an_object_keeps_its_count(form):
    penalty = Counting()
    check(form(penalty), "r1", every=4).raise_if_failed()
    assert penalty.count == 0


def test_random_numbers_stay_where_they_were():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    penalty = gp(mix(lambda real: column(real) + random.random() + np.random.random()))
    check(penalty, "wgan_gp")
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    normal = gp(mix(lambda real: torch.randn_like(column(real))))
    assert str(check(normal, "wgan_gp")) == str(check(normal, "wgan_gp"))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_it_can_be_asked_anywhere(around):
    with around():
        check(wgan_gp, "wgan_gp").raise_if_failed()


@pytest.mark.gpu
def test_on_a_device():
    state = torch.cuda.get_rng_state()
    on_device = gp(mix(lambda real: torch.rand_like(real[:, :1, :1, :1])))
    check(on_device, "wgan_gp", device="cuda").raise_if_failed()
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert "runs" in {row.name for row in check(wgan_gp, "wgan_gp", device="cuda").failed}


# What cannot be asked

BAD = [
    ({"kind": "gp"}, "one of wgan_gp, zero_centred, r1, r2, r1_r2, dragan"),
    ({"kind": "r1", "target": 1.0}, "'target'"),
    ({"kind": "wgan_gp", "every": 0}, "at least 1"),
    ({"kind": "wgan_gp", "weight": 0.0}, "greater than 0"),
    ({"kind": "wgan_gp", "target": -1.0}, "at least 0"),
    ({"kind": "wgan_gp", "shape": ()}, "shape=(d,)"),
    ({"kind": "wgan_gp", "dtype": torch.float16}, "float64 or torch.float32"),
    ({"kind": "r1", "penalty": 1.0}, "expected a function"),
]


@pytest.mark.parametrize(("options", "says"), BAD, ids=str)
def test_errors_say_what_to_do(options, says):
    with pytest.raises(HoglibError, match=re.escape(says)):
        check(**({"penalty": wgan_gp} | options))
