"""`hog.penalties.check`: right penalties pass, and each mistake is named by its own row.

The wrong ones are hand-written as published code is, with one mistake each.
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
from hoglib import VerificationError
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


def careful(critic, real, fake):
    """Right in validation, too, and under autocast."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return wgan_gp(critic, real.clone(), fake.clone())


def only_float32(critic, real, fake):
    if real.dtype is not torch.float32:
        raise RuntimeError("expected scalar type Float but found Double")
    return wgan_gp(critic, real, fake)


def for_rows(critic, x):
    """Scores [N] alone."""
    return autograd.grad(critic(x), x, torch.ones(len(x), dtype=x.dtype), create_graph=True)[0]


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
    "r2 with both": (lambda D, real, fake=None: r1(D, fake), "r2", {}),
    "r1_r2": (r1_r2, "r1_r2", {"shape": (5, 7)}),
    "r1_r2 in one call": (in_one_call, "r1_r2", {}),
    "dragan": (dragan, "dragan", {"noise": 0.5}),
    "private noise": (gp(noisy(lambda x: torch.randn(x.shape, generator=g).to(x))), "dragan", {}),
    "epsilon": (gp(norm=lambda g: (g.square().flatten(1).sum(1) + 1e-12).sqrt()), "wgan_gp", {}),
    "vmap": (gp(slope=by_vmap), "wgan_gp", {}),
    "sample by sample": (gp(slope=sample_by_sample), "wgan_gp", {}),
    "the critic is run elsewhere too": (with_a_score, "wgan_gp", {}),
    "arrays and Variables": (of_arrays, "wgan_gp", {}),
    "lazy": (lazy(wgan_gp, 4, 4.0), "wgan_gp", {"every": 4}),
    "every call of several": (wgan_gp, "wgan_gp", {"every": 3}),
    "vectors": (wgan_gp, "wgan_gp", {"shape": (2,)}),
    "float32": (wgan_gp, "wgan_gp", {"dtype": torch.float32}),
    "dragan in float32": (dragan, "dragan", {"dtype": torch.float32}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_penalty_passes(name):
    penalty, kind, options = RIGHT[name]
    report = check(penalty, kind, **options).raise_if_failed()
    for row in ("value", "points", "reaches the critic", "parameter gradient", "zero gradient"):
        assert report[row].status == "pass", str(report)


OURS = {
    "careful, by hand": (careful, "wgan_gp", {}),
    "one-sided": (partial(hog.penalties.wgan_gp, one_sided=True, target=0.5), "wgan_gp", {"one_sided": True, "target": 0.5}),
    "in micro-batches": (partial(hog.penalties.wgan_gp, micro_batch=2), "wgan_gp", {}),
    "zero_centred": (hog.penalties.zero_centred, "zero_centred", {}),
    "r1_r2": (hog.penalties.r1_r2, "r1_r2", {"shape": (1, 8, 8)}),
    "dragan with noise": (partial(hog.penalties.dragan, noise=0.3), "dragan", {"noise": 0.3}),
    "lazy": (hog.GradientPenalty("wgan_gp", every=4), "wgan_gp", {"weight": 10.0, "every": 4}),
    "lazy, evaluated": (hog.GradientPenalty("r1", weight=1.0, every=4).eval(), "r1", {}),
    "lazy r2 in micro-batches": (hog.GradientPenalty("r2", weight=1.0, every=2, micro_batch=3), "r2", {"every": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_nothing_is_left_to_say_of_ours(name):
    penalty, kind, options = OURS[name]
    report = check(penalty, kind, **options)
    assert {row.status for row in report} == {"pass"}, str(report)
    assert getattr(penalty, "calls", 0) == 0


# One mistake each


def half_detached(critic, real):
    g = slopes(critic, real.detach().requires_grad_())
    return (g * g.detach()).flatten(1).sum(1).mean() / 2


def by_backward(critic, real):
    x = real.detach().requires_grad_()
    critic(x).sum().backward(create_graph=True)
    return x.grad.square().flatten(1).sum(1).mean() / 2


def flag_left_on(critic, real):
    return slopes(critic, real.requires_grad_()).square().flatten(1).sum(1).mean() / 2


def frozen(*, set_free):
    def penalty(critic, real):
        value = r1(critic, real) if not set_free else None
        critic.requires_grad_(False)
        value = r1(critic, real) if set_free else value
        critic.requires_grad_(set_free)
        return value

    return penalty


def noise_in_place(critic, real):
    real += 0.5 * torch.randn_like(real)
    return gp(own)(critic, real)


def left_in_eval(critic, real, fake):
    critic.eval()
    return wgan_gp(critic, real, fake)


def last_column(critic, x):
    """The score of each column, the last one kept: right for [N, 1] alone."""
    score = critic(x)
    return [autograd.grad(score[..., i].sum(), x, create_graph=True)[0] for i in range(score.shape[-1])][-1]  # fmt: skip


def stopping(after):
    """It runs out of something after a while."""
    left = iter(range(after))
    return lambda D, r, f: (next(left), wgan_gp(D, r, f))[1]


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
    # value: the norm
    "norm over channels": (over(1), "wgan_gp", "value", ["dim=1 alone", "flatten(1)"]),
    "norm over the last dimension": (over(-1), "wgan_gp", "value", ["last dimension"]),
    "norm over height and width": (over(2, 3), "wgan_gp", "value", ["last two dimensions"]),
    "norm over channels and height": (over(1, 2), "wgan_gp", "value", ["dimensions 1 and 2"]),
    "norm over the batch": (over(0), "wgan_gp", "value", ["dim=0", "batch"]),
    "one norm for the batch": (gp(norm=torch.norm), "wgan_gp", "value", ["one norm for the whole batch"]),
    "no norm": (gp(norm=torch.abs), "wgan_gp", "value", ["no norm", "each element"]),
    "root of the mean square": (gp(norm=lambda g: g.flatten(1).square().mean(1).sqrt()), "wgan_gp", "value + zero gradient", ["averaged over a sample's elements"]),
    "norm of absolute values": (gp(norm=lambda g: g.flatten(1).norm(1, dim=1)), "wgan_gp", "value", ["sum of absolute values"]),
    "largest element": (gp(norm=lambda g: g.flatten(1).norm(float("inf"), dim=1)), "wgan_gp", "value", ["largest absolute value"]),
    "mean score": (gp(slope=lambda D, x: slopes(lambda x: D(x).mean(), x)), "wgan_gp", "value", ["mean score"]),
    "r1 averaged over elements": (gp(own, norm=lambda g: g, term=lambda g: g**2 / 2), "r1", "value", ["shrinks as samples grow"]),
    # value: the term
    "square missing": (gp(term=lambda n: n - 1), "wgan_gp", "value", ["square is missing"]),
    "absolute value": (gp(term=lambda n: (n - 1).abs()), "wgan_gp", "value", ["absolute difference"]),
    "target missing": (zero_centred, "wgan_gp", "value", ["target is not subtracted"]),
    "target and square missing": (gp(term=lambda n: n), "wgan_gp", "value", ["by itself"]),
    "root missing": (gp(term=lambda n: (n**2 - 1) ** 2), "wgan_gp", "value", ["root is missing"]),
    "one side only": (one_sided, "wgan_gp", "value", ["only slopes above the target"]),
    "the wrong side": (gp(term=lambda n: (1 - n).clamp(min=0) ** 2), "wgan_gp", "value", ["sign is turned"]),
    "one side, no square": (gp(term=above), "wgan_gp", "value", ["square is missing"]),
    "both sides": (wgan_gp, "wgan_gp one_sided", "value", ["below the target"]),
    "another target than asked for": (wgan_gp, "wgan_gp target", "value", ["the target is 1"]),
    "r1 of the norm": (gp(own, term=lambda n: n / 2), "r1", "value", ["norm is not squared"]),
    "r1 squared twice": (gp(own, term=lambda n: n**4 / 2), "r1", "value", ["squared twice"]),
    "r1 with a target": (gp(own, term=lambda n: (n - 1) ** 2 / 2), "r1", "value", ["1 is subtracted"]),
    # value: the mean, and constants
    "summed": (gp(mean=torch.sum), "wgan_gp", "value", ["summed over the batch"]),
    "mean of the norms": (gp(norm=lambda g: flat(g).mean()), "wgan_gp", "value", ["averaged over the batch before"]),
    "largest": (gp(mean=torch.max), "wgan_gp", "value", ["largest term"]),
    "r1 without the half": (times(2, r1), "r1", "value", ["half is missing"]),
    "r1 summed, no half": (gp(own, term=torch.square, mean=torch.sum), "r1", "value", ["summed over the batch", "half is missing"]),
    "r1 halved twice": (times(0.5, r1), "r1", "value", ["halved twice"]),
    "a half too many": (times(0.5), "wgan_gp", "value", ["has no half"]),
    "weight in it": (times(10), "wgan_gp", "value", ["10 times", "weight=10"]),
    "weight forgotten": (wgan_gp, "wgan_gp weight", "value", ["weight of 10 is not in it"]),
    "rewarded": (times(-1), "wgan_gp", "value", ["-1 times"]),
    "nothing": (times(0.0, r1), "r1", "value + reaches the critic", ["Nothing but zero", "every="]),
    "mean of r1 and r2": (times(0.5, r1_r2), "r1_r2", "value", ["half of the sum"]),
    "something else": (lambda D, r, f: wgan_gp(D, r, f) ** 1.1, "wgan_gp", "value", ["None of the known mistakes"]),
    # lazy
    "lazy weight forgotten": (lazy(wgan_gp, 4, 1.0), "wgan_gp every", "every=4", ["not 4 times", "forgotten"]),
    "lazy weight at each call": (times(4), "wgan_gp every", "every=4", ["multiplied by 4 at each call"]),
    "lazy unsaid": (lazy(r1_r2, 4, 4.0), "r1_r2", "repeated calls", ["0, 0, 11", "every="]),
    # points
    "one coefficient for the batch": (gp(mix(lambda r: torch.rand((), dtype=r.dtype))), "wgan_gp", "points", ["one coefficient for the whole batch", "one number for each"]),
    "a coefficient an element": (gp(mix(torch.rand_like)), "wgan_gp", "points", ["between the elements of one sample"]),
    "normal coefficients": (gp(mix(lambda r: torch.randn_like(column(r)))), "wgan_gp", "points", ["beyond [0, 1]", "randn"]),
    "half way": (gp(lambda r, f: (r + f) / 2), "wgan_gp", "points", ["always 0.5"]),
    "at real": (gp(own), "wgan_gp", "points", ["at real"]),
    "at fake": (gp(lambda r, f: f, term=torch.square), "zero_centred", "points", ["at fake"]),
    "not uniform": (gp(mix(lambda r: column(r) ** 2)), "wgan_gp", "points", ["not uniform"]),
    "shuffled": (gp(lambda r, f: between(r, f.flip(0))), "wgan_gp", "points", ["not between", "same row"]),
    "gradient at others": (gradient_elsewhere, "wgan_gp", "points", ["not taken by these points"]),
    "r1 at fake": (lambda D, real, fake: r1(D, fake), "r1", "points", ["that at fake"]),
    "r2 at real": (lambda D, real, fake: r1(D, real), "r2", "points", ["that at real"]),
    "r1 between": (lambda D, r, f: r1(D, between(r, f)), "r1", "points", ["other points"]),
    "r1 alone": (lambda D, real, fake: r1(D, real), "r1_r2", "value + points", ["half of the sum"]),
    "r1 twice": (lambda D, real, fake: 2 * r1(D, real), "r1_r2", "points", ["that at real", "at real and fake"]),
    "dragan without noise": (gp(own), "dragan", "points", ["no noise"]),
    "dragan with one noise": (gp(noisy(lambda r: torch.randn_like(r[:1]))), "dragan", "points", ["same for all samples"]),
    "dragan with one number a sample": (gp(noisy(lambda r: torch.randn_like(column(r)))), "dragan", "points", ["same for all its elements"]),
    "dragan between": (wgan_gp, "dragan", "points", ["WGAN-GP"]),
    "dragan with too much noise": (gp(noisy(lambda r: 2 * torch.randn_like(r))), "dragan noise", "points", ["standard deviation"]),
    "some samples": (lambda D, r, f: wgan_gp(D, r[:3], f[:3]), "wgan_gp", "points + value", ["3 of 64 samples"]),
    "coefficients broadcast": (gp(mix(lambda r: torch.rand(len(r), 1, 1, 1).to(r))), "wgan_gp vector", "points + value", ["(64, 1, 64, 6)", "broadcast"]),
    # the graph
    "without create_graph": (gp(slope=partial(slopes, create_graph=False)), "wgan_gp", "reaches the critic", ["create_graph=True", "test_check.py"]),
    "a Python number": (lambda *given: wgan_gp(*given).item(), "wgan_gp", "reaches the critic", [".item()", "torch operations"]),
    "through .data": (gp(norm=lambda g: flat(g.data)), "wgan_gp", "reaches the critic", [".data"]),
    "critic frozen around it": (frozen(set_free=True), "r1", "reaches the critic", ["frozen while it ran"]),
    "half detached": (half_detached, "r1", "parameter gradient + zero gradient", [".detach()", "not the derivative"]),
    "NaN at zero": (gp(norm=lambda g: (g**2).flatten(1).sum(1).sqrt()), "wgan_gp", "zero gradient", ["NaN", "norm(2, dim=1)"]),
    # what was given
    "backward in it": (by_backward, "r1", "unchanged: gradients", [".grad of w, V, u", "autograd.grad"]),
    "flag left on": (flag_left_on, "r1", "unchanged: requires_grad", ["of real was", "detach()"]),
    "critic frozen afterwards": (frozen(set_free=False), "r1", "unchanged: requires_grad", ["of w, V, u was", "Set free"]),
    "noise in place": (noise_in_place, "dragan", "unchanged: values", ["real was written to"]),
    "left in eval": (left_in_eval, "wgan_gp", "unchanged: training mode", ["train() mode"]),
    # circumstances
    "squeezed": (gp(norm=lambda g: flat(g.squeeze())), "wgan_gp", "batch of one", ["squeezed"]),
    "scores of one shape": (gp(slope=last_column), "wgan_gp", "scores of shape [N]", ["squeezed or reduced"]),
    "float64 draws": (gp(lambda r, f: between(r.double(), f.double())), "wgan_gp", "in float32", ["same dtype", ".to(real)"]),
    "zero in validation": (lambda *given: wgan_gp(*given) if torch.is_grad_enabled() else torch.zeros(()), "wgan_gp", "under no_grad + under inference_mode", ["did not raise"]),
    "half-precision sum": (gp(norm=lambda g: (torch.einsum("nd,nd->n", g.flatten(1), g.flatten(1)) + 1e-12).sqrt()), "wgan_gp", "under autocast", ["overflows", "enabled=False"]),
    "stops early": (stopping(20), "wgan_gp", "repeated calls", ["StopIteration"]),
    "stops later": (stopping(44), "wgan_gp", "points *", ["StopIteration", "where it ran before"]),
    "not reduced": (gp(mean=lambda t: t), "wgan_gp", "returns", ["one number", "shape (5,)"]),
    "several things": (lambda D, r, f: (wgan_gp(D, r, f), 1), "wgan_gp", "returns", ["tuple"]),
    "called otherwise": (lambda a: a, "wgan_gp", "runs", ["penalty(critic, real, fake)"]),
}  # fmt: skip

OPTIONS = {
    "one_sided": {"one_sided": True}, "target": {"target": 3.0}, "weight": {"weight": 10.0},
    "every": {"every": 4}, "noise": {"noise": 0.5}, "vector": {"shape": (6,)},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(name):
    penalty, words, rows, says = WRONG[name]
    kind, *options = words.split()
    report = check(penalty, kind, **(OPTIONS[options[0]] if options else {}))
    row, *also = rows.removesuffix(" *").split(" + ")
    assert all(word.lower() in report[row].text.lower() for word in says), report[row].text
    failed = {r.name for r in report.failed}
    assert failed == {row, *also} or (rows.endswith("*") and row in failed), str(report)
    with pytest.raises(VerificationError):
        report.raise_if_failed()


NO_FAILURE = {
    "fails without grad": (wgan_gp, "wgan_gp", "under no_grad", "warn", "enable_grad"),
    "fails in inference mode": (wgan_gp, "wgan_gp", "under inference_mode", "warn", "inference_mode(False)"),
    "a batch of one is refused": (gp(norm=lambda g: g.flatten(1).squeeze().norm(2, dim=1)), "wgan_gp", "batch of one", "warn", "drop_last"),
    "uniform noise": (gp(noisy(torch.rand_like)), "dragan", "points", "warn", "centred in the paper"),
    "scores are columns": (of_arrays, "wgan_gp", "scores of shape [N]", "skip", "raises"),
    "scores are rows": (gp(slope=for_rows), "wgan_gp", "scores of shape [N, 1]", "skip", "raises"),
    "only float32": (only_float32, "wgan_gp", "dtype: torch.float64", "skip", "refused"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_FAILURE)
def test_what_is_refused_is_no_failure(name):
    penalty, kind, row, status, word = NO_FAILURE[name]
    report = check(penalty, kind).raise_if_failed()
    assert report[row].status == status
    assert word in report[row].text


def test_every_row_can_fail():
    tried = {part for _, _, names, _ in WRONG.values() for part in names.split(" + ")}
    assert {row.name for row in check(careful, "wgan_gp")} <= tried


# What was passed is left as it was


class Counting(nn.Module):
    """A lazy penalty that counts its calls, and learns nothing else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.plain = 0

    def forward(self, critic, real, fake=None):
        self.count += 1
        self.plain += 1
        return 4 * r1(critic, real) if self.count % 4 == 0 else real.new_zeros(())


@pytest.mark.parametrize("form", [lambda m: m, lambda m: m.forward], ids=["object", "method"])
def test_an_object_keeps_its_count(form):
    penalty = Counting()
    check(form(penalty), "r1", every=4).raise_if_failed()
    assert penalty.count == penalty.plain == 0


def test_random_numbers_stay_where_they_were():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    penalty = gp(mix(lambda real: column(real) + random.random() + np.random.random()))
    first = str(check(penalty, "wgan_gp"))
    assert "beyond [0, 1]" in first
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    torch.rand(1), random.random(), np.random.random()
    assert str(check(penalty, "wgan_gp")) == first


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_it_can_be_asked_anywhere(around):
    with around():
        check(careful, "wgan_gp").raise_if_failed()


@pytest.mark.gpu
def test_on_a_device():
    state = torch.cuda.get_rng_state()
    on_device = gp(mix(lambda real: torch.rand_like(real[:, :1, :1, :1])))
    report = check(on_device, "wgan_gp", device="cuda").raise_if_failed()
    assert report["points"].status == "pass"
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert "runs" in {row.name for row in check(wgan_gp, "wgan_gp", device="cuda").failed}


# What cannot be asked

BAD = [
    ({"kind": "gp"}, "one of wgan_gp, zero_centred, r1, r2, r1_r2, dragan"),
    ({"kind": "r1", "target": 1.0}, "no target"),
    ({"kind": "r1", "one_sided": True}, "no target"),
    ({"kind": "wgan_gp", "noise": 1.0}, "dragan"),
    ({"kind": "wgan_gp", "every": 0}, "at least 1"),
    ({"kind": "wgan_gp", "weight": 0.0}, "greater than 0"),
    ({"kind": "wgan_gp", "target": -1.0}, "at least 0"),
    ({"kind": "wgan_gp", "shape": ()}, "shape=(d,)"),
    ({"kind": "wgan_gp", "shape": (1,)}, "two elements"),
    ({"kind": "wgan_gp", "dtype": torch.float16}, "under autocast"),
]


@pytest.mark.parametrize(("options", "says"), BAD, ids=str)
def test_errors_say_what_to_do(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check(wgan_gp, **options)


def test_a_penalty_is_a_function():
    with pytest.raises(TypeError, match="expected a function"):
        check(1.0, "r1")
