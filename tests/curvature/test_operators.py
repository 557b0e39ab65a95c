"""Operators over data against dense matrices by differences; kept graphs, checks and errors."""

import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import hoglib as hog
from hoglib._core.substrate.fingerprint import StateFingerprint
from hoglib.errors import NondeterministicError
from tests.curvature.problems import (
    F64,
    dense_ggn,
    dense_hessian,
    draw,
    expected_matrix,
    flat,
    problem,
    relative,
)
from tests.functions import made
from tests.models import Checkpointed, Fn
from tests.refused import refused
from tests.rows import rows


def test_products_in_half_precision_are_summed_in_the_dtype_that_is_asked_for():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).bfloat16()
    batches = [(torch.randn(2, 4).bfloat16(), torch.randint(3, (2,))) for _ in range(40)]
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    v = {name: torch.randn_like(p) for name, p in params.items()}
    each = [flat(hog.hvp(loss, params, v, batch)[1]).double() for batch in batches]
    expected = torch.stack(each).mean(0)
    errors = {}
    for dtype in (None, torch.float32):
        H = hog.HessianOperator(loss, params, batches, dtype=dtype)
        assert H.dtype == (dtype or torch.bfloat16)
        product = H @ flat(v).to(H.dtype)
        assert product.dtype == H.dtype
        assert (H @ v)["0.weight"].dtype == torch.bfloat16
        errors[dtype] = float((product.double() - expected).norm() / expected.norm())
    assert errors[torch.float32] < 1e-5
    assert errors[None] > 1e-3
    # the default tolerance is that of the products, not of the vectors
    assert H.eigsh(k=1).values.dtype == torch.float32
    for wrong, kind in (
        (torch.float16, ValueError),
        (torch.long, TypeError),
        ("float32", TypeError),
    ):
        with pytest.raises(kind, match="dtype: expected"):
            hog.GGNOperator(loss, params, batches, dtype=wrong)


def loader(batch, **options):
    """Its random numbers are its own."""
    options = {"batch_size": 3, "generator": torch.Generator().manual_seed(0), **options}
    return DataLoader(TensorDataset(*batch), **options)


# name -> what the operator is given in the place of one batch of 7, and how
DATA = {
    "one batch": lambda b: (b, {}),
    "one batch, nothing kept": lambda b: (b, {"memory_limit": 0}),
    "a loader with an uneven last batch": lambda b: (loader(b), {}),
    "a list of batches": lambda b: ([(b[0][:2], b[1][:2]), (b[0][2:], b[1][2:])], {}),
    "micro-batches": lambda b: (b, {"micro_batch": 2}),
    "micro-batches of a loader": lambda b: (loader(b, batch_size=5), {"micro_batch": 3}),
    "shuffled": lambda b: (loader(b, shuffle=True), {}),
}


@rows("data", DATA)
def test_sums_are_not_means(data):
    loss, params, batch = problem("LayerNorm")
    summed = hog.functional_loss(loss.model, partial(F.cross_entropy, reduction="sum"))
    given, options = DATA[data](batch)
    operator = hog.HessianOperator(summed, params, given, reduction="sum", **options)
    v = draw(operator.shape[0])
    assert (
        relative(operator @ v, len(batch[0]) * expected_matrix(dense_hessian, "LayerNorm") @ v)
        < 1e-7
    )


def test_the_weight_of_a_batch_can_be_given():
    # two batches whose mean loss is over tokens that count, not over rows
    loss, params, (x, y) = problem("layers of hoglib")
    y = y.clone()
    y[[0, 1, 5]] = -100
    counted = hog.HessianOperator(
        loss, params, loader((x, y), batch_size=4), batch_size=lambda b: (b[1] >= 0).sum()
    )
    v = draw(counted.shape[0])
    assert relative(counted @ v, dense_hessian(loss, params, (x, y)) @ v) < 1e-7
    uncounted = hog.HessianOperator(loss, params, loader((x, y), batch_size=4))
    assert relative(uncounted @ v, counted @ v) < 1e-7  # the criterion is known
    own = hog.functional_loss(loss.model, lambda o, y: F.cross_entropy(o, y))
    words = r"mean divides by another number.*batch_size=lambda batch"
    with pytest.raises(ValueError, match=words):
        hog.HessianOperator(own, params, loader((x, y), batch_size=4)) @ v
    by_rows = lambda batch: len(batch[0])  # noqa: E731
    examples = hog.HessianOperator(own, params, loader((x, y), batch_size=4), batch_size=by_rows)
    assert relative(examples @ v, counted @ v) > 1e-3  # the mean of batches, which is asked for
    known = hog.HessianOperator(loss, params, loader((x, y), batch_size=4), batch_size=by_rows)
    assert relative(known @ v, examples @ v) < 1e-7  # also where the criterion is known


def _square(z, y):
    return (z - y).square()


UNCLEAR = "weighted by the rows of their first tensor, 2 to 5, and"
SUMMED = {  # criteria, and what a message says of them over a loader
    "a sum": (lambda z, y: _square(z, y).sum(), "got their sum"),
    "a sum over a constant": (lambda z, y: _square(z, y).sum() / 7, "got their sum"),
    "a sum of cross entropies": (lambda z, y: -(y.softmax(1) * z.log_softmax(1)).sum(), "got their sum"),
    "a summed penalty": (lambda z, y: _square(z, y).mean() + 0.1 * z.square().sum(), "a mean plus a sum"),
    "a summed term": (lambda z, y: _square(z, y).sum() + z.exp().mean(), "a mean plus a sum"),
    "a mean": (lambda z, y: _square(z, y).mean(), ""),
    "a mean of sums": (lambda z, y: _square(z, y).sum(1).mean(), ""),
    "a mean and a constant": (lambda z, y: _square(z, y).mean() + 3, ""),
    "statistics of the batch": (lambda z, y: _square(z, y).mean() + z.mean(0).square().sum(), UNCLEAR),
    "contrastive": (lambda z, y: F.cross_entropy(z @ y.T, torch.arange(len(z))), UNCLEAR),
}  # fmt: skip
OVER_LOADERS = {
    "HessianOperator": lambda loss, p, data: hog.HessianOperator(loss, p, data) @ torch.ones(15, dtype=F64),
    "GGNOperator": lambda loss, p, data: hog.GGNOperator(loss, p, data) @ torch.ones(15, dtype=F64),
    "gradient": lambda loss, p, data: hog.HessianOperator(loss, p, data).gradient(),
    "value": lambda loss, p, data: hog.GGNOperator(loss, p, data).value(),
}  # fmt: skip


