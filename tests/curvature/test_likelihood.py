"""The output-space Fisher matrix against closed forms, Hessians of the criterion, loops and sampling."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature.maps.fisher_metric import FisherMetric, fisher_metric
from hoglib.curvature.maps.likelihood import CRITERIA, FAMILIES
from tests.refused import refused
from tests.rows import rows

leaves_of = torch.utils._pytree.tree_leaves
DTYPES = [torch.float32, torch.float64]
TARGETS = torch.tensor([0, 2, 1, 2])


def loss_of(criterion):
    return hog.functional_loss(nn.Identity(), criterion)


def metric(
    kind, outputs, *, criterion=None, targets=None, likelihood=None, reduction="mean",
    num_samples=1, generator=None,
):  # fmt: skip
    loss = None if criterion is None else loss_of(criterion)
    options = FisherMetric(kind, likelihood, reduction, num_samples, generator)
    return fisher_metric(options, loss, outputs, (outputs, targets))


def dense(M, outputs):
    """The whole matrix, a column for each entry of each floating-point leaf."""
    leaves = [x for x in leaves_of(outputs) if torch.is_tensor(x) and x.is_floating_point()]
    columns = []
    for i, leaf in enumerate(leaves):
        for entry in range(leaf.numel()):
            unit = [torch.zeros_like(x) for x in leaves]
            unit[i].view(-1)[entry] = 1
            columns.append(torch.cat([x.reshape(-1) for x in M(unit)]))
    return torch.stack(columns, 1)


def hessian_of(criterion, outputs, targets):
    size = outputs.numel()
    f = lambda x: criterion(x, targets)  # noqa: E731
    return torch.autograd.functional.hessian(f, outputs).reshape(size, size)


def logits(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


# exact


CLOSED = {
    "categorical": lambda f: torch.block_diag(*[p.diag() - p.outer(p) for p in f.softmax(1)]),
    "bernoulli": lambda f: (f.sigmoid() * (1 - f.sigmoid())).reshape(-1).diag(),
    "gaussian": lambda f: torch.eye(f.numel(), dtype=f.dtype),
    "poisson": lambda f: f.exp().reshape(-1).diag(),
}


@rows("dtype", DTYPES)
@rows("reduction", ["mean", "sum"])
@rows("route", ["closed form", "divergence"])
@rows("name", FAMILIES)
def test_exact_equals_the_closed_form(name, route, reduction, dtype):
    f = logits(4, 3, dtype=dtype)
    likelihood = name if route == "closed form" else FAMILIES[name].distribution
    M = metric("exact", f, likelihood=likelihood, reduction=reduction)
    terms = 4 if name == "categorical" else 12
    expected = CLOSED[name](f) / (terms if reduction == "mean" else 1)
    assert dense(M, f).dtype == dtype
    assert_close(dense(M, f), expected)


EXTREME = torch.tensor([[100.0, -100.0, 0.0, 99.0], [30.0, 80.0, -100.0, -30.0]])


@rows("dtype", DTYPES)
@rows("route", ["closed form", "divergence"])
@rows("name", ["categorical", "bernoulli", "gaussian", "poisson"])
def test_exact_at_extreme_logits(name, route, dtype):
    f = EXTREME.to(dtype) if name != "poisson" else EXTREME.to(dtype).clamp(-80, 80)
    likelihood = name if route == "closed form" else FAMILIES[name].distribution
    found = dense(metric("exact", f, likelihood=likelihood, reduction="sum"), f)
    expected = CLOSED[name](f.double())
    if name == "bernoulli":  # 1 - p cancels
        expected = (f.double().sigmoid() * (-f.double()).sigmoid()).reshape(-1).diag()
    assert_close(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-9, atol=1e-6)
    assert_close(found.diag().double(), expected.diag(), rtol=1e-4, atol=1e-30)


def test_a_rate_of_zero_is_zero_in_closed_form_and_refused_by_divergence():
    f = torch.tensor([-200.0, 0.0])  # exp(-200) is 0 in float32
    assert_close(
        dense(metric("exact", f, likelihood="poisson", reduction="sum"), f), f.exp().diag()
    )
    M = metric("mc", f, likelihood="poisson", num_samples=3)
    assert dense(M, f).isfinite().all()
    with pytest.raises(NotImplementedError, match=r"twice differentiable.*closed form"):
        metric("exact", f, likelihood=lambda f: D.Poisson(f.exp()))


MASKED = torch.tensor([0, -100, 1, 2])
IN_ROWS = torch.tensor([[0, 1, -100, 2, 2], [1, -100, -100, 0, 1]])
COUNTS = torch.tensor([[0.0, 1, 2], [3, 0, 1], [1, 2, 0], [4, 0, 0]], dtype=torch.float64)
BITS = (COUNTS > 0).double()
CANONICAL = {
    "cross_entropy": (F.cross_entropy, (4, 3), TARGETS),
    "of one example": (F.cross_entropy, (3,), torch.tensor(1)),
    "with ignored targets": (F.cross_entropy, (4, 3), MASKED),
    "labels [N, L]": (F.cross_entropy, (2, 3, 5), IN_ROWS),
    "another ignore_index": (partial(F.cross_entropy, ignore_index=2), (4, 3), TARGETS),
    "class probabilities": (F.cross_entropy, (4, 3), torch.full((4, 3), 1 / 3).double()),
    "nn.CrossEntropyLoss": (nn.CrossEntropyLoss(ignore_index=1), (2, 3, 5), IN_ROWS.clamp(0)),
    "hoglib.ops": (hog.ops.softmax_cross_entropy, (4, 3), MASKED),
    "hoglib.nn": (hog.nn.CrossEntropyLoss(ignore_index=0), (4, 3), TARGETS),
    "mse_loss": (F.mse_loss, (4, 3), COUNTS),
    "nn.MSELoss": (nn.MSELoss(), (4, 3), COUNTS),
    "hoglib.ops.mse_loss": (hog.ops.mse_loss, (4, 3), COUNTS),
    "bce": (F.binary_cross_entropy_with_logits, (4, 3), BITS),
    "nn.BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), (4, 3), BITS),
    "poisson_nll_loss": (F.poisson_nll_loss, (4, 3), COUNTS),
    "nn.PoissonNLLLoss": (nn.PoissonNLLLoss(full=True), (4, 3), COUNTS),
}


def summed(criterion):
    """The same criterion with reduction "sum"."""
    if isinstance(criterion, nn.Module):
        names = [name for name in ("ignore_index", "full") if hasattr(criterion, name)]
        options = {name: getattr(criterion, name) for name in names}
        return type(criterion)(reduction="sum", **options)
    return partial(criterion, reduction="sum")


@rows("reduction", ["mean", "sum"])
@rows("name", CANONICAL)
def test_exact_of_a_canonical_criterion_is_its_hessian(name, reduction):
    criterion, shape, targets = CANONICAL[name]
    criterion = criterion if reduction == "mean" else summed(criterion)
    f = logits(*shape)
    M = metric("exact", f, criterion=criterion, targets=targets, reduction=reduction)
    assert_close(dense(M, f), hessian_of(criterion, f, targets))


@rows("kind", ["exact", "mc"])
def test_nll_loss_is_cross_entropy_behind_log_softmax(kind):
    z = logits(4, 3)
    J = torch.autograd.functional.jacobian(lambda z: z.log_softmax(1), z).reshape(12, 12)
    options = {"kind": kind, "targets": MASKED, "num_samples": 3}
    torch.manual_seed(1)
    M = dense(metric(outputs=z.log_softmax(1), criterion=nn.NLLLoss(), **options), z)
    torch.manual_seed(1)
    expected = dense(metric(outputs=z, criterion=nn.CrossEntropyLoss(), **options), z)
    assert_close(J.T @ M @ J, expected)


def heteroscedastic(outputs):
    return D.Normal(outputs["mean"], outputs["log_std"].exp())


def pair(dtype=torch.float64):
    return {
        "log_std": logits(4, 2, dtype=dtype),
        "mean": logits(4, 2, dtype=dtype),
        "seen": torch.ones(4, dtype=torch.long),
    }


@rows("dtype", DTYPES)
def test_a_likelihood_of_several_outputs(dtype):
    outputs = pair(dtype)
    M = metric("exact", outputs, likelihood=heteroscedastic, reduction="sum")
    variance = (2 * outputs["log_std"]).exp().reshape(-1)
    expected = torch.cat([torch.full_like(variance, 2), 1 / variance]).diag()
    assert_close(dense(M, outputs), expected)
    one_term = lambda outputs: D.Independent(heteroscedastic(outputs), 1)  # noqa: E731
    # 4 terms of two numbers each instead of 8 terms
    assert_close(dense(metric("exact", outputs, likelihood=one_term), outputs), expected / 4)
    assert_close(dense(metric("exact", outputs, likelihood=heteroscedastic), outputs), expected / 8)


# empirical


@rows("reduction", ["mean", "sum"])
@rows("name", ["cross_entropy", "nn.MSELoss", "labels [N, L]", "bce"])
def test_empirical_is_a_loop_over_examples(name, reduction):
    criterion, shape, targets = CANONICAL[name]
    if name == "labels [N, L]":  # the mean over all is the mean over examples
        targets = targets.clamp(0)
    criterion = criterion if reduction == "mean" else summed(criterion)
    f = logits(*shape)
    M = dense(metric("empirical", f, criterion=criterion, targets=targets, reduction=reduction), f)
    score = torch.func.grad(criterion)
    scores = [score(f[n : n + 1], targets[n : n + 1]).flatten() for n in range(len(f))]
    expected = torch.block_diag(*(d.outer(d) for d in scores))
    assert_close(M, expected / len(f) if reduction == "mean" else expected)


def test_empirical_of_several_outputs_is_one_block_an_example():
    outputs, targets = pair(), logits(4, 2)
    criterion = lambda o, y: -heteroscedastic(o).log_prob(y).mean()  # noqa: E731
    M = dense(metric("empirical", outputs, criterion=criterion, targets=targets), outputs)
    s = outputs["log_std"].exp()
    d = (outputs["mean"] - targets) / s
    both = torch.stack([1 - d**2, d / s], 1) / 8  # [example, leaf, entry]
    expected = torch.zeros(2, 4, 2, 2, 4, 2, dtype=torch.float64)
    for n in range(4):
        expected[:, n, :, :, n] = 4 * torch.einsum("ai,bj->aibj", both[n], both[n])
    assert_close(M, expected.reshape(16, 16))


def test_empirical_of_one_example_is_one_block():
    f = logits(3)
    d = f.softmax(0) - torch.tensor([0.0, 1, 0])
    M = metric("empirical", f, criterion=F.cross_entropy, targets=torch.tensor(1))
    assert_close(dense(M, f), d.outer(d))


# Monte Carlo


SAMPLED = {
    "categorical": ("categorical", (4, 3)),
    "categorical of one example": ("categorical", (3,)),
    "categorical [N, C, L]": ("categorical", (2, 3, 2)),
    "bernoulli": ("bernoulli", (2, 2)),
    "gaussian": ("gaussian", (2, 2)),
    "poisson": ("poisson", (2, 2)),
    "a function": (lambda f: D.Normal(f, 2.0), (2, 2)),
    "without a divergence": (lambda f: D.NegativeBinomial(3.0, logits=f), (2, 2)),
    "one term": (lambda f: D.MultivariateNormal(f.reshape(-1), 2 * torch.eye(4).double()), (2, 2)),
    "terms that mix examples": (lambda f: D.Normal(f - 2 * f.mean(0), 1.0), (2, 2)),
    "transforms of the outputs": (lambda f: D.TransformedDistribution(D.Normal(f * 0, 1), D.AffineTransform(f, 2.0)), (2, 2)),
}  # fmt: skip
EXACT = {
    "without a divergence": lambda f: 3 * f.sigmoid().reshape(-1).diag(),
    "transforms of the outputs": lambda f: torch.eye(4).double() / 4,
}


@rows("name", SAMPLED)
def test_mc_is_unbiased(name):
    likelihood, shape = SAMPLED[name]
    f = logits(*shape) * 0.5
    g = torch.Generator().manual_seed(0)
    given = partial(metric, likelihood=likelihood, criterion=F.cross_entropy, reduction="sum")
    draw = partial(given, "mc", f, generator=g)
    estimates = torch.stack([dense(draw(), f) for _ in range(150)])
    many = dense(draw(num_samples=600), f)  # in one call
    expected = EXACT[name](f) if name in EXACT else dense(given("exact", f), f)
    # the largest of a few dozen normal numbers stays below 4.5 standard errors
    for estimate, count in ((estimates.mean(0), 150), (many, 600)):
        error = 4.5 * estimates.std(0) / count**0.5 + 1e-12
        assert ((estimate - expected).abs() <= error).all()
    # and the estimate is sharp enough to tell: half of the matrix would be refused
    assert ((many - expected / 2).abs() > error).any()


AXES = {  # how a criterion reads logits of three dimensions, and where their classes are
    "last": (lambda f, y: F.cross_entropy(f.flatten(0, 1), y.flatten()), (2, 3)),
    "dimension 1": (lambda f, y: F.cross_entropy(f, y), (2, 4)),
    "torch's own": (F.cross_entropy, (2, 4)),
}


@rows("name", AXES)
def test_the_classes_are_where_the_targets_say(name):
    criterion, shape = AXES[name]
    f, y = logits(2, 3, 4), torch.randint(3, shape)
    given = partial(metric, outputs=f, criterion=criterion, targets=y, likelihood="categorical")
    # of a softmax the Hessian does not depend on the targets: it is the Fisher matrix
    exact = dense(given("exact"), f)
    assert_close(exact, hessian_of(criterion, f, y))
    g = torch.Generator().manual_seed(0)
    drawn = dense(given("mc", num_samples=4000, generator=g), f)
    assert (drawn - exact).norm() < 0.1 * exact.norm()


def test_mc_of_examples_is_in_blocks_and_of_mixed_terms_is_not():
    f = logits(3, 2)
    blocks = torch.block_diag(*3 * [torch.ones(2, 2)]).bool()
    M = dense(metric("mc", f, likelihood=lambda f: D.Normal(f, 1.0)), f)
    assert (M[~blocks] == 0).all()
    assert (M[blocks] != 0).all()
    assert torch.linalg.matrix_rank(M) == 3  # one draw for each example
    M = dense(metric("mc", f, likelihood=lambda f: D.Normal(f - f.mean(0), 1.0)), f)
    assert torch.linalg.matrix_rank(M) == 1


def test_masked_terms_contribute_no_score():
    f = logits(4, 3)
    M = dense(metric("mc", f, criterion=F.cross_entropy, targets=MASKED, num_samples=50), f)
    assert (M[3:6] == 0).all()
    assert M[0, 0] != 0
    # 1/T with T = 3
    f, targets = torch.zeros(4, 2).double(), torch.tensor([0, -100, 1, 1])
    M = dense(metric("mc", f, criterion=F.cross_entropy, targets=targets), f)
    assert_close(M[:2].abs().sum(), torch.tensor(4 / 4 / 3).double())


@rows("likelihood", ["categorical", lambda f: D.Gamma(f.exp(), 1.0)])
def test_draws_are_the_generators_alone(likelihood):
    f = logits(4, 3)
    state = torch.get_rng_state()
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    M = dense(metric("mc", f, likelihood=likelihood, generator=first), f)
    found = dense(metric("mc", f, likelihood=likelihood, generator=second), f)
    assert_close(found, M, rtol=0, atol=0)
    other = dense(metric("mc", f, likelihood=likelihood, generator=second), f)
    assert not torch.equal(other, M)  # the generator went on
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    assert_close(dense(metric("mc", f, likelihood=likelihood), f), M, rtol=0, atol=0)
    assert not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())


@pytest.mark.gpu
def test_draws_on_a_gpu_are_the_generators_alone():
    f = logits(4, 3).cuda()
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    first, second = (torch.Generator("cuda").manual_seed(3) for _ in range(2))
    M = dense(metric("mc", f, likelihood="categorical", generator=first), f)
    assert torch.equal(dense(metric("mc", f, likelihood="categorical", generator=second), f), M)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])


# every kind


KINDS = {
    "exact, closed form": {"kind": "exact", "criterion": F.cross_entropy},
    "exact, divergence": {"kind": "exact", "likelihood": lambda f: D.Categorical(logits=f)},
    "mc, closed form": {"kind": "mc", "criterion": F.cross_entropy, "num_samples": 3},
    "mc": {"kind": "mc", "likelihood": lambda f: D.Categorical(logits=f), "num_samples": 3},
    "empirical": {"kind": "empirical", "criterion": F.cross_entropy},
}


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


@rows("context", CONTEXTS)
@rows("name", KINDS)
def test_works_anywhere_and_carries_no_graph(name, context):
    f = logits(4, 3, dtype=torch.float32)
    torch.manual_seed(1)
    u = torch.ones(4, 3, requires_grad=True) * torch.arange(3)
    options = KINDS[name]
    expected = metric(outputs=f, targets=TARGETS, **options)([u])[0]
    assert not expected.requires_grad
    torch.manual_seed(1)
    u = torch.ones(4, 3, requires_grad=True) * torch.arange(3)
    with CONTEXTS[context]():
        found = metric(outputs=f.clone(), targets=TARGETS.clone(), **options)([u.clone()])[0]
    assert_close(found.clone(), expected, rtol=1e-6, atol=1e-7)


@rows("name", KINDS)
def test_half_precision_is_computed_in_float32(name):
    f = logits(4, 3, dtype=torch.bfloat16)
    options = KINDS[name]
    torch.manual_seed(1)
    M = dense(metric(outputs=f, targets=TARGETS, **options), f)
    torch.manual_seed(1)
    expected = dense(metric(outputs=f.float(), targets=TARGETS, **options), f.float())
    assert M.dtype == torch.bfloat16
    assert_close(M, expected.bfloat16(), rtol=0, atol=0)


# refusals


LOGITS = torch.randn(4, 3)
WEIGHTED = nn.CrossEntropyLoss(weight=torch.ones(3))


def unnamed(outputs, targets):
    return F.cross_entropy(outputs, targets)


ERRORS = {
    "a lambda": (
        {"criterion": lambda o, y: F.cross_entropy(o, y)}, ValueError,
        r"F.cross_entropy.*F.poisson_nll_loss.*<lambda>.*likelihood=lambda outputs: torch.distributions",
    ),
    "a subclass of a known criterion": ({"criterion": type("Mine", (nn.MSELoss,), {})()}, ValueError, "likelihood is known.*Mine"),
    "no criterion": ({}, ValueError, "got none"),
    "class weights": ({"criterion": WEIGHTED}, ValueError, "expected weight=None.*likelihood=.*GGN"),
    "class weights in a partial": ({"criterion": partial(F.nll_loss, weight=torch.ones(3))}, ValueError, "expected weight=None"),
    "label smoothing": ({"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}, ValueError, "label_smoothing=0.0.*0.1"),
    "pos_weight": ({"criterion": nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))}, ValueError, "pos_weight=None"),
    "rates instead of their logarithms": ({"criterion": nn.PoissonNLLLoss(log_input=False)}, ValueError, "log_input=True"),
    "size_average": ({"criterion": partial(F.mse_loss, size_average=False)}, ValueError, "use reduction="),
    "a partial with targets": ({"criterion": partial(F.mse_loss, target=LOGITS)}, ValueError, "options by keyword only"),
    "another reduction": ({"criterion": partial(F.mse_loss, reduction="sum")}, ValueError, "expected the criterion's own, 'sum'"),
    "the default is another reduction": ({"criterion": F.cross_entropy, "reduction": "sum"}, ValueError, "own, 'mean', got 'sum'"),
    "another reduction of an empirical one": ({"kind": "empirical", "criterion": nn.SmoothL1Loss(reduction="sum")}, ValueError, "own, 'sum'"),
    "targets that broadcast": ({"criterion": F.mse_loss, "outputs": torch.zeros(4, 1), "targets": torch.zeros(4)}, ValueError, "more terms than there are outputs"),
    "every target ignored": ({"criterion": F.cross_entropy, "targets": torch.full((4,), -100)}, ValueError, "every target"),
    "logits for nll_loss": ({"criterion": F.nll_loss}, ValueError, "log_softmax"),
    "a dict for a name": ({"outputs": pair(), "likelihood": "gaussian"}, ValueError, "one tensor.*outputs\\['logits'\\]"),
    "one number for categorical": ({"outputs": torch.zeros(()), "likelihood": "categorical"}, ValueError, "bernoulli"),
    "classes in dimension 1 or the last": (
        {"outputs": torch.zeros(2, 3, 3), "targets": torch.zeros(2, 3).long(), "likelihood": "categorical", "criterion": unnamed},
        ValueError, r"targets.*\(2, 3\) for the last, got \(2, 3\), which fits both.*movedim",
    ),
    "classes that the targets do not tell": (
        {"outputs": torch.zeros(2, 3, 4), "targets": torch.zeros(6).long(), "likelihood": "categorical", "criterion": unnamed},
        ValueError, r"\(2, 4\) for dimension 1 or \(2, 3\) for the last, got \(6,\); say it: likelihood=",
    ),
    "an unknown name": ({"likelihood": "normal"}, ValueError, "one of categorical, bernoulli"),
    "an unknown kind": ({"kind": "ggn"}, ValueError, "one of exact, mc, empirical"),
    "no distribution": ({"likelihood": lambda f: f}, TypeError, "torch.distributions.Distribution"),
    "a likelihood for empirical": ({"kind": "empirical", "likelihood": "gaussian"}, ValueError, "likelihood=None"),
    "no divergence": ({"likelihood": lambda f: D.StudentT(3.0, f)}, NotImplementedError, "StudentT.*kind='mc'"),
    "a divergence wrong by the location": ({"likelihood": lambda f: D.Independent(D.Laplace(f, 1.0), 1)}, NotImplementedError, "kind='mc'"),
    "a divergence of the bases alone": ({"likelihood": lambda f: D.Weibull(f.exp(), f.exp())}, NotImplementedError, "transforms.*'mc'"),
    "a moving support": ({"likelihood": lambda f: D.Uniform(f, f + 1)}, ValueError, "support"),
    "a moving support, drawn": ({"kind": "mc", "likelihood": lambda f: D.Pareto(f.exp(), 1.0)}, ValueError, "support"),
    "a detached likelihood": ({"likelihood": lambda f: D.Normal(f.detach(), 1.0)}, ValueError, "depends on the outputs"),
    "a detached likelihood, drawn": ({"kind": "mc", "likelihood": lambda f: D.Normal(f.detach(), 1.0)}, ValueError, "depends on"),
    "a detached criterion": ({"kind": "empirical", "criterion": lambda o, y: o.detach().sum()}, ValueError, "depends on"),
    "what cannot be sampled": ({"kind": "mc", "likelihood": lambda f: Silent()}, NotImplementedError, "Silent"),
    "NaN": ({"outputs": LOGITS.log(), "likelihood": "gaussian"}, FloatingPointError, "outputs.*nan"),
    "complex outputs": ({"outputs": LOGITS + 1j, "likelihood": "gaussian"}, TypeError, "real"),
    "integer outputs": ({"outputs": TARGETS, "likelihood": "gaussian"}, TypeError, "floating-point"),
    "no draws": ({"kind": "mc", "likelihood": "gaussian", "num_samples": 0}, ValueError, "at least 1"),
    "a seed": ({"kind": "mc", "likelihood": "gaussian", "generator": 3}, TypeError, "torch.Generator"),
    "leaves of several lengths": (
        {"kind": "empirical", "outputs": [torch.zeros(4, 2), torch.zeros(2)], "criterion": lambda o, y: o[0].sum() + o[1].sum()}, ValueError, "expand",
    ),
}  # fmt: skip


class Silent(D.Distribution):
    def __init__(self):
        super().__init__(torch.Size([4]), validate_args=False)


def refused_metric(options):
    return metric(**{"kind": "exact", "outputs": LOGITS, "targets": TARGETS, **options})


test_errors_say_what_to_do = refused(ERRORS, refused_metric, by=hog.errors.HoglibError)


def test_batchmean_is_a_mean_over_examples():
    q = logits(4, 3).softmax(1)
    f = logits(4, 3)
    criterion = nn.KLDivLoss(reduction="batchmean")
    M = dense(metric("empirical", f, criterion=criterion, targets=q), f)
    assert_close(M, torch.block_diag(*[x.outer(x) for x in q]) / 4)


def test_the_table_names_its_criteria_as_torch_does():
    for row in CRITERIA:
        assert getattr(F, row.name) is row.functions[0]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_terms_that_the_loss_sums_over_are_told(count, reduction):
    """The mean of a likelihood is over all of its terms."""
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(3, count), torch.randn(4, 3), torch.randn(4, count)
    loss = hog.functional_loss(
        model, lambda o, t: (getattr((o - t).square(), reduction)(1) / 2).mean()
    )
    params = hog.trainable_params(model)
    told = reduction == "sum" and count > 1
    words = rf"terms \(4, {count}\).* is 1/{count} of that of a mean over examples"
    with pytest.warns(UserWarning, match=words) if told else contextlib.nullcontext():
        hog.fisher_vp(loss, params, params, (x, y), likelihood=lambda f: D.Normal(f, 1.0))
