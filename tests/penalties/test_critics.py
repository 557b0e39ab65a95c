"""Penalties of critics: closed forms, parameter gradients against differences, samples on their own."""

import copy
import inspect
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from hoglib import penalties
from tests.long_tail import all_but
from tests.oracles import gradient_by_differences
from tests.penalties.critics import (
    CRITICS,
    F64,
    INDEX,
    build,
    draw,
    generator,
    params_of,
    plain,
    with_params,
)  # fmt: skip

KINDS = {
    "wgan_gp": lambda c, real, fake, *a, **k: penalties.wgan_gp(c, real, fake, *a, generator=generator(), **k),
    "wgan_gp one-sided": lambda c, real, fake, *a, **k: penalties.wgan_gp(
        c, real, fake, *a, target=0.05, one_sided=True, generator=generator(), **k
    ),
    "zero_centred": lambda c, real, fake, *a, **k: penalties.zero_centred(c, real, fake, *a, generator=generator(), **k),
    "r1": lambda c, real, fake, *a, **k: penalties.r1(c, real, *a, **k),
    "r2": lambda c, real, fake, *a, **k: penalties.r2(c, fake, *a, **k),
    "r1_r2": penalties.r1_r2,
    "dragan": lambda c, real, fake, *a, **k: penalties.dragan(c, real, *a, generator=generator(), **k),
    "lipschitz": lambda c, real, fake, *a, **k: penalties.lipschitz(c, real, *a, bound=0.05, **k),
    "input_gradient": lambda c, real, fake, *a, **k: penalties.input_gradient(c, real, *a, **k),
}  # fmt: skip


# Closed forms


def test_a_quadratic_critic_has_a_slope_for_each_sample():
    """D(x) = a |x|^2 / 2 over [C, H, W]: the gradient at x is a x."""
    a = draw(2, 3, 3).abs() + 0.1
    critic = lambda x: (a * x * x).sum((1, 2, 3), keepdim=True) / 2  # noqa: E731
    real, fake = draw(4, 2, 3, 3, seed=1), draw(4, 2, 3, 3, seed=2)
    norms = lambda x: (a * x).flatten(1).norm(dim=1)  # noqa: E731
    assert_close(penalties.r1(critic, real), norms(real).square().mean() / 2)
    assert_close(penalties.r2(critic, fake), norms(fake).square().mean() / 2)
    assert_close(
        penalties.wgan_gp(critic, real, real, target=0.7), (norms(real) - 0.7).square().mean()
    )
    assert_close(penalties.dragan(critic, real, noise=0.0), (norms(real) - 1).square().mean())
    assert penalties.wgan_gp(critic, real, fake, target=100.0, one_sided=True) == 0
    assert_close(KINDS["lipschitz"](critic, real, fake), (norms(real) - 0.05).square().mean())
    assert_close(KINDS["input_gradient"](critic, real, fake), norms(real).square().mean() / 2)
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


# Every critic: gradients, samples on their own, micro_batches


# Formulas of one critic that are those of another kind at other points, or its half
VARIANTS = ("wgan_gp one-sided", "r1", "r2")


@pytest.mark.parametrize(
    ("name", "kind"),
    all_but(
        lambda name, kind: name == "rows" or kind not in VARIANTS,
        itertools.product(CRITICS, KINDS),
    ),
)
def test_the_gradient_by_the_parameters_is_that_of_differences(name, kind):
    make, real, fake, args, options = CRITICS[name]
    model = build(make)
    value = KINDS[kind](model, real, fake, *args, **options)
    assert value.dim() == 0
    value.backward()
    params = params_of(model)
    expected = gradient_by_differences(
        lambda p: KINDS[kind](with_params(model, p), real, fake, *args, **options), params
    )
    size = max(float(g.abs().max()) for g in expected.values())
    assert size > 1e-4
    for key, p in model.named_parameters():
        ours = torch.zeros_like(p) if p.grad is None else p.grad
        assert_close(ours, expected[key], rtol=1e-5, atol=1e-6 * size, msg=key)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("r1_r2", "dragan")])
@pytest.mark.parametrize("name", [name for name in CRITICS if name != "graphs"])
def test_terms_belong_to_samples(name, kind):
    make, real, fake, args, options = CRITICS[name]
    model = build(make)
    tree = torch.utils._pytree.tree_map
    # where the points are drawn between, real and fake are the same: the draw is of no matter
    fake = fake if kind == "r2" else real
    terms = KINDS[kind](model, real, fake, *args, reduction="none", **options)
    order = torch.randperm(len(terms))
    moved = [tree(lambda t: t[order], part) for part in (real, fake, args)]
    again = KINDS[kind](model, moved[0], moved[1], *moved[2], reduction="none", **options)
    assert_close(again, terms[order])
    assert_close(KINDS[kind](model, real, fake, *args, reduction="sum", **options), terms.sum())
    assert_close(KINDS[kind](model, real, fake, *args, **options), terms.mean())
    for n in range(len(terms)):
        one = [tree(lambda t: t[n : n + 1], part) for part in (real, fake, args)]  # noqa: B023
        assert_close(KINDS[kind](model, one[0], one[1], *one[2], **options), terms[n])


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rows", "labels and a tuple", "two inputs and a dict"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_in_micro_batches_value_and_gradients_are_the_same(name, kind, reduction):
    make, real, fake, args, options = CRITICS[name]
    whole, micro_batches = build(make), build(make)
    options = {**options, "reduction": reduction}
    a = KINDS[kind](whole, real, fake, *args, **options)
    b = KINDS[kind](micro_batches, real, fake, *args, micro_batch=3, **options)
    assert_close(a, b)
    (2 * a).backward()
    (2 * b).backward()
    for p, q in zip(whole.parameters(), micro_batches.parameters(), strict=True):
        if p.grad is not None and p.grad.any():
            assert_close(q.grad, p.grad)


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