@rows("name", SUMMED)
@pytest.mark.parametrize("door", OVER_LOADERS)
def test_a_loss_that_sums_over_examples_is_refused_over_a_loader(name, door):
    criterion, told = SUMMED[name]
    model = nn.Linear(4, 3).double()
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    x, y = draw(11, 4), draw(11, 3)
    run = OVER_LOADERS[door]
    run(loss, params, (x, y))  # of one batch it is what it is
    batches = [(x[:5], y[:5]), (x[5:9], y[5:9]), (x[9:], y[9:])]
    if not told or told == UNCLEAR:
        run(loss, params, [(x[:5], y[:5]), (x[5:10], y[5:10])])
        with pytest.warns(UserWarning, match=told) if told else nullcontext():
            run(loss, params, batches)
        return
    with pytest.raises(ValueError, match=f"{told}.*reduction='sum'"):
        run(loss, params, batches)


@pytest.mark.parametrize("criterion", [F.cross_entropy, lambda z, y: F.cross_entropy(z, y)])
def test_batches_of_sequences_with_time_first_count_their_targets(criterion):
    model = nn.Sequential(nn.RNN(4, 3), Fn(lambda _, found: found[0][-1])).double()
    loss = hog.functional_loss(model, criterion)
    params, sizes = hog.trainable_params(model), [(3, 7), (8, 2)]
    data = [(draw(t, n, 4), torch.arange(n) % 3) for t, n in sizes]
    count = lambda batch: len(batch[1])  # noqa: E731
    known = criterion is F.cross_entropy
    given = {} if known else {"batch_size": count}
    expected = sum(loss(params, batch) * count(batch) for batch in data) / 9
    for operator in (hog.HessianOperator, hog.GGNOperator, hog.FisherOperator):
        fisher = operator is hog.FisherOperator and not known
        likelihood = {"likelihood": "categorical"} if fisher else {}
        assert_close(operator(loss, params, data, **given, **likelihood).value(), expected)
    if not known:
        as_long = [(draw(6, n, 4), torch.arange(n) % 3) for n in (7, 2)]
        for batches, told in ((data, "3 to 8"), (as_long, "6 to 6")):
            with pytest.warns(UserWarning, match=f"rows of their first tensor, {told}.*time steps"):
                hog.HessianOperator(loss, params, batches).value()


def test_a_summed_loss_with_its_reduction_is_that_of_all_data():
    model = nn.Linear(4, 3).double()
    loss, params = hog.functional_loss(model, SUMMED["a sum"][0]), hog.trainable_params(model)
    x, y = draw(11, 4), draw(11, 3)
    found = hog.HessianOperator(loss, params, [(x[:5], y[:5]), (x[5:], y[5:])], reduction="sum")
    assert_close(found.to_dense(), dense_hessian(loss, params, (x, y)))


WEIGHTS = torch.tensor([0.1, 1.0, 7.0], dtype=F64)


def masked(o, batch):
    return (o.square() * batch[2]).sum() / batch[2].sum()


MEANS = {
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), "class"),
    "class weights, smoothed": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), "class"),
    "ignored labels, in one batch all": (nn.CrossEntropyLoss(), "ignored"),
    "a partial with weights": (partial(F.cross_entropy, weight=WEIGHTS, ignore_index=2), "class"),
    "weights of log-probabilities": (lambda: nn.NLLLoss(weight=WEIGHTS), "class"),
    "an index beyond the classes": (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=255), "beyond"),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHTS), "probabilities"),
    "weights of outputs": (nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS), "probabilities"),
    "unequal batches": (nn.MSELoss(), "probabilities"),
}  # fmt: skip


@rows("name", MEANS)
def test_what_the_criterion_counts_weights_the_batches(name):
    """Of loaders and micro-batches: the matrices, the gradient, and what is told of single examples, are
    those of all the data as one batch."""
    criterion, targets = MEANS[name]
    model: nn.Module = nn.Linear(4, 3).double()
    if not isinstance(criterion, nn.Module | partial):
        model, criterion = nn.Sequential(model, nn.LogSoftmax(1)), criterion()
    x, y = draw(11, 4), torch.tensor([0, 0, 0, 0, 1, 0, 2, 2, 1, 2, 0])
    if targets == "ignored":
        y[[0, 1, 2, 3, 5]] = -100
    if targets == "beyond":
        y[[0, 5, 6]] = 255
    if targets == "probabilities":
        y = draw(11, 3).softmax(1)
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    batches = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]
    gradient = torch.autograd.grad(loss(params, (x, y)), list(params.values()))
    kinds = (
        [hog.HessianOperator]
        if name.startswith("weights of log")
        else [hog.HessianOperator, hog.GGNOperator]
    )
    for kind in kinds:
        whole = kind(loss, params, (x, y)).to_dense()
        for data, options in ((batches, {}), ((x, y), {"micro_batch": 3})):
            found = kind(loss, params, data, **options)
            assert_close(found.to_dense(), whole)
            assert_close(tuple(found.gradient()[1].values()), gradient)
    each = hog.per_example_gradients(loss, params, (x, y))[1]
    assert_close(tuple(g.mean(0) for g in each.values()), gradient)
    flattened = torch.cat([g.flatten(1) for g in each.values()], 1)
    norms = hog.curvature.per_example_gradient_norms(loss, params, (x, y))
    assert_close(norms, flattened.norm(dim=1))
    noise = hog.curvature.gradient_noise_scale(loss, params, batches)
    assert_close(noise.variance, flattened.var(0).sum())
    if hog.GGNOperator not in kinds:
        return  # influence divides by this matrix, which is zero
    one, many = (
        hog.influence(loss, params, data, (x[4:5], y[4:5]), damping=0.1, solver="cg")
        for data in ((x, y), batches)
    )
    assert_close(many, one)


def test_a_mean_that_nobody_knows_is_refused_over_batches():
    model = nn.Linear(4, 3).double()
    params, x = hog.trainable_params(model), draw(8, 4)
    mask = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0], dtype=F64)[:, None]
    data = (x, draw(8, 3), mask)
    batches = [tuple(t[:4] for t in data), tuple(t[4:] for t in data)]
    loss = hog.functional_loss(model, masked, forward=lambda m, b: m(b[0]))
    for kind in (hog.HessianOperator, hog.GGNOperator, hog.KFACOperator):
        with pytest.raises(ValueError, match="mean divides by another number"):
            kind(loss, params, batches) @ draw(15)
    named = [{"x": b[0], "y": b[1], "mask": b[2]} for b in batches]
    of_dict = hog.functional_loss(
        model, lambda z, b: masked(z, tuple(b.values())), forward=lambda m, b: m(b["x"])
    )
    with pytest.raises(ValueError, match=r"lambda batch: len\(batch\['x'\]\)` weights batches"):
        hog.HessianOperator(of_dict, params, named) @ draw(15)
    H = hog.HessianOperator(loss, params, batches, batch_size=lambda batch: batch[2].sum())
    assert_close(H.to_dense(), hog.HessianOperator(loss, params, data).to_dense())
    with pytest.warns(UserWarning, match="loses its weight"):
        hog.per_example_gradients(loss, params, data)
    weighted = hog.functional_loss(model, nn.CrossEntropyLoss(weight=WEIGHTS))
    labels = [(x[:4], torch.tensor([0, 0, 1, 0])), (x[4:], torch.tensor([2, 2, 1, 2]))]
    with pytest.raises(ValueError, match=r"FisherOperator.*reduction='sum'"):
        hog.FisherOperator(weighted, params, labels, kind="empirical") @ draw(15)
    F_ = hog.FisherOperator(weighted, params, labels, likelihood="categorical")
    whole = hog.FisherOperator(
        weighted, params, (x, torch.cat([y for _, y in labels])), likelihood="categorical"
    )
    assert_close(F_.to_dense(), whole.to_dense())
    with pytest.raises(ValueError, match="a GGNOperator has the value"):
        F_.gradient()


