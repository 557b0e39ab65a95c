"""Penalties of critics: closed forms, parameter gradients against differences, samples on their own."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from hoglib import penalties
from tests.conformance.test_penalties import OF_CRITICS
from tests.curvature.problems import F64
from tests.oracles import gradient_by_differences
from tests.penalties.critics import (
    CRITICS,
    INDEX,
    build,
    draw,
    generator,
    plain,
)  # fmt: skip
from tests.refused import refused
from tests.unchanged import unchanged

KINDS = {name: row.call for name, row in OF_CRITICS.items()}


# Closed forms


def test_the_points_are_those_that_are_drawn():
    """D(x) = a |x|^2 / 2 over [C, H, W]: the gradient at x is a x."""
    a = draw(2, 3, 3).abs() + 0.1
    critic = lambda x: (a * x * x).sum((1, 2, 3), keepdim=True) / 2  # noqa: E731
    real, fake = draw(4, 2, 3, 3, seed=1), draw(4, 2, 3, 3, seed=2)
    norms = lambda x: (a * x).flatten(1).norm(dim=1)  # noqa: E731
    assert_close(penalties.dragan(critic, real, noise=0.0), (norms(real) - 1).square().mean())
    for constant in (
        penalties.wgan_gp(lambda x: 0 * critic(x), real, fake),
        penalties.dragan(lambda x: 0 * critic(x), real),
    ):
        assert constant == 1
    assert penalties.wgan_gp(critic, real, fake, target=100.0, one_sided=True) == 0
    e = torch.rand(4, dtype=F64, generator=generator()).view(-1, 1, 1, 1)
    between = e * real + (1 - e) * fake
    assert_close(KINDS["zero_centred"](critic, real, fake), norms(between).square().mean())
    moved = real + 0.3 * torch.randn(real.shape, dtype=F64, generator=generator())
    assert_close(
        penalties.dragan(critic, real, noise=0.3, generator=generator()),
        (norms(moved) - 1).square().mean(),
    )
    moved = real + 0.5 * real.std(correction=0) * torch.randn(
        real.shape, dtype=F64, generator=generator()
    )
    assert_close(KINDS["dragan"](critic, real, fake), (norms(moved) - 1).square().mean())


def test_points_lie_between_real_and_fake_each_sample_at_its_own_place():
    seen = []

    def critic(x):
        seen.append(x.detach())
        return x.flatten(1).sum(1)

    real, fake = torch.zeros(500, 2, 3, dtype=F64), torch.ones(500, 2, 3, dtype=F64)
    penalties.wgan_gp(critic, real, fake)
    graph = torch.arange(500) // 2  # whose two rows have one place
    penalties.wgan_gp(lambda x: critic(x)[::2] + critic(x)[1::2], real, fake, batch=graph)
    x, of_graphs, _ = seen
    assert torch.equal(of_graphs[::2], of_graphs[1::2])
    assert len(of_graphs.unique()) == 250
    e = x[:, 0, 0]
    assert_close(x, e.view(-1, 1, 1).expand_as(x))
    assert len(e.unique()) == 500
    assert 0 <= e.min() < 0.02
    assert 0.98 < e.max() <= 1
    assert abs(e.mean() - 0.5) < 0.05


# Graphs, trees, and micro-batches


def test_the_terms_of_graphs_are_those_of_each_alone():
    make, real, *_ = CRITICS["graphs"]
    model = build(make)
    terms = penalties.r1(model, real, INDEX, batch=INDEX, reduction="none")
    assert len(terms) == 5
    for graph in (0, 1, 2, 4):
        rows = real[graph == INDEX]
        zeros = torch.zeros(len(rows), dtype=torch.long)
        assert_close(penalties.r1(model, rows, zeros, batch=zeros), terms[graph])
    assert terms[3] == 0  # a graph without nodes
    order = torch.randperm(7)
    index = INDEX[order]
    assert_close(penalties.r1(model, real[order], index, batch=index, reduction="none"), terms)


def test_a_tree_of_rows_and_samples():
    """Nodes of graphs, and a vector for each graph: D = (sum over nodes of n.1) (w.1)."""

    def critic(x, index):
        nodes = torch.zeros(5, dtype=F64).index_add(0, index, x["nodes"].sum(1))
        return nodes * x["whole"].sum(1)

    x, batch = {"nodes": draw(7, 3), "whole": draw(5, 2)}, {"nodes": INDEX, "whole": None}
    nodes = torch.zeros(5, dtype=F64).index_add(0, INDEX, x["nodes"].sum(1))
    slopes = 3 * INDEX.bincount(minlength=5) * x["whole"].sum(1) ** 2 + 2 * nodes**2
    assert_close(penalties.r1(critic, x, INDEX, batch=batch, reduction="none"), slopes / 2)


def test_pieces_hand_gradients_to_points_and_to_what_came_before():
    """Through real itself, through an argument, and through a tensor that the critic closes over."""
    grads = []
    for micro_batch in (None, 2):
        model = build(plain)
        x, scale, shift = (draw(5, 3, seed=s).requires_grad_() for s in (0, 1, 2))
        made = shift.sin().mean()
        critic = lambda x, s: model(x * s) * made  # noqa: B023, E731
        value = penalties.r1(critic, x * 2, scale.exp(), micro_batch=micro_batch)
        value.backward()
        learned = (p.grad for p in model.parameters() if p.grad is not None)
        grads.append([x.grad, scale.grad, shift.grad, *learned])
    assert len(grads[0]) > 5
    assert all(g.any() for g in grads[0])
    assert_close(grads[0], grads[1])


# What is left alone and what is returned


@pytest.mark.filterwarnings("ignore:.*depends on the others.*BatchNorm1d")
def test_nothing_that_was_given_is_changed():
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4),
        nn.Linear(4, 1),
    ).double()  # fmt: skip
    real, fake = draw(5, 3), draw(5, 3, seed=1)
    old = nn.utils.spectral_norm(nn.Linear(3, 1)).double()
    for critic in (model, model.forward, lambda x: model(x), partial(model), old):
        home = old if critic is old else model
        with unchanged(home):
            for kind in ("r1", "wgan_gp"):
                KINDS[kind](critic, real, fake)
    assert not real.requires_grad
    assert real.grad is None


def test_scores_come_with_the_penalty_from_one_forward():
    calls = []
    model = build(plain)

    def critic(x):
        calls.append(1)
        return model(x), "more"

    real, fake = draw(5, 3), draw(4, 3, seed=1)
    value, outputs = penalties.r1(critic, real, return_outputs=True)
    assert len(calls) == 1
    assert outputs[1] == "more"
    assert_close(outputs[0], model(real))
    (value + outputs[0].mean()).backward()
    with torch.no_grad():
        assert not penalties.r1(model, real, return_outputs=True).outputs.requires_grad
    both, (at_real, at_fake) = penalties.r1_r2(model, real, fake, return_outputs=True)
    assert_close(both, penalties.r1(model, real) + penalties.r2(model, fake))
    assert (len(at_real), len(at_fake)) == (5, 4)


def test_points_that_need_a_gradient_get_one():
    """A generator learns from the penalty of its samples unless they are detached."""
    model, x = build(plain), draw(5, 3).requires_grad_()
    (ours,) = torch.autograd.grad(penalties.r2(model, 3 * x), x)
    expected = gradient_by_differences(lambda p: penalties.r2(model, 3 * p["x"]), {"x": x.detach()})
    assert_close(ours, expected["x"], rtol=1e-5, atol=1e-8)


def test_which_output_is_meant():
    x = draw(4, 3)
    outputs = {"a": lambda x: x.sum(1), "b": lambda x: 2 * x.sum(1)}
    critic = lambda x: tuple(f(x) for f in outputs.values())  # noqa: E731
    first = penalties.r1(outputs["a"], x)
    assert_close(penalties.r1(critic, x), first)
    assert_close(penalties.r1(critic, x, output=1), 4 * first)
    assert_close(penalties.r1(critic, x, output=lambda y: y[0] + y[1]), 9 * first)
    named = lambda x: {key: f(x) for key, f in outputs.items()}  # noqa: E731
    assert_close(penalties.r1(named, x, output="b"), 4 * first)
    attribute = lambda x: type("Output", (), {"logits": x.sum(1)})()  # noqa: E731
    assert_close(penalties.r1(attribute, x, output="logits"), first)
    patches = lambda x: x.view(4, 3, 1)  # noqa: E731
    assert_close(penalties.r1(patches, x, output=lambda y: y.flatten(1).sum(1)), first)
    of_one = lambda x: outputs["a"](x).sum()  # noqa: E731  # which may lose its dimension
    assert_close(penalties.r1(of_one, x[:1]), first)
    assert penalties.r1(outputs["a"], x.to("meta"), reduction="none").shape == (4,)


# What is refused

X = draw(4, 3)
CRITIC = build(plain)
REFUSED = {
    "integers": (lambda: penalties.r1(CRITIC, torch.ones(4, 3, dtype=int)), TypeError, "real floating-point.*got a int64.*after the points"),
    "complex numbers": (lambda: penalties.r1(CRITIC, X.to(torch.complex128)), TypeError, "real floating-point"),
    "no tensor": (lambda: penalties.r1(CRITIC, [1.0, 2.0]), TypeError, r"torch\.Tensor, got float"),
    "a list of samples": (lambda: penalties.r1(CRITIC, [X[0], X[1]]), TypeError, "points.1., .* by `torch.stack`"),
    "nothing": (lambda: penalties.r1(CRITIC, {}), ValueError, "at least one tensor"),
    "a scalar": (lambda: penalties.r1(CRITIC, torch.tensor(1.0)), ValueError, "leading dimension"),
    "no sample": (lambda: penalties.r1(CRITIC, draw(0, 3)), ValueError, "at least one sample"),
    "no sample, in micro-batches": (lambda: penalties.r1(CRITIC, X[:0], micro_batch=2), ValueError, "at least one sample"),
    "sparse points": (lambda: penalties.r1(lambda x: CRITIC(x.to_dense()), X.to_sparse()), TypeError, "dense"),
    "terms of fewer fake than real": (lambda: penalties.r1_r2(CRITIC, X, X[:2], reduction="none"), ValueError, "as many fake"),
    "a graph of micro-batches": (lambda: penalties.r1(CRITIC, X, micro_batch=2).backward(create_graph=True), RuntimeError, "without create_graph"),
    "no function": (lambda: penalties.r1(X, X), TypeError, "expected a function"),
    "the mean over the batch": (lambda: penalties.r1(lambda x: CRITIC(x).mean(), X), ValueError, "leave out the mean over the batch"),
    "several numbers a sample": (lambda: penalties.r1(lambda x: x, X), ValueError, r"one number for each of 4 samples.*output="),
    "no tensor returned": (lambda: penalties.r1(lambda x: "score", X), TypeError, "returns a real floating-point tensor, got str"),
    "one sample": (lambda: penalties.r1(CRITIC, X[0]), ValueError, r"a single example is a batch of one: `x\[None\]`\.$"),
    "one sample of each": (lambda: penalties.wgan_gp(lambda x: x.sum()[None], X[0], X[1]), ValueError, r"`x\[None\]`"),
    "an output that is not there": (lambda: penalties.r1(lambda x: {"a": x}, X, output="b"), ValueError, "got 'b', which a dict with 'a' does not have"),
    "a position that is not there": (lambda: penalties.r1(lambda x: (x.sum(1),) * 3, X, output=7), ValueError, "got 7, which a tuple of 3 does not have"),
    "an output of another kind": (lambda: penalties.r1(CRITIC, X, output=1.5), TypeError, "output: expected a position"),
    "an unknown option": (lambda: penalties.r1(CRITIC, X, reducton="sum"), TypeError, "did you mean 'reduction'"),
    "a label by name": (lambda: penalties.r1(CRITIC, X, y=X), TypeError, "got 'y'. Pass further inputs of the function by position, after the points"),
    "an unknown keyword": (lambda: penalties.wgan_gp(CRITIC, X, X, onesided=True), TypeError, "did you mean 'one_sided'"),
    "an unknown reduction": (lambda: penalties.r1(CRITIC, X, reduction="max"), ValueError, "one of mean, sum, none"),
    "autocast as a word": (lambda: penalties.r1(CRITIC, X, autocast="off"), TypeError, "True or False"),
    "micro_batches of none": (lambda: penalties.r1(CRITIC, X, micro_batch=0), ValueError, "at least 1"),
    "micro_batches of terms": (lambda: penalties.r1(CRITIC, X, micro_batch=2, reduction="none"), ValueError, "without reduction=none"),
    "micro_batches with outputs": (lambda: penalties.r1(CRITIC, X, micro_batch=2, return_outputs=True), ValueError, "without return_outputs"),
    "fewer fake than real": (lambda: penalties.wgan_gp(CRITIC, X, X[:3]), ValueError, r"fake like real, \(4, 3\).*\(3, 3\).*last batch"),
    "fake of another structure": (lambda: penalties.wgan_gp(CRITIC, X, [X]), ValueError, "fake with the structure of real"),
    "a seed for a generator": (lambda: penalties.wgan_gp(CRITIC, X, X, generator=3), TypeError, "torch.Generator or None"),
    "a negative target": (lambda: penalties.wgan_gp(CRITIC, X, X, target=-1.0), ValueError, "target"),
    "noise that is NaN": (lambda: penalties.dragan(CRITIC, X, noise=float("nan")), ValueError, "noise"),
    "an index of another length": (lambda: penalties.r1(CRITIC, X, batch=torch.zeros(3, dtype=int)), ValueError, r"shape \(4,\)"),
    "an index of fractions": (lambda: penalties.r1(CRITIC, X, batch=torch.zeros(4)), ValueError, "integers of shape"),
    "a negative index": (lambda: penalties.r1(CRITIC, X, batch=torch.tensor([0, 0, -1, 1])), ValueError, "at least 0, got -1"),
    "trees of several lengths": (lambda: penalties.r1(lambda x: x[0].sum(1), [X, X[:2]]), ValueError, "leading dimensions 2, 4"),
}  # fmt: skip


test_what_is_refused = refused(REFUSED)


@pytest.mark.parametrize("critic", [nn.Linear(2, 1), lambda x: x.sum(1)])
def test_samples_that_a_penalty_of_one_set_does_not_take_are_told(critic):
    x = torch.ones(3, 2)
    with pytest.raises(TypeError) as raised:
        penalties.r1(critic, x, x)
    assert "`hoglib.penalties.r1_r2(critic, real, fake)`" in raised.value.__notes__[-1]
    with pytest.raises(TypeError) as raised:
        penalties.r1(lambda x, y: x + None, x, x)
    assert "r1_r2" not in "".join(raised.value.__notes__)
