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

# Right ones, by hand.


def between(real, fake):
    e = torch.rand(len(real), *[1] * (real.dim() - 1), dtype=real.dtype)
    return (e * real + (1 - e) * fake).detach().requires_grad_()


def slopes(critic, x, **options):
    score = critic(x)
    (g,) = autograd.grad(
        score, x, torch.ones_like(score), **({"create_graph": True} | options)
    )  # fmt: skip
    return g


def norms(critic, x):
    return slopes(critic, x).flatten(1).norm(2, dim=1)


def wgan_gp(critic, real, fake):
    return ((norms(critic, between(real, fake)) - 1) ** 2).mean()


def one_sided(critic, real, fake):
    return ((norms(critic, between(real, fake)) - 1).clamp(min=0) ** 2).mean()


def zero_centred(critic, real, fake):
    return slopes(critic, between(real, fake)).square().flatten(1).sum(1).mean()


def r1(critic, real):
    x = real.detach().requires_grad_()
    return slopes(critic, x).square().flatten(1).sum(1).mean() / 2


def r1_r2(critic, real, fake):
    return r1(critic, real) + r1(critic, fake)


def dragan(critic, real):
    x = real.detach() + 0.5 * real.std() * torch.randn_like(real)
    return ((norms(critic, x.requires_grad_()) - 1) ** 2).mean()


def lazy(penalty, every, times):
    """Acts at every so many calls, as a training loop with `if step % every == 0`."""
    calls = SimpleNamespace(count=0)

    def added(critic, real, fake):
        calls.count += 1
        return times * penalty(critic, real, fake) if calls.count % every == 0 else 0.0

    return added


# Right ones, as others write them.


def with_epsilon(critic, real, fake):
    g = slopes(critic, between(real, fake)).reshape(len(real), -1)
    return (((g**2).sum(1) + 1e-12).sqrt() - 1).pow(2).mean()


def by_vmap(critic, real, fake):
    gradient = torch.func.vmap(torch.func.grad(lambda x: critic(x.unsqueeze(0)).squeeze()))
    return ((gradient(between(real, fake)).flatten(1).norm(dim=1) - 1) ** 2).mean()


def sample_by_sample(critic, real, fake):
    return sum(((norms(critic, x[None].detach().requires_grad_()) - 1) ** 2).mean() for x in between(real, fake)) / len(real)  # fmt: skip


def in_one_call(critic, real, fake):
    x = torch.cat([real, fake]).requires_grad_()
    return slopes(critic, x).square().sum() / 2 / len(real)


def with_a_score(critic, real, fake):
    """It also runs the critic where it takes no gradient."""
    critic(real), critic(fake)
    return wgan_gp(critic, real, fake)


def by_numpy(critic, real, fake):
    e = torch.as_tensor(np.random.random(one_a_sample(real))).to(real.dtype)
    x = (e * real + (1 - e) * fake).requires_grad_()
    return ((norms(critic, x) - 1) ** 2).mean()


def by_a_generator():
    g = Generator().manual_seed(5)

    def penalty(critic, real, fake):
        e = torch.rand(len(real), *[1] * (real.dim() - 1), generator=g)
        return ((norms(critic, (e * real + (1 - e) * fake).requires_grad_()) - 1) ** 2).mean()

    return penalty


def of_arrays(critic, real, fake):
    """With ones and coefficients of float32, whatever real is of, and ones for columns of scores."""
    e = torch.FloatTensor(np.random.random(one_a_sample(real)))
    x = torch.autograd.Variable(e * real + (1 - e) * fake, requires_grad=True)
    ones = torch.FloatTensor(len(real), 1).fill_(1.0)
    (g,) = autograd.grad(critic(x), x, ones, create_graph=True, retain_graph=True)
    return ((g.view(len(g), -1).norm(2, dim=1) - 1) ** 2).mean()


def careful(critic, real, fake):
    """Right in validation, too, and under autocast."""
    with (
        torch.inference_mode(False), torch.enable_grad(), torch.autocast(real.device.type, enabled=False),
    ):  # fmt: skip
        return wgan_gp(critic, real.clone(), fake.clone())