def contrastive(o, t):
    return F.cross_entropy(o @ t.T, torch.arange(len(o)))


def pearson(o, t):
    a, b = o - o.mean(0), t - t.mean(0)
    return 1 - ((a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0) + 1e-9)).mean()


def redundancy(o, t):
    c = o - o.mean(0)
    return F.mse_loss(o, t) + (c.T @ c / len(o) - torch.eye(3)).square().sum()


COUPLED = {
    "contrastive": contrastive, "correlation": pearson, "mean and covariance": redundancy,
    "softmax over the batch": lambda o, t: -(o.log_softmax(0) * t.softmax(0)).sum(),
    "partial likelihood": lambda o, t: (o[:, 0].logcumsumexp(0) - o[:, 0]).mean(),
    "dice": lambda o, t: 1 - (o.sigmoid() * t.sigmoid()).sum() / (o.sigmoid().sum() + 1),
}  # fmt: skip
APART = {
    "squares": F.mse_loss, "own squares": lambda o, t: (o - t).square().mean(),
    "a sum": lambda o, t: (o - t).square().sum(), "sharp": lambda o, t: F.cross_entropy(o / 0.01, t.argmax(1)),
    "cosine": lambda o, t: 1 - F.cosine_similarity(o, t).mean(), "absolute": nn.L1Loss(),
    "divergence": lambda o, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "learned variance": lambda o, t: F.gaussian_nll_loss(o[:, 0], t[:, 0], o[:, 1].exp()),
}  # fmt: skip


@rows("dtype", [torch.float64, torch.float32])
@rows("name", [*COUPLED, *APART])
def test_criteria_that_couple_examples_have_none(name, dtype):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    loss = hog.functional_loss(model, {**COUPLED, **APART}[name])
    params, batch = hog.trainable_params(model), (draw(10, 4).to(dtype), draw(10, 3).to(dtype))
    options = {"reduction": "sum"} if name == "a sum" else {}
    each = {
        "gradients": lambda: hog.per_example_gradients(loss, params, batch),
        "norms": lambda: hog.curvature.per_example_gradient_norms(loss, params, batch),
        "noise": lambda: hog.curvature.gradient_noise_scale(loss, params, batch),
        "products": lambda: hog.curvature.per_example_gradient_products(loss, params, batch),
        "empirical": lambda: hog.fisher_vp(
            loss, params, params, batch, kind="empirical", **options
        ),
        "KFAC": lambda: hog.KFACOperator(loss, params, batch, kind="empirical", **options).update(),
    }
    for compute in each.values():
        if name in APART:
            compute()
        else:
            with pytest.raises(ValueError, match="couples"):
                compute()
    # the mean of batches is what it is
    data = [tuple(t[:5] for t in batch), tuple(t[5:] for t in batch)]
    hog.HessianOperator(loss, params, data, **options) @ draw(67).to(dtype)


def policy_loss(o, batch):
    return (D.Normal(o, 1.0).log_prob(batch["y"]).sum(-1) * batch["weight"]).mean()


def whole_batch(criterion):
    return lambda o, batch: criterion(o, batch["y"])


def squares_of_example(o, t):
    return (o - t).square().sum(1).mean() / 2


TERMS = {
    "a policy": (policy_loss, lambda o: D.Normal(o, 1.0), True),
    "a sum over coordinates": (whole_batch(squares_of_example), lambda o: D.Normal(o, 1.0), True),
    "the same by name": (whole_batch(squares_of_example), "gaussian", True),
    "another distribution": (whole_batch(squares_of_example), lambda o: D.Gumbel(o, 1.0), True),
    "one term": (policy_loss, lambda o: D.Independent(D.Normal(o, 1.0), 1), False),
    "terms that are asked for": (policy_loss, lambda o: D.Independent(D.Normal(o, 1.0), 0), False),
    "a vector": (policy_loss, lambda o: D.MultivariateNormal(o, torch.eye(3, dtype=F64)), False),
    "a mean of squares": (whole_batch(F.mse_loss), lambda o: D.Normal(o, 1.0), False),
    "a mean that is robust": (whole_batch(F.huber_loss), "gaussian", False),
    "a likelihood": (whole_batch(lambda o, t: -D.Normal(o, 1.0).log_prob(t).mean()), lambda o: D.Normal(o, 1.0), False),
}  # fmt: skip


@rows("name", TERMS)
def test_a_distribution_whose_coordinates_are_terms_is_told(name):
    criterion, likelihood, told = TERMS[name]
    model = nn.Linear(4, 3).double()
    loss = hog.functional_loss(model, criterion, forward=lambda m, batch: m(batch["x"]))
    params = hog.trainable_params(model)
    batch = {"x": draw(6, 4), "y": draw(6, 3), "weight": draw(6)}
    options = {"likelihood": likelihood, "kind": "mc" if "another" in name else "exact"}
    if told:
        with pytest.warns(UserWarning, match=r"matrix is 1/3 of.*Independent\(p, 1\)"):
            hog.fisher_vp(loss, params, params, batch, **options)
    hog.fisher_vp(loss, params, params, batch, **options)  # once