# At zero, in validation, under transforms


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_zero_is_no_nan(kind):
    model = build(plain)
    nn.init.zeros_(model[0].weight)
    value = KINDS[kind](model, draw(5, 3), draw(5, 3, seed=1))
    value.backward()
    assert torch.isfinite(value)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    if kind in ("wgan_gp", "dragan"):
        assert_close(value.detach(), torch.tensor(1.0, dtype=F64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_without_gradients_the_value_is_the_same_and_has_no_graph(kind, mode):
    model = build(plain)
    expected = KINDS[kind](model, draw(5, 3), draw(5, 3, seed=1))
    with mode():
        real, fake = draw(5, 3), draw(5, 3, seed=1)  # tensors of inference mode too
        value = KINDS[kind](model, real, fake)
        micro_batches = KINDS[kind](model, real, fake, micro_batch=2)
    assert not value.requires_grad
    assert_close(value, expected.detach())
    assert_close(micro_batches, expected.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_under_torch_func(kind):
    model = build(plain)
    params = params_of(model)
    of = lambda p: KINDS[kind](with_params(model, p), draw(5, 3), draw(5, 3, seed=1))  # noqa: E731
    value = KINDS[kind](model, draw(5, 3), draw(5, 3, seed=1))
    value.backward()
    grads = torch.func.grad(of)(params)
    for name, p in model.named_parameters():
        assert_close(grads[name], torch.zeros_like(p) if p.grad is None else p.grad)
    stacked = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    doubled = of({name: 2 * p for name, p in params.items()})
    assert_close(
        torch.func.vmap(of, randomness="same")(stacked), torch.stack([value, doubled]).detach()
    ) if kind in ("r1", "r2", "r1_r2", "input_gradient", "lipschitz") else None


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
        before = copy.deepcopy(home.state_dict())
        random = torch.get_rng_state()
        for kind in ("r1", "wgan_gp"):
            KINDS[kind](critic, real, fake)
        assert_close(home.state_dict(), before, rtol=0, atol=0)
        assert torch.equal(random, torch.get_rng_state())
    assert not real.requires_grad
    assert real.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert model.training


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


def test_a_penalty_can_be_differentiated_again():
    model, v = build(plain), [draw(*p.shape, seed=9) for p in build(plain).parameters()]

    def along(params):
        own = {name: p.requires_grad_() for name, p in params.items()}
        value = KINDS["wgan_gp"](with_params(model, own), draw(5, 3), draw(5, 3, seed=1))
        grads = torch.autograd.grad(
            value, list(own.values()), create_graph=True, materialize_grads=True
        )
        return sum((g * d).sum() for g, d in zip(grads, v, strict=True))

    params = params_of(model)
    found = torch.autograd.grad(along(params), list(params.values()), materialize_grads=True)
    expected = gradient_by_differences(lambda p: along(p).detach(), params_of(model))
    assert_close(dict(zip(params, found, strict=True)), expected, rtol=1e-5, atol=1e-7)


# The way to the engine

X3, PACKAGE = draw(4, 3), Path(penalties.__file__).parents[1]
CALLS = {
    "r1": lambda c: penalties.r1(c, X3),
    "wgan_gp": lambda c: penalties.wgan_gp(c, X3, X3),
    "jacobian": lambda c: penalties.jacobian(c, X3),
    "parameter_gradient": lambda c: penalties.parameter_gradient(
        lambda p: with_params(c, p)(X3).square().mean(), dict(c.named_parameters())
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_engine_is_six_frames_away_and_no_file_is_entered_twice(name, monkeypatch):
    engine, stacks = torch.autograd.graph._engine_run_backward, []

    def counted(*args, **options):
        frame, files = inspect.currentframe(), []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        stacks.append([file for file in files if Path(file).is_relative_to(PACKAGE)])
        return engine(*args, **options)

    for module in (torch.autograd, torch.autograd.graph):
        monkeypatch.setattr(module, "_engine_run_backward", counted)
    CALLS[name](build(plain))
    files = stacks[0]
    # the last is that of the helper around the engine
    assert len([file for file in files if not file.endswith("/torch_internals.py")]) <= 5
    assert len([file for file, _ in itertools.groupby(files)]) == len(set(files))


# What is refused

X = draw(4, 3)
CRITIC = build(plain)
REFUSED = {
    "whole numbers": (lambda: penalties.r1(CRITIC, torch.ones(4, 3, dtype=int)), TypeError, "real floating-point.*got a int64.*after the points"),
    "complex numbers": (lambda: penalties.r1(CRITIC, X.to(torch.complex128)), TypeError, "real floating-point"),
    "no tensor": (lambda: penalties.r1(CRITIC, [1.0, 2.0]), TypeError, r"torch\.Tensor, got float"),
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
    "an output that is not there": (lambda: penalties.r1(lambda x: {"a": x}, X, output="b"), ValueError, "got 'b', which a dict with 'a' does not have"),
    "an output of another kind": (lambda: penalties.r1(CRITIC, X, output=1.5), TypeError, "output: expected a position"),
    "an unknown option": (lambda: penalties.r1(CRITIC, X, reducton="sum"), TypeError, "did you mean 'reduction'"),
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


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()