RIGHT = {
    "wgan_gp": (wgan_gp, "wgan_gp", {}),
    "one-sided": (one_sided, "wgan_gp", {"one_sided": True}),
    "another target": (lambda D, r, f: ((norms(D, between(r, f)) - 3) ** 2).mean(), "wgan_gp", {"target": 3.0}),
    "a target of zero": (zero_centred, "wgan_gp", {"target": 0.0}),
    "zero_centred": (zero_centred, "zero_centred", {}),
    "r1": (r1, "r1", {}),
    "r1 with both": (lambda D, real, fake: r1(D, real), "r1", {}),
    "r1 with an option": (lambda D, real, gamma=4.0: gamma * r1(D, real), "r1", {"weight": 4.0}),
    "r2": (r1, "r2", {}),
    "r2 with both": (lambda D, real, fake=None: r1(D, fake), "r2", {}),
    "r1_r2": (r1_r2, "r1_r2", {}),
    "r1_r2 in one call": (in_one_call, "r1_r2", {}),
    "dragan": (dragan, "dragan", {}),
    "dragan with both": (lambda D, real, fake: dragan(D, real), "dragan", {}),
    "epsilon under the root": (with_epsilon, "wgan_gp", {}),
    "vmap": (by_vmap, "wgan_gp", {}),
    "sample by sample": (sample_by_sample, "wgan_gp", {}),
    "the critic is run elsewhere too": (with_a_score, "wgan_gp", {}),
    "NumPy draws": (by_numpy, "wgan_gp", {}),
    "a generator of its own": (by_a_generator(), "wgan_gp", {}),
    "arrays and Variables": (of_arrays, "wgan_gp", {}),
    "careful": (careful, "wgan_gp", {}),
    "lazy": (lazy(wgan_gp, 4, 4.0), "wgan_gp", {"every": 4}),
    "lazy, often": (lazy(r1_r2, 16, 16.0), "r1_r2", {"every": 16}),
    "every call of several": (wgan_gp, "wgan_gp", {"every": 3}),
    "vectors": (wgan_gp, "wgan_gp", {"shape": (2,)}),
    "sequences": (r1_r2, "r1_r2", {"shape": (5, 7)}),
    "float32": (wgan_gp, "wgan_gp", {"dtype": torch.float32}),
    "dragan in float32": (dragan, "dragan", {"dtype": torch.float32}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_penalty_passes(name):
    penalty, kind, options = RIGHT[name]
    report = check(penalty, kind, **options)
    report.raise_if_failed()
    for row in ("value", "points", "reaches the critic"):
        assert report[row].status == "pass", str(report)


def test_nothing_is_left_to_say_of_a_careful_one():
    assert {row.status for row in check(careful, "wgan_gp")} == {"pass"}


# hoglib's own, which leave nothing to say but where random numbers are of a generator of theirs.

OURS = {
    "wgan_gp": (hog.penalties.wgan_gp, "wgan_gp", {}),
    "another spelling": (hog.penalties.wgan_gp, "wgan-gp", {}),
    "one-sided": (partial(hog.penalties.wgan_gp, one_sided=True, target=0.5), "wgan_gp", {"one_sided": True, "target": 0.5}),
    "in micro-batches": (partial(hog.penalties.wgan_gp, micro_batch=2), "wgan_gp", {}),
    "zero_centred": (hog.penalties.zero_centred, "zero_centred", {}),
    "r1": (hog.penalties.r1, "r1", {}),
    "r2": (hog.penalties.r2, "r2", {}),
    "r1_r2": (hog.penalties.r1_r2, "r1_r2", {}),
    "dragan": (hog.penalties.dragan, "dragan", {}),
    "dragan with noise": (partial(hog.penalties.dragan, noise=0.3), "dragan", {"noise": 0.3}),
    "lazy": (hog.GradientPenalty("wgan_gp", every=4), "wgan_gp", {"weight": 10.0, "every": 4}),
    "lazy r1": (hog.GradientPenalty("r1", weight=2.0, every=16), "r1", {"weight": 2.0, "every": 16}),
    "lazy r2 in micro-batches": (hog.GradientPenalty("r2", weight=1.0, every=2, micro_batch=3), "r2", {"every": 2}),
    "images": (hog.penalties.r1_r2, "r1_r2", {"shape": (1, 8, 8)}),
    "vectors": (hog.penalties.dragan, "dragan", {"shape": (2,)}),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_ours_pass(name):
    penalty, kind, options = OURS[name]
    report = check(penalty, kind, **options).raise_if_failed()
    assert {row.status for row in report} == {"pass"}, str(report)


def test_a_lazy_one_of_ours_is_at_its_full_size_in_evaluation():
    penalty = hog.GradientPenalty("r1", weight=1.0, every=4).eval()
    check(penalty, "r1").raise_if_failed()
    assert not penalty.training
    assert penalty.calls == 0


# One mistake each. The row that must fail, and words it must have; no other row fails but those named.


def sum_of_norms(of, reduce=torch.mean, term=lambda n: (n - 1) ** 2):
    """A WGAN-GP whose norm, term or reduction is another one."""
    return lambda D, real, fake: reduce(term(of(slopes(D, between(real, fake)))))


def flat(g):
    return g.flatten(1).norm(2, dim=1)


def at(points):
    """A WGAN-GP at other points."""
    return lambda D, real, fake: ((norms(D, points(real, fake).detach().requires_grad_()) - 1) ** 2).mean()  # fmt: skip


def mixed(e):
    """Points whose coefficients are e(real)."""
    return at(lambda real, fake: e(real) * real + (1 - e(real)) * fake)


def one_a_sample(real):
    return (len(real), *[1] * (real.dim() - 1))


def mean_score(critic, real, fake):
    x = between(real, fake)
    (g,) = autograd.grad(critic(x).mean(), x, create_graph=True)
    return ((flat(g) - 1) ** 2).mean()


def without_create_graph(critic, real, fake):
    g = slopes(critic, between(real, fake), create_graph=False)
    return ((flat(g) - 1) ** 2).mean()


def with_retain_graph(critic, real, fake):
    g = slopes(critic, between(real, fake), create_graph=False, retain_graph=True)
    return ((flat(g) - 1) ** 2).mean()


def as_number(critic, real, fake):
    return wgan_gp(critic, real, fake).item()


def through_data(critic, real, fake):
    return ((flat(slopes(critic, between(real, fake)).data) - 1) ** 2).mean()


def half_detached(critic, real):
    g = slopes(critic, real.detach().requires_grad_())
    return (g * g.detach()).flatten(1).sum(1).mean() / 2


def root_of_sum(critic, real, fake):
    return (((slopes(critic, between(real, fake)) ** 2).flatten(1).sum(1).sqrt() - 1) ** 2).mean()


def by_backward(critic, real):
    x = real.detach().requires_grad_()
    critic(x).sum().backward(create_graph=True)
    return x.grad.square().flatten(1).sum(1).mean() / 2


def flag_left_on(critic, real):
    real.requires_grad_()
    return slopes(critic, real).square().flatten(1).sum(1).mean() / 2


def frozen_afterwards(critic, real):
    value = r1(critic, real)
    for p in critic.parameters():
        p.requires_grad_(False)
    return value


def frozen_around(critic, real):
    """`toggle_grad(critic, False)` before the penalty, and True after it."""
    for p in critic.parameters():
        p.requires_grad_(False)
    value = r1(critic, real)
    for p in critic.parameters():
        p.requires_grad_(True)
    return value


def noise_in_place(critic, real):
    real += 0.5 * real.std() * torch.randn_like(real)
    return ((norms(critic, real.detach().requires_grad_()) - 1) ** 2).mean()


def left_in_eval(critic, real, fake):
    critic.eval()
    return wgan_gp(critic, real, fake)


def squeezed(critic, real, fake):
    g = slopes(critic, between(real, fake)).squeeze()
    return ((flat(g) - 1) ** 2).mean()


def refuses_one(critic, real, fake):
    g = slopes(critic, between(real, fake)).flatten(1).squeeze()
    return ((g.norm(2, dim=1) - 1) ** 2).mean()


def last_column(critic, real):
    """The score of each column, the last one kept: right for [N, 1] alone."""
    x = real.detach().requires_grad_()
    score = critic(x)
    for i in range(score.shape[-1]):
        (g,) = autograd.grad(score[..., i].sum(), x, create_graph=True)
    return g.square().flatten(1).sum(1).mean() / 2


def float64_draws(critic, real, fake):
    e = torch.as_tensor(np.random.random(one_a_sample(real)))
    return ((norms(critic, (e * real + (1 - e) * fake).requires_grad_()) - 1) ** 2).mean()


def stopping(after):
    """It runs out of something after a while."""
    left = iter(range(after))

    def penalty(critic, real, fake):
        next(left)
        return wgan_gp(critic, real, fake)

    return penalty


def zero_in_validation(critic, real, fake):
    return wgan_gp(critic, real, fake) if torch.is_grad_enabled() else torch.zeros(())


def by_einsum(critic, real, fake):
    g = slopes(critic, between(real, fake)).flatten(1)
    return ((torch.einsum("nd,nd->n", g, g).sqrt() - 1) ** 2).mean()


def gradient_elsewhere(critic, real, fake):
    """The score at the points, and the gradient at others."""
    critic(between(real, fake))
    with torch.no_grad():
        value = real.new_zeros(())
    x = (0.25 * real + 0.75 * fake).detach().requires_grad_()
    calls, critic.calls = critic.calls, []
    value = value + ((norms(critic, x) - 1) ** 2).mean()
    critic.calls = calls
    return value


WRONG = {
    # value: the norm
    "norm over channels": (sum_of_norms(lambda g: g.norm(2, dim=1)), "wgan_gp", "value", ["dim=1 alone", "flatten(1)"]),
    "norm over the last dimension": (sum_of_norms(lambda g: g.norm(2, dim=-1)), "wgan_gp", "value", ["last dimension"]),
    "norm over height and width": (sum_of_norms(lambda g: g.norm(2, dim=(2, 3))), "wgan_gp", "value", ["last two dimensions"]),
    "norm over channels and height": (sum_of_norms(lambda g: g.norm(2, dim=(1, 2))), "wgan_gp", "value", ["dimensions 1 and 2"]),
    "norm over the batch": (sum_of_norms(lambda g: g.norm(2, dim=0)), "wgan_gp", "value", ["dim=0", "batch"]),
    "one norm for the batch": (sum_of_norms(lambda g: g.norm(2)), "wgan_gp", "value", ["one norm for the whole batch"]),
    "no norm": (sum_of_norms(torch.abs), "wgan_gp", "value", ["no norm", "each element"]),
    "root of the mean square": (sum_of_norms(lambda g: g.flatten(1).square().mean(1).sqrt()), "wgan_gp", "value + zero gradient", ["averaged over a sample's elements"]),
    "norm of absolute values": (sum_of_norms(lambda g: g.flatten(1).norm(1, dim=1)), "wgan_gp", "value", ["sum of absolute values"]),
    "largest element": (sum_of_norms(lambda g: g.flatten(1).norm(float("inf"), dim=1)), "wgan_gp", "value", ["largest absolute value"]),
    # value: the term
    "square missing": (sum_of_norms(flat, term=lambda n: n - 1), "wgan_gp", "value", ["square is missing"]),
    "absolute value": (sum_of_norms(flat, term=lambda n: (n - 1).abs()), "wgan_gp", "value", ["absolute difference"]),
    "target missing": (sum_of_norms(flat, term=lambda n: n**2), "wgan_gp", "value", ["target is not subtracted"]),
    "target and square missing": (sum_of_norms(flat, term=lambda n: n), "wgan_gp", "value", ["by itself"]),
    "root missing": (sum_of_norms(flat, term=lambda n: (n**2 - 1) ** 2), "wgan_gp", "value", ["root is missing"]),
    "one side only": (one_sided, "wgan_gp", "value", ["only slopes above the target"]),
    "the wrong side": (sum_of_norms(flat, term=lambda n: (1 - n).clamp(min=0) ** 2), "wgan_gp", "value", ["sign is turned"]),
    "one side, no square": (sum_of_norms(flat, term=lambda n: (n - 1).clamp(min=0)), "wgan_gp", "value", ["square is missing"]),
    "both sides": (wgan_gp, "wgan_gp one_sided", "value", ["below the target"]),
    "another target than asked for": (wgan_gp, "wgan_gp target", "value", ["the target is 1"]),
    "r1 of the norm": (lambda D, real: norms(D, real.detach().requires_grad_()).mean() / 2, "r1", "value", ["norm is not squared"]),
    "r1 squared twice": (lambda D, real: (norms(D, real.detach().requires_grad_()) ** 4).mean() / 2, "r1", "value", ["squared twice"]),
    "r1 with a target": (lambda D, real: ((norms(D, real.detach().requires_grad_()) - 1) ** 2).mean() / 2, "r1", "value", ["1 is subtracted"]),
    # value: the mean
    "summed": (sum_of_norms(flat, torch.sum), "wgan_gp", "value", ["summed over the batch"]),
    "mean of the norms": (lambda D, r, f: (norms(D, between(r, f)).mean() - 1) ** 2, "wgan_gp", "value", ["averaged over the batch before"]),
    "largest": (sum_of_norms(flat, torch.max), "wgan_gp", "value", ["largest term"]),
    "mean score": (mean_score, "wgan_gp", "value", ["mean score"]),
    "r1 summed": (lambda D, real: slopes(D, real.detach().requires_grad_()).square().sum() / 2, "r1", "value", ["summed over the batch"]),
    "r1 averaged over elements": (lambda D, real: slopes(D, real.detach().requires_grad_()).square().mean() / 2, "r1", "value", ["shrinks as samples grow"]),
    # value: the factor
    "r1 without the half": (lambda D, real: 2 * r1(D, real), "r1", "value", ["half is missing"]),
    "r1 halved twice": (lambda D, real: r1(D, real) / 2, "r1", "value", ["halved twice"]),
    "a half too many": (lambda D, r, f: wgan_gp(D, r, f) / 2, "wgan_gp", "value", ["has no half"]),
    "weight in it": (lambda D, r, f: 10 * wgan_gp(D, r, f), "wgan_gp", "value", ["10 times", "weight=10"]),
    "weight forgotten": (wgan_gp, "wgan_gp weight", "value", ["weight of 10 is not in it"]),
    "rewarded": (lambda D, r, f: -wgan_gp(D, r, f), "wgan_gp", "value", ["-1 times"]),
    "nothing": (lambda D, r, f: 0.0 * wgan_gp(D, r, f), "wgan_gp", "value + reaches the critic", ["Nothing but zero", "every="]),
    "mean of r1 and r2": (lambda D, r, f: r1_r2(D, r, f) / 2, "r1_r2", "value", ["half of the sum"]),
    "something else": (lambda D, r, f: wgan_gp(D, r, f) ** 1.1, "wgan_gp", "value", ["None of the known mistakes"]),
    # lazy
    "lazy weight forgotten": (lazy(wgan_gp, 4, 1.0), "wgan_gp every", "every=4", ["not 4 times", "forgotten"]),
    "lazy weight at each call": (lambda D, r, f: 4 * wgan_gp(D, r, f), "wgan_gp every", "every=4", ["multiplied by 4 at each call"]),
    "lazy unsaid": (lazy(r1_r2, 4, 4.0), "r1_r2", "repeated calls", ["0, 0, 11", "every="]),
    # points
    "one coefficient for the batch": (at(lambda r, f: torch.lerp(f, r, torch.rand((), dtype=r.dtype))), "wgan_gp", "points", ["one coefficient for the whole batch", "one number for each"]),
    "a coefficient an element": (at(lambda r, f: torch.lerp(f, r, torch.rand_like(r))), "wgan_gp", "points", ["between the elements of one sample"]),
    "normal coefficients": (at(lambda r, f: torch.lerp(f, r, torch.randn(one_a_sample(r), dtype=r.dtype))), "wgan_gp", "points", ["beyond [0, 1]", "randn"]),
    "half way": (mixed(lambda real: 0.5), "wgan_gp", "points", ["always 0.5"]),
    "at real": (at(lambda r, f: r), "wgan_gp", "points", ["at real"]),
    "at fake": (lambda D, r, f: 2 * r1(D, f), "zero_centred", "points", ["at fake"]),
    "not uniform": (at(lambda r, f: torch.lerp(f, r, torch.rand(one_a_sample(r), dtype=r.dtype) ** 2)), "wgan_gp", "points", ["not uniform"]),
    "shuffled": (at(lambda r, f: torch.lerp(f.flip(0), r, torch.rand(one_a_sample(r), dtype=r.dtype))), "wgan_gp", "points", ["not between", "same row"]),
    "gradient at others": (gradient_elsewhere, "wgan_gp", "points", ["not taken by these points"]),
    "r1 at fake": (lambda D, real, fake: r1(D, fake), "r1", "points", ["that at fake"]),
    "r2 at real": (lambda D, real, fake: r1(D, real), "r2", "points", ["that at real"]),
    "r1 between": (lambda D, real, fake: r1(D, between(real, fake)), "r1", "points", ["other points"]),
    "r1 alone": (lambda D, real, fake: r1(D, real), "r1_r2", "value + points", ["half of the sum"]),
    "r1 twice": (lambda D, real, fake: 2 * r1(D, real), "r1_r2", "points", ["that at real", "at real and fake"]),
    "dragan without noise": (lambda D, real: ((norms(D, real.detach().requires_grad_()) - 1) ** 2).mean(), "dragan", "points", ["no noise"]),
    "dragan with one noise": (lambda D, real: dragan_with(D, real, torch.randn_like(real[:1])), "dragan", "points", ["same for all samples"]),
    "dragan with one number a sample": (lambda D, real: dragan_with(D, real, torch.randn(one_a_sample(real), dtype=real.dtype)), "dragan", "points", ["same for all its elements"]),
    "dragan between": (wgan_gp, "dragan", "points", ["WGAN-GP"]),
    "dragan with too much noise": (dragan, "dragan noise", "points", ["standard deviation"]),
    # the graph
    "without create_graph": (without_create_graph, "wgan_gp", "reaches the critic", ["create_graph=True", "test_check.py"]),
    "retain_graph in its place": (with_retain_graph, "wgan_gp", "reaches the critic", ["create_graph=True"]),
    "a Python number": (as_number, "wgan_gp", "reaches the critic", [".item()", "torch operations"]),
    "through .data": (through_data, "wgan_gp", "reaches the critic", [".data"]),
    "critic frozen around it": (frozen_around, "r1", "reaches the critic", ["frozen while it ran"]),
    "half detached": (half_detached, "r1", "parameter gradient + zero gradient", [".detach()", "not the derivative"]),
    "NaN at zero": (root_of_sum, "wgan_gp", "zero gradient", ["NaN", "norm(2, dim=1)"]),
    # what was given
    "backward in it": (by_backward, "r1", "unchanged: gradients", [".grad of w, V, u", "autograd.grad"]),
    "flag left on": (flag_left_on, "r1", "unchanged: requires_grad", ["real", "detach()"]),
    "critic frozen afterwards": (frozen_afterwards, "r1", "unchanged: requires_grad", ["Set free"]),
    "noise in place": (noise_in_place, "dragan", "unchanged: values", ["real was written to"]),
    "left in eval": (left_in_eval, "wgan_gp", "unchanged: training mode", ["train() mode"]),
    # circumstances
    "squeezed": (squeezed, "wgan_gp", "batch of one", ["squeezed"]),
    "scores of one shape": (last_column, "r1", "scores of shape [N]", ["squeezed or reduced"]),
    "float64 draws": (float64_draws, "wgan_gp", "in float32", ["same dtype", ".to(real)"]),
    "some samples": (lambda D, r, f: wgan_gp(D, r[:3], f[:3]), "wgan_gp", "points + value", ["3 of 64 samples"]),
    "coefficients broadcast": (lambda D, r, f: ((flat(slopes(D, (torch.rand(len(r), 1, 1, 1) * (r - f) + f).requires_grad_())) - 1) ** 2).mean(), "wgan_gp vector", "points + value", ["(64, 1, 64, 6)", "broadcast"]),
    "stops early": (stopping(20), "wgan_gp", "repeated calls", ["StopIteration"]),
    "stops later": (stopping(44), "wgan_gp", "points *", ["StopIteration", "where it ran before"]),
    "zero in validation": (zero_in_validation, "wgan_gp", "under no_grad + under inference_mode", ["did not raise"]),
    "half-precision sum": (by_einsum, "wgan_gp", "under autocast + zero gradient", ["overflows", "enabled=False"]),
    "not reduced": (lambda D, r, f: (norms(D, between(r, f)) - 1) ** 2, "wgan_gp", "returns", ["one number", "shape (5,)"]),
    "several things": (lambda D, r, f: (wgan_gp(D, r, f), 1), "wgan_gp", "returns", ["tuple"]),
    "another device": (lambda D, r, f: wgan_gp(D, r.to("meta"), f), "wgan_gp", "runs", ["meta"]),
}  # fmt: skip

OPTIONS = {
    "one_sided": {"one_sided": True}, "target": {"target": 3.0}, "weight": {"weight": 10.0},
    "every": {"every": 4}, "noise": {"noise": 0.5}, "vector": {"shape": (6,)},
}  # fmt: skip


def dragan_with(critic, real, noise):
    return ((norms(critic, (real + 0.5 * noise).detach().requires_grad_()) - 1) ** 2).mean()


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(name):
    penalty, words, rows, says = WRONG[name]
    kind, *options = words.split()
    report = check(penalty, kind, **(OPTIONS[options[0]] if options else {}))
    row, *also = rows.removesuffix(" *").split(" + ")
    assert row in {r.name for r in report.failed}, str(report)
    assert all(word.lower() in report[row].text.lower() for word in says), report[row].text
    if not rows.endswith("*"):
        assert {r.name for r in report.failed} == {row, *also}
    assert not report.ok
    with pytest.raises(VerificationError):
        report.raise_if_failed()


# What is worth a warning: what only raises, and loudly.

WARNED = {
    "fails without grad": (wgan_gp, "wgan_gp", "under no_grad", ["does not require grad", "enable_grad"]),
    "fails in inference mode": (wgan_gp, "wgan_gp", "under inference_mode", ["inference_mode(False)"]),
    "a batch of one is refused": (refuses_one, "wgan_gp", "batch of one", ["drop_last"]),
    "uniform noise": (lambda D, real: dragan_with(D, real, torch.rand_like(real)), "dragan", "points", ["centred in the paper"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_a_warning_is_no_failure(name):
    penalty, kind, row, says = WARNED[name]
    report = check(penalty, kind).raise_if_failed()
    assert report[row].status == "warn"
    assert all(word in report[row].text for word in says), report[row].text


def test_every_row_can_fail_or_warn():
    rows = {row.name for row in check(careful, "wgan_gp")}
    tried = {part for _, _, names, _ in WRONG.values() for part in names.split(" + ")}
    assert rows - tried - {names for _, _, names, _ in WARNED.values()} == set()


# What cannot be judged is said to be so.


def for_columns(critic, real, fake):
    x = between(real, fake)
    (g,) = autograd.grad(critic(x), x, torch.ones(len(x), 1, dtype=x.dtype), create_graph=True)
    return ((flat(g) - 1) ** 2).mean()


def only_float32(critic, real, fake):
    if real.dtype is not torch.float32:
        raise RuntimeError("expected scalar type Float but found Double")
    return wgan_gp(critic, real, fake)


def with_private_noise():
    g = Generator().manual_seed(5)

    def penalty(critic, real):
        noise = torch.randn(real.shape, generator=g, dtype=real.dtype)
        return dragan_with(critic, real, noise)

    return penalty


SKIPPED = {
    "scores are columns": (for_columns, "wgan_gp", "scores of shape [N]", "raises"),
    "only float32": (only_float32, "wgan_gp", "dtype: torch.float64", "refused"),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_refused_is_skipped(name):
    penalty, kind, row, word = SKIPPED[name]
    report = check(penalty, kind).raise_if_failed()
    assert report[row].status == "skip"
    assert word in report[row].text


def test_scores_without_a_column_will_do():
    def penalty(critic, real, fake):
        x = between(real, fake)
        (g,) = autograd.grad(critic(x), x, torch.ones(len(x), dtype=x.dtype), create_graph=True)
        return ((flat(g) - 1) ** 2).mean()

    report = check(penalty, "wgan_gp").raise_if_failed()
    assert report["scores of shape [N, 1]"].status == "skip"


def test_what_does_not_run_says_how_it_is_called():
    report = check(lambda a: a, "wgan_gp")
    assert [row.name for row in report] == ["runs"]
    assert "penalty(critic, real, fake)" in report["runs"].text
    assert "NOT RUN" in str(report)


# What was passed is left as it was.


class Counting(nn.Module):
    """A lazy penalty that counts its calls, and learns nothing else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, critic, real, fake=None):
        self.count += 1
        return 4 * r1(critic, real) if self.count % 4 == 0 else real.new_zeros(())

    def method(self, critic, real):
        return self(critic, real)


@pytest.mark.parametrize("form", [lambda m: m, lambda m: m.method], ids=["module", "method"])
def test_a_module_keeps_its_count(form):
    penalty = Counting()
    penalty.count += 3
    check(form(penalty), "r1", every=4).raise_if_failed()
    assert penalty.count == 3


def test_an_object_keeps_its_count():
    class Lazy:
        count = 0

        def __call__(self, critic, real):
            self.count += 1
            return 2 * r1(critic, real) if self.count % 2 else 0

    penalty = Lazy()
    check(penalty, "r1", every=2).raise_if_failed()
    assert penalty.count == 0


def test_random_numbers_stay_where_they_were():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    check(by_numpy, "wgan_gp")
    check(lambda D, r, f: random.random() * wgan_gp(D, r, f), "wgan_gp")
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_it_can_be_asked_anywhere(around):
    with around():
        check(careful, "wgan_gp").raise_if_failed()


def test_reports_are_the_same_twice():
    assert str(check(dragan, "dragan")) == str(check(dragan, "dragan"))


@pytest.mark.gpu
def test_on_a_device():
    def penalty(critic, real, fake):
        e = torch.rand(one_a_sample(real), device=real.device)
        return ((norms(critic, (e * real + (1 - e) * fake).requires_grad_()) - 1) ** 2).mean()

    state = torch.cuda.get_rng_state()
    report = check(penalty, "wgan_gp", device="cuda").raise_if_failed()
    assert report["points"].status == "pass"
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert "runs" in {row.name for row in check(wgan_gp, "wgan_gp", device="cuda").failed}


# What cannot be asked.


@pytest.mark.parametrize(
    ("options", "says"),
    [
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
    ],
    ids=str,
)
def test_errors_say_what_to_do(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check(wgan_gp, **options)


def test_a_penalty_is_a_function():
    with pytest.raises(TypeError, match="expected a function"):
        check(1.0, "r1")