@rows("sharpness", [1.0, 20.0, 100.0])
@rows("dtype", [torch.float64, torch.float32])
def test_a_classifier_that_fits_all_examples(sharpness, dtype):
    """Its Hessian vanishes, and what is left is rounding, which says nothing of the criterion."""
    model = nn.Linear(4, 3, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.copy_(25 * torch.eye(3, 4))
    y = torch.arange(12) % 3
    x = F.one_hot(y, 4).to(dtype) + 0.1 * draw(12, 4).to(dtype)
    params = hog.trainable_params(model)
    for criterion in (
        lambda o, t: F.cross_entropy(o * sharpness, t),
        lambda o, t: -(o * sharpness).log_softmax(1).gather(1, t[:, None]).mean(),
    ):
        loss = hog.functional_loss(model, criterion)
        hog.KFACOperator(loss, params, (x, y)).update()
        hog.influence(loss, params, (x, y), (x[:1], y[:1]), damping=0.1)
        hog.HessianOperator(loss, params, (x, y)) @ torch.eye(12, dtype=dtype)
        hog.curvature.per_example_gradient_norms(loss, params, (x, y))
    criterion = lambda o, t: F.cross_entropy(o - o.mean(0), t) - 0.1 * o.cos().mean()  # noqa: E731
    mixed = hog.functional_loss(model, criterion)
    with pytest.raises(ValueError, match=r"couples|convex in the outputs"):
        hog.KFACOperator(mixed, params, (x, y)).update()


CLASSES = draw(3, 4, seed=9)


def cosine_logits(o, scale=30.0):
    return scale * F.normalize(o) @ F.normalize(CLASSES).to(o).T


def arcface(o, t, margin=0.3):
    angles = (cosine_logits(o, 0.999)).acos()
    return F.cross_entropy(16 * (angles + margin * F.one_hot(t, 3)).cos(), t)


def raw_variances(o, t):
    return F.gaussian_nll_loss(o[:, :2], t[:, None].expand(-1, 2).to(o), o[:, 2:].square() + 0.05)


def pairs(o, scale):
    logits = scale * F.normalize(o[:, :2]) @ F.normalize(o[:, 2:]).T
    own = torch.arange(len(o))
    return F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)


def nt_xent(o, scale=5.0):
    similar = scale * F.normalize(o) @ F.normalize(o).T
    own = torch.arange(len(o))
    return F.cross_entropy(similar - 1e3 * torch.eye(len(o)).to(o), own.roll(len(o) // 2))


def supervised_contrastive(o, t):
    similar, same = 5 * F.normalize(o) @ F.normalize(o).T, (t[:, None] == t).to(o)
    return (similar.logsumexp(1) - (similar * same).sum(1) / same.sum(1)).mean()


SINGLE = CLASSES.float()
NOT_CONVEX = {
    "cosine softmax": lambda o, t: F.cross_entropy(cosine_logits(o), t), "ArcFace": arcface,
    "a softmax with a temperature": lambda o, t: F.cross_entropy(o[:, :3] / (o[:, 3:].abs() + 0.1), t),
    "cosine distance": lambda o, t: 1 - F.cosine_similarity(o, CLASSES.to(o)[t]).mean(),
    "raw variances": raw_variances,
    "weights in float32": lambda o, t: F.cross_entropy(30 * F.normalize(o.float()) @ SINGLE.T, t),
}  # fmt: skip
NORMALISED_PAIRS = {
    "CLIP": lambda o, t: pairs(o, 10.0), "CLIP, cold": lambda o, t: pairs(o, 1.0),
    "NT-Xent": lambda o, t: nt_xent(o), "supervised contrastive": supervised_contrastive,
}  # fmt: skip
CONVEX = {
    "cross entropy": F.cross_entropy, "scaled logits": lambda o, t: F.cross_entropy(30 * o, t),
    "label smoothing": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1),
    "an additive margin": lambda o, t: F.cross_entropy(8 * (o - 0.3 * F.one_hot(t, 4)), t),
    "binary": lambda o, t: F.binary_cross_entropy_with_logits(o, F.one_hot(t, 4).to(o)),
    "Poisson": lambda o, t: (o.exp() - t[:, None] * o).mean(),
    "squares": lambda o, t: (o - F.one_hot(t, 4)).square().mean(),
    "log cosh": lambda o, t: (o - F.one_hot(t, 4)).cosh().log().mean(),
    "log-sum-exp": lambda o, t: (o.logsumexp(1) - o.gather(1, t[:, None])[:, 0]).mean(),
}  # fmt: skip


@rows("size", [0.3, 1.0, 6.0])
@rows("dtype", [torch.float64, torch.float32])
@rows("name", [*NOT_CONVEX, *NORMALISED_PAIRS, *CONVEX])
def test_kronecker_factors_are_of_convex_sums_over_examples(name, dtype, size):
    """At outputs of zero, normalised ones have an infinite Hessian: nothing is small beside it."""
    criterion = {**NOT_CONVEX, **NORMALISED_PAIRS, **CONVEX}[name]
    model = nn.Linear(3, 4).to(dtype)
    with torch.no_grad():
        model.weight.copy_(size * draw(4, 3, seed=5))
        model.bias.copy_(0.1 * draw(4, seed=6))
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    batch = (draw(8, 3, seed=3).to(dtype), torch.arange(8) % 3)
    outputs = model(batch[0]).detach().double()
    H = torch.autograd.functional.hessian(lambda o: criterion(o, batch[1]), outputs)
    of_examples = torch.stack([H[n, :, n] for n in range(8)])
    between = (H.square().sum() - of_examples.square().sum()).abs().sqrt() / H.norm()
    lowest = torch.linalg.eigvalsh(of_examples).min() / H.abs().max()
    doors = {
        "KFAC": lambda: hog.KFACOperator(loss, params, batch).update(),
        "drawn": lambda: hog.KFACOperator(loss, params, batch, kind="mc").update(),
        "EKFAC": lambda: hog.KFACOperator(loss, params, batch, eigenvalue_corrected=True).update(),
        "influence": lambda: hog.influence(loss, params, batch, batch, damping=0.1),
        "optimizer": lambda: hog.curvature.KFAC(loss, damping=1.0, lr=1e-9).step(batch),
    }
    if name in CONVEX:
        assert between < 1e-3
        exact = hog.KFACOperator(loss, params, batch).exact_diagonal()
        each = of_examples.diagonal(dim1=1, dim2=2)
        expected = torch.cat([(each.T @ batch[0].double().square()).flatten(), each.sum(0)])
        assert_close(exact.double(), expected, rtol=1e-3, atol=1e-5 * float(expected.max()))
        for compute in doors.values():
            compute()
        return
    coupled = name in NORMALISED_PAIRS
    assert between > 1e-2 if coupled else lowest < -1e-4
    words = r"couples them" if coupled else r"convex in the outputs.*in the model.*likelihood="
    for door, compute in doors.items():
        with pytest.raises(hog.errors.ArgumentValueError, match=words):
            compute()
        assert door == "optimizer" or torch.equal(model.weight, params["weight"])


def test_a_cosine_softmax_has_factors_of_its_logits_or_its_likelihood():
    """What the refusal advises, where one layer and one example make factors exact."""
    model, y = nn.Linear(3, 4, bias=False).double(), torch.tensor([1])
    params, batch = hog.trainable_params(model), (draw(1, 3), y)
    heads = {
        "forward": (
            lambda o, batch: F.cross_entropy(o, batch[1]),
            {"forward": lambda m, batch: cosine_logits(m(batch[0]))},
            {},
        ),
        "likelihood": (
            NOT_CONVEX["cosine softmax"],
            {},
            {"likelihood": lambda o: D.Categorical(logits=cosine_logits(o))},
        ),
    }
    J = torch.func.jacrev(lambda w: cosine_logits(batch[0] @ w.T)[0])(model.weight).detach()
    p = cosine_logits(model(batch[0])).softmax(1)[0].detach()
    expected = J.flatten(1).T @ (p.diag() - p.outer(p)) @ J.flatten(1)
    for criterion, made_by, options in heads.values():
        loss = hog.functional_loss(model, criterion, **made_by)
        K = hog.KFACOperator(loss, params, batch, kind="exact", **options)
        assert_close(K.to_dense(), expected)


def test_a_matrix_that_is_not_definite_says_what_is():
    model = nn.Linear(4, 2).double()
    loss = hog.functional_loss(model, lambda o, t: F.gaussian_nll_loss(o[:, 0], t, o[:, 1].exp()))
    params, batch = hog.trainable_params(model), (draw(3, 4), 5 * draw(3))
    with pytest.raises(ArithmeticError, match=r"not convex.*FisherOperator\(likelihood=\)"):
        hog.GGNOperator(loss, params, batch).solve(draw(10), damping=1e-6)
    normal = lambda o: D.Normal(o[:, 0], (o[:, 1] / 2).exp())  # noqa: E731
    F_ = hog.FisherOperator(loss, params, batch, likelihood=normal)
    assert torch.linalg.eigvalsh(F_.to_dense())[0] > -1e-12


def test_batch_norm_in_train_mode_is_named_once():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    x = draw(8, 3)
    data = [(x[:4], draw(4, 1)), (x[4:], draw(4, 1))]
    for make in (
        hog.HessianOperator,
        hog.GGNOperator,
        partial(hog.FisherOperator, kind="empirical"),
    ):
        operator = make(loss, params, data)
        words = r"normalises by the batch: 1 \(BatchNorm1d\).*model.eval"
        with pytest.warns(UserWarning, match=words):
            operator.gradient()
        operator.gradient()
        make(loss, params, data[0]).gradient()
    model.eval()
    hog.HessianOperator(loss, params, data).gradient()


def test_parameters_of_any_structure():
    x = draw(4)
    quadratic = lambda p, b: b * p.pow(3).sum()  # noqa: E731
    operator = hog.HessianOperator(
        quadratic, x, torch.tensor(2.0, dtype=F64), batch_size=lambda b: 1
    )
    assert_close(operator @ torch.ones(4, dtype=F64), 12 * x)
    nested = {"a": [x, (x[:2] * 2)]}
    func = lambda p, b: (p["a"][0].pow(3).sum() + p["a"][1].pow(4).sum()) * b.mean()  # noqa: E731
    operator = hog.HessianOperator(func, nested, torch.ones(5, dtype=F64))
    product = operator @ {"a": [torch.ones_like(x), torch.ones_like(x[:2])]}
    assert_close(product["a"], [6 * x, 12 * (2 * x[:2]) ** 2])


def test_algebra():
    loss, params, batch = problem("layers of hoglib")
    H, G = hog.HessianOperator(loss, params, batch), hog.GGNOperator(loss, params, batch)
    A, B = H.to_dense(), G.to_dense()
    eye = torch.eye(len(A), dtype=F64)
    cases = {
        "H + G": A + B, "H - G": A - B, "2 * H": 2 * A, "H * 2": 2 * A, "H / 4": A / 4, "-H": -A,
        "H.damped(0.5)": A + 0.5 * eye, "3 * (H - 2 * G).damped(0.1)": 3 * (A - 2 * B + 0.1 * eye),
        "(H + G).T": A + B, "H * torch.tensor(2.0)": 2 * A, "H @ G": A @ B, "(H @ G).T @ H": B @ A @ A,
        "H @ G + G": A @ B + B, "sum([H @ G, H])": A @ B + A, "(H @ G / 2 - 3 * H).T": B @ A / 2 - 3 * A,
        "-(H @ G) @ (H - H @ G)": -A @ B @ (A - A @ B), "np.float64(2) * (G @ H)": 2 * B @ A,
    }  # fmt: skip
    for text, expected in cases.items():
        assert_close(eval(text).to_dense(), expected)
    assert_close(A[0] @ (H @ G + H), A[0] @ (A @ B + A))
    other = hog.HessianOperator(*problem("LayerNorm"))
    for call, kind, message in [
        (lambda: H + other, ValueError, "same names"),
        (lambda: H + 1, TypeError, r"damped\(number\)"),
        (lambda: (H @ G).trace(), NotImplementedError, "expected a symmetric operator"),
        (lambda: H * "2", TypeError, "factor"),
        (lambda: H * G, TypeError, "factor: .*a product is A @ v"),
        (lambda: 2 / H, TypeError, "c / A: .*solve"),
        (lambda: 1 - H @ G, TypeError, "A . B: expected an operator, got int 1"),
        (lambda: A.numpy() @ H, TypeError, "array of shape"),
        (lambda: A @ H, TypeError, r"v @ A: expected one vector.*\(A.T @ V.T\).T"),
        (lambda: (H @ G + G).trace(), NotImplementedError, "expected a symmetric operator"),
        (
            lambda: hog.HessianOperator(A, *problem("LayerNorm")[1:]),
            TypeError,
            "loss: expected a function",
        ),
    ]:
        with pytest.raises(kind, match=message):
            call()


# What is kept between products, and when it is not


class Counts(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x):
        self.calls += 1
        return self.model(x)


def counted(listed=False, **options):
    """An operator, and its model, which counts its runs. listed: the batch is in a list of one."""
    loss, _, batch = problem("layers of hoglib")
    model = Counts(loss.model)
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    data = [batch] if listed else batch
    H = hog.HessianOperator(loss, params, data, check_deterministic=False, **options)
    return H, model


def test_a_list_of_one_batch_that_grows():
    loss, params, batch = problem("layers of hoglib")
    data = [batch]
    operator = hog.HessianOperator(loss, params, data)
    operator @ draw(operator.shape[0])
    data.append(batch)
    with pytest.raises(ValueError, match="got 2 batches in it now"):
        operator @ draw(operator.shape[0])


def test_one_batch_is_run_once():
    for listed in (False, True):
        operator, model = counted(listed)
        v = draw(operator.shape[0])
        first = operator @ v
        for _ in range(3):
            assert_close(operator @ v, first)
        assert model.calls == 1
    fresh, model = counted(memory_limit=0)
    for _ in range(3):
        assert_close(fresh @ v, first)
    assert model.calls == 3


def change(model, how):
    """Parameters that move in one of the ways, some past pointers and version counters."""
    weight = model.model[0].weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(1.5)
        elif how == "past autograd":
            weight.data.mul_(1.5)
        elif how == "by NumPy":
            weight.detach().numpy()[:] *= 1.5
        elif how == "by a new storage":
            weight.data = weight.data * 2
        elif how == "of sum and norm zero":
            weight.copy_(weight.flip(0))
        elif how == "from a checkpoint":
            model.load_state_dict({n: 1.3 * t for n, t in model.state_dict().items()})
        elif how == "by a fused optimizer":
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()


# name -> changes the model, the dict of its parameters, and the batch
CHANGES = {
    **{
        how: lambda model, params, batch, how=how: change(model, how)
        for how in ("in place", "past autograd", "by NumPy", "by a new storage", "of sum and norm zero", "from a checkpoint", "by a fused optimizer")
    },
    "another tensor in the dict": lambda model, params, batch: params.update({"model.0.weight": 2 * params["model.0.weight"].detach()}),
    "another activation": lambda model, params, batch: setattr(model.model, "1", nn.Sigmoid()),
    "a hook": lambda model, params, batch: model.model[0].register_forward_hook(lambda *given: 2 * given[-1]),
    "another forward": lambda model, params, batch: setattr(model.model[0], "forward", lambda x, last=model.model[0].forward: 2 * last(x)),
    "eval mode": lambda model, params, batch: model.eval(),
    "data in place": lambda model, params, batch: batch[0].mul_(2),
    "data past autograd": lambda model, params, batch: batch[0].data.mul_(2),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*normalises by the batch")
@rows("several", [False, True], ids=["one batch", "batches"])
@rows("name", CHANGES)
@rows("make", [hog.HessianOperator, hog.GGNOperator])
def test_a_kept_graph_is_dropped_when_something_changes(make, name, several):
    torch.manual_seed(2)
    inside = [nn.BatchNorm1d(4)] if name == "eval mode" else []
    model = Counts(nn.Sequential(nn.Linear(3, 4), *inside, nn.Tanh(), nn.Linear(4, 3)).double())
    loss = hog.functional_loss(model, F.cross_entropy)
    params, batch = hog.trainable_params(model), (draw(6, 3), torch.arange(6) % 3)
    given = [batch, batch] if several else batch
    operator = make(loss, params, given, check_deterministic=not (several and "data" in name))
    v = draw(operator.shape[0])
    before = operator @ v
    CHANGES[name](model, params, batch)
    after = operator @ v  # before another forward counts
    fresh = make(loss, params, batch) @ v
    assert_close(after, fresh)
    assert relative(before, fresh) > 1e-3


def checkpointed(again):
    body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Tanh())
    return Checkpointed(body, nn.Linear(4, 3), again).double()


@rows(("make", "oracle"), [(hog.HessianOperator, dense_hessian), (hog.GGNOperator, dense_ggn)])
def test_a_kept_graph_through_a_checkpoint(make, oracle):
    # what backward runs again must find the parameters of the point, not the model's own
    there, here = (checkpointed(again) for again in (False, True))
    params = {n: p.detach().clone() for n, p in there.named_parameters()}
    batch = (draw(5, 3), torch.arange(5) % 3)
    A = oracle(hog.functional_loss(there, F.cross_entropy), params, batch)
    loss = hog.functional_loss(here, F.cross_entropy)
    operator, own = make(loss, params, batch), dict(here.named_parameters())
    for seed in range(3):
        v = draw(len(A), seed=seed)
        assert relative(operator @ v, A @ v) < 1e-7
        assert all(p is own[n] for n, p in here.named_parameters())
    if make is hog.GGNOperator:
        tree = operator.space.tree(v)
        assert relative(flat(hog.ggn_vp(loss, params, tree, batch)[1]), A @ v) < 1e-7


def test_the_memory_limit_is_in_bytes_of_the_graph():
    loss, params, batch = problem("layers of hoglib")
    for limit, evaluations in ((10**6, 0), (10**2, 1)):
        counted = []
        func = lambda p, b: [counted.append(b), loss(p, b)][1]  # noqa: B023, E731
        operator = hog.HessianOperator(func, params, batch, memory_limit=limit)
        operator @ draw(operator.shape[0])
        counted.clear()
        operator @ draw(operator.shape[0])
        assert len(counted) == evaluations


def test_the_kept_graph_is_freed_with_the_operator():
    seen = []

    def watched(net, x):
        y = net.linear(x).sin()
        seen.append(weakref.ref(y))
        return y

    model = Fn(watched, linear=nn.Linear(3, 3, dtype=F64))
    loss = hog.functional_loss(model, F.cross_entropy)
    batch = draw(5, 3), torch.arange(5) % 3
    operator = hog.HessianOperator(loss, hog.trainable_params(loss.model), batch)
    operator @ draw(12)
    seen.append(weakref.ref(operator))
    del operator
    assert all(ref() is None for ref in seen)


# What is noticed


def random_model(layer):
    return nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 3)).double()


def noise():
    return Fn(lambda net, x: x + net.off(torch.randn_like(x)), off=nn.Dropout(0.0))


class NumPyNoise(nn.Module):
    def forward(self, x):
        return x + np.random.randn()


def repeat(operator, times):
    for seed in range(times):
        operator @ draw(operator.shape[0], seed=seed)


BATCH = (draw(8, 3), torch.arange(8) % 3)
PASSES = {"one batch": BATCH, "a loader": loader(BATCH), "micro-batches": BATCH}


@rows("given", PASSES)
@rows(
    ("layer", "message"),
    [
        (partial(nn.Dropout, 0.5), r"1 \(Dropout\) draws at random in train mode.*model.eval"),
        (noise, r"numbers are drawn at .*test_operators.py:\d+: `return .*x \+ net.off\(torch.randn_like\(x\)\).*check_deterministic=False"),
        (NumPyNoise, "draws random numbers outside of torch"),
    ],
    ids=["dropout", "noise beside a dropout of 0", "noise of NumPy"],
)  # fmt: skip
def test_a_random_model_raises(layer, message, given):
    loss = hog.functional_loss(random_model(layer()), F.cross_entropy)
    options = {"micro_batch": 3} if given == "micro-batches" else {}
    operator = hog.HessianOperator(loss, hog.trainable_params(loss.model), PASSES[given], **options)
    v = draw(operator.shape[0])
    if options and layer is NumPyNoise:
        message = "micro_batch: expected a loss that is the mean"
    with pytest.raises((RuntimeError, ValueError), match=message):
        repeat(operator, 2)
    loss.model.eval()
    if layer not in (noise, NumPyNoise):
        assert_close(operator @ v, operator @ v)


def test_a_random_model_is_let_be_if_that_is_asked_for():
    loss = hog.functional_loss(random_model(nn.Dropout(0.5)), F.cross_entropy)
    params = hog.trainable_params(loss.model)
    operator = hog.HessianOperator(loss, params, loader(BATCH), check_deterministic=False)
    v = draw(operator.shape[0])
    assert relative(operator @ v, operator @ v) > 1e-3


class Augmented:
    """A loader whose batches are different at every pass."""

    def __iter__(self):
        yield BATCH[0] + 0.1 * torch.randn(8, 3, dtype=F64), BATCH[1]


SEED = torch.Generator()
DIFFERENT_PASSES = {
    "shuffled, with batch norm": (nn.BatchNorm1d(8), loader(BATCH, shuffle=True, generator=SEED), r"same examples, shuffled.*1 \(BatchNorm1d\) in train mode"),
    "shuffled, with dropout": (nn.Dropout(0.5), loader(BATCH, shuffle=True), r"1 \(Dropout\) draws at random"),
    "augmented": (nn.Tanh(), Augmented(), "data differs from pass to pass.*augmentation"),
    "dropped examples": (nn.Tanh(), loader(BATCH, shuffle=True, drop_last=True, generator=SEED), "shuffle=True with drop_last=True"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*normalises by the batch")
@rows("case", DIFFERENT_PASSES)
def test_passes_that_differ_raise(case):
    layer, given, message = DIFFERENT_PASSES[case]
    SEED.manual_seed(0)
    loss = hog.functional_loss(random_model(layer), F.cross_entropy)
    operator = hog.HessianOperator(loss, hog.trainable_params(loss.model), given)
    with pytest.raises(RuntimeError, match=message):
        repeat(operator, 9)


def test_micro_batches_are_refused_where_examples_mix():
    loss = hog.functional_loss(random_model(nn.BatchNorm1d(8)), F.cross_entropy)
    operator = hog.HessianOperator(loss, hog.trainable_params(loss.model), BATCH, micro_batch=4)
    with pytest.raises(ValueError, match="BatchNorm in train mode mixes examples"):
        operator @ draw(operator.shape[0])
    criterion = partial(F.cross_entropy, reduction="sum")
    summed = hog.functional_loss(random_model(nn.Tanh()), lambda o, y: criterion(o, y))
    operator = hog.HessianOperator(summed, hog.trainable_params(summed.model), BATCH, micro_batch=4)
    with pytest.raises(ValueError, match=r"got their sum.*reduction='sum'"):
        operator @ draw(operator.shape[0])


# sin, whose backward makes the second derivative of half the size, and only in one order.
Halved = made(
    "Halved",
    lambda x, w: torch.sin(x) * w,
    lambda g, x, w: (g * torch.cos(x) * w.detach(), g * torch.sin(x)),
)


def test_rounding_of_float32_is_no_asymmetry():
    a, v, w = (draw(50, seed=i).float() for i in range(3))
    near = a + 1e-6 * draw(50, seed=3).float()
    square = lambda a, p: (a * p["w"]).sum() ** 2 / 2  # noqa: E731
    # a a^T - b b^T, whose products cancel; they are compared in float64
    operator = hog.HessianOperator(
        lambda p, _: square(a, p) - square(near, p), {"w": torch.ones(50)}, torch.ones(1)
    )
    assert (operator @ torch.stack([v, w], 1)).isfinite().all()


@pytest.mark.filterwarnings("ignore:.*from a central difference")
def test_an_asymmetric_matrix_warns():
    params = {"x": draw(4), "w": draw(4, seed=1)}
    func = lambda p, b: (Halved.apply(p["x"], p["w"]) * b).sum()  # noqa: E731
    operator = hog.HessianOperator(func, params, draw(4, seed=2))
    symmetry = pytest.warns(UserWarning, match=r"expected a symmetric matrix.*hoglib\.verify")
    with hog.second_order(on_wrong="ignore"), symmetry:
        repeat(operator, 2)


def test_parameters_that_the_loss_does_not_use_are_named():
    params = {"used": draw(3), "idle": draw(2), "late": draw(2)}
    func = lambda p, b: p["used"].pow(3).sum() * b[0].mean() + (p["late"].pow(2).sum() if b[0].mean() > 1 else 0)  # noqa: E731  # fmt: skip
    operator = hog.HessianOperator(
        func, params, [(torch.ones(3, 1, dtype=F64),), (torch.full((2, 1), 2.0, dtype=F64),)]
    )
    with pytest.warns(UserWarning, match="does not depend on idle;.*singular"):
        product = operator @ torch.ones(7, dtype=F64)
    assert_close(product[3:5], torch.zeros(2, dtype=F64))
    operator @ torch.ones(7, dtype=F64)  # once is enough


# What is refused


def at_second_batch(x):
    return [(draw(3, 3), torch.arange(3)), (x, torch.arange(3))]


NAN = draw(3, 3).index_fill(0, torch.tensor([1]), torch.nan)
REFUSED = {
    "an empty loader": (lambda loss, p: hog.HessianOperator(loss, p, []), ValueError, "at least one batch, got none"),
    "an empty batch": (lambda loss, p: hog.HessianOperator(loss, p, (draw(0, 3), torch.arange(0))), ValueError, "at least one example"),
    "NaN in the data": (lambda loss, p: hog.HessianOperator(loss, p, at_second_batch(NAN)), FloatingPointError, "at batch 1, which holds NaN"),
    "NaN in the data of an algorithm": (lambda loss, p: hog.HessianOperator(loss, p, (NAN, torch.arange(3))).eigsh(1), FloatingPointError, "at batch 0, which holds NaN"),
    "NaN in the parameters": (lambda loss, p: hog.HessianOperator(loss, {**p, "0.weight": p["0.weight"] * torch.nan}, BATCH), FloatingPointError, "got nan at batch 0. Look"),
    "a loader used up": (lambda loss, p: hog.HessianOperator(loss, p, iter(loader(BATCH))), TypeError, r"iterated again.*list\(\.\.\.\)"),
    "a dataset": (lambda loss, p: hog.HessianOperator(loss, p, TensorDataset(*BATCH)), TypeError, "DataLoader"),
    "a number": (lambda loss, p: hog.HessianOperator(loss, p, 3), TypeError, "expected a batch"),
    "a batch of no size": (lambda loss, p: hog.HessianOperator(loss, p, [{"size": 3}] * 2), TypeError, "batch_size="),
    "an unknown reduction": (lambda loss, p: hog.HessianOperator(loss, p, BATCH, reduction="none"), ValueError, "mean, sum"),
    "no micro-batch": (lambda loss, p: hog.HessianOperator(loss, p, BATCH, micro_batch=0), ValueError, "at least 1"),
    "complex parameters": (lambda loss, p: hog.HessianOperator(loss, {"w": draw(2).cfloat()}, BATCH), TypeError, "real"),
    "parameters on two devices": (lambda loss, p: hog.HessianOperator(loss, {"a": draw(2), "b": torch.ones(2, device="meta")}, BATCH), ValueError, "expected device cpu"),
    "a loss in one piece": (lambda loss, p: hog.GGNOperator(lambda p, b: 0, p, BATCH), TypeError, "functional_loss"),
    "an unknown kind": (lambda loss, p: hog.FisherOperator(loss, p, BATCH, kind="true"), ValueError, "exact, mc, empirical"),
}  # fmt: skip


def plainly():
    loss = hog.functional_loss(random_model(nn.Tanh()), F.cross_entropy)
    return loss, hog.trainable_params(loss.model)


test_errors_say_what_to_do = refused(REFUSED, lambda make: repeat(make(*plainly()), 1))
VECTORS = {
    "too short": (lambda n: draw(n - 1), ValueError, r"expected \(59,\), \(59, k\).*got \(58,\)"),
    "a row": (lambda n: draw(1, n), ValueError, r"got \(1, 59\)"),
    "float32": (lambda n: draw(n).float(), TypeError, r"\.to\(torch\.float64\)"),
    "an array": (lambda n: draw(n).numpy(), TypeError, r"from_numpy.*to_scipy"),
    "a list": (lambda n: [1.0] * n, ValueError, "structure of params"),
    "a leaf transposed": (lambda n: {"0.weight": draw(3, 8), "0.bias": draw(8), "2.weight": draw(3, 8), "2.bias": draw(3)}, ValueError, r"v\['0.weight'\]: expected \(8, 3\), got \(3, 8\)"),
}  # fmt: skip


def by_vector(make):
    operator = hog.HessianOperator(*plainly(), BATCH)
    return operator @ make(operator.shape[0])


test_vectors_that_do_not_fit = refused(VECTORS, by_vector)


def test_a_product_that_is_not_finite_names_the_parameter():
    params = {"a": draw(2), "b": torch.zeros(2, dtype=F64)}
    func = lambda p, x: (p["a"].pow(2).sum() + p["b"].abs().pow(1.5).sum()) * x.mean()  # noqa: E731
    operator = hog.HessianOperator(func, params, draw(3))
    with pytest.raises(FloatingPointError, match="NaN or infinity in b, where the loss is finite"):
        operator @ torch.ones(4, dtype=F64)


def test_inside_a_transform_it_refers_to_the_function():
    operator = hog.HessianOperator(*problem("LayerNorm"))
    block = draw(3, operator.shape[0])
    with pytest.raises(NotImplementedError, match="hvp or ggn_vp there"):
        torch.func.vmap(lambda v: operator @ v)(block)


@rows("kept", [True, False])
def test_an_error_leaves_everything_as_it_was(kept):
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.left = nn.Linear(3, 3, dtype=F64), 1

        def forward(self, x):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return self.linear(x)

    model = Breaks()
    own = dict(model.named_parameters())
    loss = hog.functional_loss(model, F.cross_entropy)
    data = BATCH if kept else loader(BATCH)
    operator = hog.HessianOperator(loss, hog.trainable_params(model), data)
    with pytest.raises(KeyboardInterrupt):
        repeat(operator, 3)
    assert dict(model.named_parameters()) == own
    assert all(p.requires_grad and p.grad is None for p in own.values())
    model.left = 100
    assert relative(operator @ draw(12), dense_hessian(loss, hog.trainable_params(model), BATCH) @ draw(12)) < 1e-7  # fmt: skip


def test_sampled_fisher_matrices_are_one_matrix():
    loss, params, batch = problem("layers of hoglib")
    options = {"kind": "mc", "num_samples": 3}
    for given in (batch, loader(batch)):
        random = torch.Generator().manual_seed(4)
        operator = hog.FisherOperator(loss, params, given, generator=random, **options)
        A = operator.to_dense()
        v = draw(len(A))
        assert_close(operator @ v, A @ v)
        again = hog.FisherOperator(loss, params, given, generator=random.manual_seed(4), **options)
        assert_close(again.to_dense(), A)
        other = hog.FisherOperator(loss, params, given, generator=random.manual_seed(5), **options)
        assert relative(other.to_dense(), A) > 0.01


def test_a_bar_counts_products(capsys):
    loss, params, batch = problem("layers of hoglib")
    operator = hog.HessianOperator(loss, params, loader(batch), progress=True)
    operator @ draw(operator.shape[0], 4)
    operator.trace(3, generator=torch.Generator().manual_seed(0))
    shown = capsys.readouterr().err
    assert "HessianOperator @:" in shown
    assert "HessianOperator trace:" in shown
    hog.HessianOperator(loss, params, batch) @ draw(operator.shape[0])
    assert not capsys.readouterr().err


def test_differences_see_the_loss_of_other_passes_in_float32():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    batch = torch.randn(32, 8), torch.arange(32) % 3
    H = hog.HessianOperator(loss, params, batch, mode="finite-differences")
    v = torch.randn(H.shape[0])
    assert H.value().dtype == torch.float32
    product = H @ v  # computed in float64, the loss too
    assert_close(H.gradient()[0], H.value())
    assert_close(product, hog.HessianOperator(loss, params, batch) @ v, rtol=1e-4, atol=1e-6)


def test_an_algorithm_compares_the_state_once_for_several_products_of_a_kept_graph(monkeypatch):
    loss, params, batch = problem("layers of hoglib")
    compared, now = [], StateFingerprint.now
    monkeypatch.setattr(
        StateFingerprint, "now", lambda self, **how: [compared.append(how), now(self, **how)][1]
    )
    for limit, every in ((2**31, 8), (0, 1)):
        operator = hog.HessianOperator(loss, params, batch, memory_limit=limit)
        compared.clear()
        operator.eigsh(1)
        assert operator.count > 16
        assert operator.count // every <= len(compared) <= operator.count // every * 2 + 4


@pytest.mark.parametrize("how", ["in place", "by .data"])
def test_parameters_that_change_while_an_algorithm_runs(how, monkeypatch):
    """Their values, which take time for each number, are compared at its start and at its end."""
    loss, params, batch = problem("layers of hoglib")
    operator = hog.HessianOperator(loss, params, batch)
    p, apply, calls = next(iter(params.values())), operator.apply, []

    def changing(rows):
        calls.append(rows)
        if len(calls) == 3:
            with torch.no_grad():
                (p if how == "in place" else p.data).mul_(1.5)
        return apply(rows)

    operator.eigsh(1)
    with monkeypatch.context() as patch:
        patch.setattr(operator, "apply", changing)
        with pytest.raises(NondeterministicError, match=r"eigsh: expected parameters, .* the same"):
            operator.eigsh(1)
    after = operator.eigsh(1).values  # of the matrix at the parameters as they are now
    assert_close(after, hog.HessianOperator(loss, params, batch).eigsh(1).values)
