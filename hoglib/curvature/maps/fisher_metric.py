"""The Fisher matrix on the outputs, M in F v = J^T M J v.

    exact       M = w sum_t  E[s_t s_t^T] over y_t ~ p(. | outputs)
    mc          M = w / S  sum over S draws and examples n of  s_n s_n^T,  s_n = sum of s_t, t in n
    empirical   M = W sum_n d_n d_n^T,  d_n = dloss / doutputs_n at the actual targets

with s_t = d(-log p(y_t)) / doutputs the score of a term, w = 1/T for the mean over T terms, and W = N
for the mean over N examples; both are 1 for a sum.

`columns` yields vectors s_c with M = sum_c s_c s_c^T. Examples n are the rows of the outputs, and M has
a block for each example. s_c is shaped like the outputs, and holds one column of the square root of
every block: one backward pass gives J_n^T s_cn for all examples.

    exact        columns of the square root of each block, as many as an example has outputs
    mc           sqrt(w / S) times the score of each of S draws; without a likelihood S random sums of
                 the columns
    empirical    sqrt(W) times the gradient of the loss of each example

References:
    Amari, Natural Gradient Works Efficiently in Learning, 1998. Martens, New Insights and Perspectives
    on the Natural Gradient Method, 2020, sections 8 and 9 (exact, mc) and 11 (empirical).
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, sqrt
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Generator, Tensor
from torch import distributions as D

from hoglib._core.messages import validation
from hoglib._core.numerics.factorizations import symmetric_eigen
from hoglib._core.numerics.trust import DIGITS, SUMS, Rule, agree, largest, memoize_on
from hoglib._core.problem import Policy
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.autograd import (
    Vector,
    clone_inference_tensors,
    grad_enabled,
    materialize_grads,
)
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.mixed_precision import HALF_DTYPES, upcast_half
from hoglib._core.torch_api.torch_modes import value_checks_on
from hoglib.curvature.batches.data import row_count
from hoglib.curvature.maps import likelihood as likelihoods
from hoglib.curvature.maps.gauss_newton import (
    CompositeLoss,
    CriterionHessian,
    MetricMap,
    OutputMetric,
)
from hoglib.curvature.maps.likelihood import (
    Counting,
    Likelihood,
    Weight,
    compare_halves,
    nearby,
    relation_of_halves,
)
from hoglib.errors import ArgumentTypeError, ArgumentValueError, HoglibError, UnsupportedError
from hoglib.ring import ring

Tree = Any
Metric = Callable[[Vector], Vector]
LOOP = (
    "use a loop instead of vmap, or use ggn_vp: for most criteria the exact Fisher matrix is the "
    "Gauss-Newton matrix."
)


FisherKind = Literal["exact", "mc", "empirical"]


@final
@dataclass(frozen=True)
class FisherMetric(OutputMetric):
    """The Fisher matrix of a loss's likelihood, by the outputs.

    Attributes:
        kind: "exact", "mc" or "empirical".
        likelihood: None, to take it from the criterion of the loss; a function from outputs to a
            torch.distributions.Distribution with the terms as its batch_shape; or "categorical" (logits
            [C], [N, C], or with classes in dimension 1 or the last, as the targets' shape tells),
            "bernoulli" (logits), "gaussian" (unit variance), "poisson" (log rates).
        reduction: "mean" or "sum" over the terms.
        num_samples: Draws for each example, for "mc".
        generator: Makes the draws, for "mc"; None is torch's own generator.
        seed: Seeds a new generator for each batch, in place of `generator`.
    """

    kind: str = "exact"
    likelihood: Any = None
    reduction: str = "mean"
    num_samples: int = 1
    generator: Generator | None = field(default=None, compare=False)
    seed: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        validation.choice("kind", self.kind, get_args(FisherKind))
        validation.choice("reduction", self.reduction, ("mean", "sum"))
        validation.at_least("num_samples", self.num_samples, 1)
        validation.generator(self.generator)

    @property
    def random(self) -> bool:
        return self.kind == "mc"

    @property
    def counting(self) -> Counting:
        """The denominator of the mean in M."""
        if self.kind == "empirical":
            return "examples"
        return "criterion" if self.likelihood is None else "terms"

    def at(self, composite: CompositeLoss, outputs: Vector) -> MetricMap:
        validation.refuse_transforms(composite.policy.caller, LOOP)
        # a loss may have a closed form, such as `language_model_loss`
        closed_form = getattr(composite.loss, "fisher", None)
        if closed_form is not None:
            self._check_closed_form(composite.policy.caller)
            random = self.random_numbers(outputs[0].device)
            values = composite.with_values(outputs)
            own = closed_form(values, composite.batch, self.kind, self.num_samples, random)
            own = torch.no_grad()(own)
            return lambda u, keep_graph: own(u)
        values = composite.with_values([y.detach() for y in outputs])
        product = fisher_metric(self, composite.loss, values, composite.batch)
        return lambda u, keep_graph: product(u)

    def _check_closed_form(self, caller: str) -> None:
        """Raise for options that a loss with its own Fisher matrix does not take."""
        if self.likelihood not in (None, "categorical"):
            raise ArgumentValueError(
                f"{caller}: expected likelihood=None or 'categorical' for a language model, "
                f"got {validation.describe(self.likelihood)}."
            )
        if self.reduction != "mean":
            raise ArgumentValueError(
                f"{caller}: expected reduction='mean', that of language_model_loss, got "
                f"{self.reduction!r}."
            )

    def scores(self, composite: CompositeLoss, outputs: Vector) -> "Scores":
        """Vectors s with M = weight * sum of s s^T at these outputs, for "mc" and "empirical". Raises
        the errors of `fisher_metric`."""
        validation.refuse_transforms(composite.policy.caller, LOOP)
        at = _Outputs(composite.with_values(outputs), composite.batch)
        with _output_ring(at.own[0]):
            found = _scores(self, composite.loss, at)
        scores = [s.to(dtype) for s, dtype in zip(found.scores, at.dtypes, strict=True)]
        return found._replace(scores=scores)

    def closed_form(self, composite: CompositeLoss, ys: Vector) -> tuple[Likelihood, Weight] | None:
        """The likelihood of the criterion and the weight of a term; None without a closed form."""
        at = _Outputs(composite.with_values(ys), composite.batch)
        chosen, _, weight = _distribution(self, composite.loss, at)
        return None if chosen.family is None else (chosen, weight)

    def seeded(self) -> "FisherMetric":
        """The metric with a seed from the generator: every product then has equal samples."""
        # With new samples at each product no solver converges.
        if not self.random:
            return self
        where = torch.device("cpu") if self.generator is None else self.generator.device
        drawn = torch.randint(2**31, (), generator=self.generator, device=where)
        return replace(self, seed=int(drawn))

    def for_batch(self, number: int) -> "FisherMetric":
        # Seeded by the batch's number: the samples do not depend on the number of processes.
        return self if self.seed is None else replace(self, seed=self.seed + number)

    def random_numbers(self, device: torch.device) -> Generator | None:
        """The generator for one batch: seeded if there is a seed."""
        if self.seed is None:
            return self.generator
        return torch.Generator(device).manual_seed(self.seed)


def fisher_metric(options: FisherMetric, loss: object, outputs: Tree, batch: object) -> Metric:
    """M, as a function of a list of tensors like the floating-point leaves of outputs.

    M is linear, symmetric and positive semi-definite, and holds nothing larger than num_samples times
    the outputs. It may be called any number of times, also under vmap; samples are drawn once, here.
    Outputs in half precision are computed in float32. Products carry no graph. Raises
    ArgumentValueError for an unknown likelihood or a likelihood without a Fisher matrix, NonFiniteError
    for NaN or infinity in outputs, and UnsupportedError for "exact" if torch has no KL divergence, or
    its second derivative is not the Fisher matrix.
    """
    at = _Outputs(outputs, batch)
    with _output_ring(at.own[0]):
        if options.kind == "exact":
            metric = _exact(*_distribution(options, loss, at), at)
        else:
            metric = _outer_products(*_scores(options, loss, at))

    def product(vector: Vector) -> Vector:
        with _output_ring(at.own[0]), torch.no_grad():
            wide = [upcast_half(u) for u in clone_inference_tensors(vector)]
            return [x.to(dtype) for x, dtype in zip(metric(wide), at.dtypes, strict=True)]

    return product


class Scores(NamedTuple):
    """M = weight times the sum of s s^T over samples, and over examples if by_example."""

    scores: Vector  # [S, *leaf]
    weight: Weight  # the factor of the sum
    by_example: bool  # whether M has a block for each row of the outputs


@final
class _Outputs:
    """The outputs of a model at a batch.

    Attributes:
        own: The floating-point outputs as leaves, real and finite, in float32 at least.
        constant: The outputs in their structure, without a graph, with the values of own.
        dtypes: The original dtypes of own.
        batch: The batch.
    """

    def __init__(self, outputs: Tree, batch: object) -> None:
        for name, leaf in zip(pytree.paths(outputs), pytree.leaves(outputs), strict=True):
            if pytree.is_float(leaf):
                where = f"outputs[{name!r}]" if name else "outputs"
                advice = "The Fisher matrix does not exist there; look for overflow in the model."
                validation.real(where, leaf)
                if value_checks_on():
                    validation.finite(where, leaf, advice, late=True)
        with grad_enabled():
            self._outputs, self.batch = clone_inference_tensors((outputs, batch))
            floats = [y.detach() for y in filter(pytree.is_float, pytree.leaves(self._outputs))]
            self.own = [upcast_half(y).requires_grad_() for y in floats]
            self.constant = self.rebuild([y.detach() for y in self.own])
        self.dtypes = [y.dtype for y in floats]
        if not floats:
            raise ArgumentTypeError(
                "outputs: expected a floating-point tensor among them, got "
                f"{validation.describe(outputs)}."
            )

    def rebuild(self, values: Vector) -> Tree:
        """The outputs in their structure, with these values as the floating-point tensors."""
        return pytree.filled(self._outputs, values)


def _output_ring(like: Tensor) -> ring:
    """The context of a criterion at outputs, without autocast."""
    devices = () if like.device.type == "meta" else (like.device.type,)
    return ring(Policy("fisher"), examine=False, autocast_off=devices)


def _distribution(
    options: FisherMetric, loss: object, at: _Outputs
) -> tuple[Likelihood, D.Distribution, Weight]:
    """The likelihood, its distribution at the outputs, and the weight of a term."""
    constant = at.constant
    if options.likelihood is None:
        chosen = likelihoods.inferred(loss, constant, at.batch, options.reduction)
    else:
        chosen = likelihoods.specified(options.likelihood, loss, constant, at.batch)
    p = likelihoods.make_distribution(chosen, constant)
    weight = likelihoods.weight(chosen, p, options.reduction)
    if options.likelihood is not None and options.reduction == "mean" and value_checks_on():
        # Suppressed: the criterion may refuse half of the coordinates.
        with suppress(AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError):
            memoize_on(loss, ("terms", p.batch_shape), lambda: _warn_of_terms(loss, p, at))
    return chosen, p, weight


def _warn_of_terms(loss: Any, p: D.Distribution, at: _Outputs) -> bool:
    """Warn of a distribution with a term for each coordinate, if the loss sums over coordinates.

    The loss is compared with the losses of both halves of the coordinates, of outputs and targets.
    """
    count, targets, shape = p.batch_shape[1:].numel(), loss.targets(at.batch), p.batch_shape
    given = any(x.shape == shape for x in pytree.tensors(targets))
    joint = p.event_shape or isinstance(p, D.Independent)
    # no warning for one coordinate, targets of other shapes, joint or discrete distributions
    if count < 2 or not given or joint or getattr(p.support, "is_discrete", False):
        return True
    # A mean over coordinates is the mean of the losses of the halves; a sum is not.
    half, width = shape[-1] // 2, shape[-1]

    def value(start: int, end: int) -> float:
        parts = pytree.map_tensors(
            lambda x: x[..., start:end] if x.shape == shape else x, (at.constant, targets)
        )
        return float(loss.user_criterion(*parts))

    values = value(0, width), value(0, half), value(half, width)
    if half and relation_of_halves([values], half / width, at.own[0].dtype) == "mean":
        return True
    warn(
        f"likelihood: expected a distribution with one term for each example, got "
        f"{type(p).__name__} with terms {tuple(p.batch_shape)}. The mean is over all of them, so that "
        f"the matrix is 1/{count} of that of a mean over examples, as the divergence of a policy with "
        f"{count} actions is. Make them one: `torch.distributions.Independent(p, "
        f"{len(p.batch_shape) - 1})`; or, where the loss is a mean over all numbers, say so by "
        "`torch.distributions.Independent(p, 0)`."
    )
    return True


def _exact(likelihood: Likelihood, p: D.Distribution, weight: Weight, at: _Outputs) -> Metric:
    """M u in closed form, or as the second derivative of w sum_t KL(p_t(outputs0) ||
    p_t(outputs))."""
    own, family = at.own, likelihood.family
    if family is not None:
        f = own[0].detach()
        factor = weight * likelihoods.mask(likelihood, f)
        return lambda vector: [factor * family.information(f, vector[0])]
    q = likelihoods.make_distribution(likelihood, at.rebuild(own))
    likelihoods.refuse_moving_support(q)
    likelihoods.refuse_wrong_divergence(q)
    with likelihoods.translate_divergence_errors(q):
        divergence = weight * D.kl_divergence(p, q).sum()
        if not divergence.requires_grad:
            likelihoods.refuse_constant()
        gradient = torch.autograd.grad(divergence, own, create_graph=True, allow_unused=True)
    used = [g for g in gradient if g is not None]

    def metric(vector: Vector) -> Vector:
        along = [u for g, u in zip(gradient, vector, strict=True) if g is not None]
        product = torch.autograd.grad(used, own, along, retain_graph=True, allow_unused=True)
        return materialize_grads(list(product), own)

    if not value_checks_on():  # in a captured graph there are no values to check
        return metric
    # Some errors are raised only by the second derivative.
    with likelihoods.translate_divergence_errors(q):
        for part in (*used, *metric([torch.ones_like(leaf) for leaf in own])):
            validation.finite("KL(p || p)", part, "Its derivatives are not finite at p.", late=True)
    return metric


def _scores(options: FisherMetric, loss: object, at: _Outputs) -> Scores:
    """The scores for "mc" and "empirical"."""
    if options.kind == "empirical":
        return _empirical(options, loss, at)
    return _sampled(options, *_distribution(options, loss, at), at)


def _sampled(
    options: FisherMetric, likelihood: Likelihood, p: D.Distribution, weight: Weight, at: _Outputs
) -> Scores:
    """The scores of drawn targets, summed over the terms of an example: terms are independent with mean
    score zero, so E[(sum_t s_t) (sum_t s_t)^T] = sum_t E[s_t s_t^T]."""
    family, count, own = likelihood.family, options.num_samples, at.own
    random = options.random_numbers(own[0].device)
    if family is not None:
        f = own[0].detach()
        y = likelihoods.sample(likelihood, p, count, at.constant, random)
        scores = [family.score(f, y).mul_(likelihoods.mask(likelihood, f))]
        by_example = f.dim() > (1 if family.classes else 0)
    else:
        q = likelihoods.make_distribution(likelihood, at.rebuild(own))
        likelihoods.refuse_moving_support(q)
        y = likelihoods.sample(likelihood, p, count, at.constant, random)
        scores, by_example = likelihoods.scores(q, y, own)
    return Scores(scores, weight / count, by_example)


def _empirical(options: FisherMetric, loss: Any, at: _Outputs) -> Scores:
    """The gradients of the criterion at the batch's own targets."""
    own = at.own
    if options.likelihood is not None:
        raise ArgumentValueError(
            "kind='empirical': expected likelihood=None, got one; it takes the gradients of the "
            "criterion at the actual targets. Use kind='mc' or 'exact' for a likelihood."
        )
    likelihoods.check_reduction(loss, options.reduction)
    row = likelihoods.row_of(loss)
    one = row is not None and row.family.classes and own[0].dim() == 1  # logits [C]: one example
    sizes = {leaf.shape[:1] for leaf in own}
    if not one and (len(sizes) > 1 or not all(sizes)):
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in own)
        raise ArgumentValueError(
            "kind='empirical': expected outputs with one leading dimension, that of the examples, got "
            f"{shapes}; expand what all examples share, for instance `log_std.expand_as(mean)`."
        )
    value = loss.criterion(at.rebuild(own), at.batch)
    value = validation.scalar("criterion(outputs, batch)", value)
    if not value.requires_grad:
        raise ArgumentValueError(
            "criterion(outputs, batch): expected a value that depends on the outputs, got one that "
            "does not; look for .detach(), .item() or a torch.no_grad() in it."
        )
    # Criteria in `CRITERIA` are sums or means over examples.
    if row is None and not one and value_checks_on():
        _refuse_coupled(loss, at)
    gradient = torch.autograd.grad(value, own, allow_unused=True, materialize_grads=True)
    for part in gradient if value_checks_on() else ():
        advice = "The criterion's gradient has to exist at the outputs and targets of the batch."
        validation.finite("dloss/doutputs", part, advice, late=True)
    # The gradient of a mean has 1/N in each d_n, so M = N sum_n d_n d_n^T.
    examples = 1 if one else own[0].shape[0]
    scores = [part.unsqueeze(0) for part in gradient]
    return Scores(scores, examples if options.reduction == "mean" else 1.0, not one)


def _refuse_coupled(loss: Any, at: _Outputs) -> None:
    """Raise if a term depends on several examples; checked at the first outputs of each shape."""
    outputs = at.constant
    if row_count(outputs) != row_count(at.batch):
        return

    def value(seed: int, part: Any) -> Tensor:
        rest, batch, index = part
        others = [x[index] for x in nearby([y.detach() for y in at.own], seed)]
        with torch.no_grad():
            return loss.criterion(pytree.filled(rest, others), batch)

    # `compare_halves` splits the index, too: it tells the rows of a half.
    index = torch.arange(row_count(outputs) or 0, device=at.own[0].device)
    key = tuple(x.shape for x in (*at.own, *pytree.tensors(at.batch)))
    find = lambda: compare_halves(value, (outputs, at.batch, index)) or "unknown"  # noqa: E731
    if memoize_on(loss, ("halves of outputs", key), find) in ("coupled", "mean and sum"):
        raise ArgumentValueError(
            "kind='empirical': expected a criterion that is a sum or mean over examples, got one that "
            "couples them, as contrastive losses, correlations and statistics over the batch do: there "
            "are no gradients of single examples. Use `hoglib.GGNOperator`."
        )


def _outer_products(scores: Vector, weight: Weight, by_example: bool) -> Metric:
    """M u = weight sum_sn s_sn (s_sn . u_n) for scores [S, *leaf]; n runs over the examples, or is one
    group of all."""
    samples = scores[0].shape[0]
    groups = scores[0].shape[1] if by_example else 1
    flat = [s.reshape(samples, groups, s[0].numel() // max(groups, 1)) for s in scores]

    def metric(vector: Vector) -> Vector:
        pairs = [*zip(flat, vector, strict=True)]
        parts = [torch.einsum("snd,nd->sn", s, u.reshape(groups, s.shape[2])) for s, u in pairs]
        # s . u first: the matrix s s^T is never formed.
        along = weight * sum(parts[1:], parts[0])
        return [torch.einsum("sn,snd->nd", along.to(s), s).reshape(u.shape) for s, u in pairs]

    return metric


MOST = 2**28  # without a closed form, the blocks of M may have so many numbers


def examples_of(composite: CompositeLoss, outputs: Vector) -> int:
    """The number of examples in the outputs: their leading dimension, or 1 for logits [C]."""
    row = likelihoods.row_of(composite.loss)
    if outputs[0].dim() == 0 or (row is not None and row.family.classes and outputs[0].dim() == 1):
        return 1
    sizes = {len(y) if y.dim() else 1 for y in outputs}
    if len(sizes) > 1:
        shapes = ", ".join(str(tuple(y.shape)) for y in outputs)
        raise ArgumentValueError(
            f"outputs: expected one leading dimension, that of the examples, got {shapes}; return only "
            "what the criterion needs, by `functional_loss(..., forward=)`, or residuals at different "
            "points as one tensor, by `torch.cat`."
        )
    return sizes.pop()


def columns(metric: FisherMetric, composite: CompositeLoss, outputs: Vector) -> Iterator[Vector]:
    """The vectors s_c, with M = sum_c s_c s_c^T.

    For kind="exact" without a likelihood, M is the Hessian of the criterion by the outputs. Raises
    ArgumentValueError unless M is positive semi-definite, and for outputs with several rows of an
    example.
    """
    values, known = [y.detach() for y in outputs], None
    if metric.likelihood is None and metric.kind != "empirical":
        with suppress(ArgumentValueError):  # no likelihood: by the criterion's Hessian
            known = metric.closed_form(composite, values)
    if metric.kind == "mc" and metric.likelihood is None and known is None:
        yield from _random_columns(metric, composite, values)
        return
    if metric.kind != "exact":
        scores, weight, _ = metric.scores(composite, values)
        # M = sum of s_c s_c^T: each factor s_c has the square root of the weight
        factor = weight.sqrt() if isinstance(weight, Tensor) else sqrt(weight)
        for draw in range(len(scores[0])):
            yield [factor * part[draw] for part in scores]
        return
    _check_rows(composite, values)
    if known is None:
        yield from _dense_columns(metric, composite, values)
        return
    classes = known[0].family is not None and known[0].family.classes
    of_family = _class_columns if classes else _diagonal_columns
    yield from of_family(*known, values[0], examples_of(composite, values))


def _check_rows(composite: CompositeLoss, values: Vector) -> None:
    """Raise for outputs with several rows of each example."""
    count, rows = row_count(composite.batch), examples_of(composite, values)
    if count and rows > count and rows % count == 0:
        raise ArgumentValueError(
            f"{composite.policy.caller}(kind='exact'): expected outputs whose rows are the "
            f"{count} examples of a batch, got {rows} rows, several of each, whose gradients "
            "depend on each other; return outputs [examples, ...] by `functional_loss(..., forward=)`, "
            "or use kind='mc'."
        )


def _diagonal_columns(
    likelihood: Likelihood, weight: Weight, output: Tensor, examples: int
) -> Iterator[Vector]:
    """s_c for a family with a diagonal information matrix: one output of each example at a time."""
    assert likelihood.family is not None
    f = upcast_half(output)
    root = (weight * likelihood.family.information(f, torch.ones_like(f))).sqrt()
    root = root.reshape(examples, -1)
    for i in range(root.shape[1]):
        column = torch.zeros_like(root)
        column[:, i] = root[:, i]
        yield [column.reshape(output.shape).to(output.dtype)]


def _class_columns(
    likelihood: Likelihood, weight: Weight, output: Tensor, examples: int
) -> Iterator[Vector]:
    """diag(p) - p p^T is the sum over classes c of p_c (e_c - p)(e_c - p)^T.

    Each term (position) of an example has its own columns.
    """
    f = upcast_half(output)
    axis = likelihoods.class_axis(f)
    p = f.softmax(axis).movedim(axis, -1)  # [N, positions..., C], or [C]
    counted = likelihoods.mask(likelihood, f).expand(f.shape).movedim(axis, -1)[..., 0]
    scale = (weight * counted).reshape(examples, -1)
    rows = p.reshape(examples, -1, p.shape[-1])
    for position in range(rows.shape[1]):
        q = rows[:, position]
        root = (scale[:, position].unsqueeze(1) * q).sqrt()  # [N, C]
        for c in range(q.shape[1]):
            column = torch.zeros_like(rows)
            column[:, position] = -root[:, c : c + 1] * q
            column[:, position, c] += root[:, c]
            yield [column.reshape(p.shape).movedim(-1, axis).to(output.dtype)]


def _random_columns(metric: FisherMetric, composite: CompositeLoss, ys: Vector) -> Iterator[Vector]:
    """Draws s_n = sum over c of e_nc s_nc / sqrt(S) with independent signs e, E[s s^T] = M / S.

    For a criterion without a known likelihood; the criterion may be no log-likelihood at all.
    """
    examples, draws = examples_of(composite, ys), metric.num_samples
    random = metric.random_numbers(ys[0].device)
    device = ys[0].device if random is None else random.device
    totals = [y.new_zeros((draws, *y.shape)) for y in ys]
    for column in _dense_columns(metric, composite, ys):
        bits = torch.randint(2, (draws, examples), generator=random, device=device)
        # The generator's device draws the bits, so signs do not depend on the device of ys.
        signs = (2 * bits - 1).to(ys[0].device) / sqrt(draws)
        for total, part in zip(totals, column, strict=True):
            shape = [examples, *[1] * part.dim()][: part.dim()]
            total += signs.to(part.dtype).reshape(draws, *shape) * part
    for draw in range(draws):
        yield [total[draw] for total in totals]


def _dense_columns(metric: FisherMetric, composite: CompositeLoss, ys: Vector) -> Iterator[Vector]:
    """The columns of the square root of each block; products with M give the blocks."""
    examples = examples_of(composite, ys)
    sizes = [y.numel() // max(examples, 1) for y in ys]
    total = sum(sizes)
    if examples * total**2 > MOST:
        raise UnsupportedError(
            f"{composite.policy.caller}(kind={metric.kind!r}): expected a criterion whose likelihood "
            f"is known, or at most {MOST:,} numbers in the blocks of its Hessian, got {examples} x "
            f"{total} x {total}; give its name, as likelihood='categorical' for a cross-entropy, or "
            "smaller batches by micro_batch=."
        )
    chosen = CriterionHessian() if metric.likelihood is None else metric
    found, fault = _judged_blocks(chosen, composite, ys)
    if fault:
        raise ArgumentValueError(f"{composite.policy.caller}(kind={metric.kind!r}): {fault}")
    # `_judged_blocks` found negative eigenvalues to be rounding
    root = found.Q * found.eigenvalues.clamp(min=0).sqrt().unsqueeze(1)
    for i in range(total):
        column = found.like_outputs(root[:, :, i])
        yield [part.to(y.dtype) for part, y in zip(column, ys, strict=True)]


def _judged_blocks(
    chosen: OutputMetric, composite: CompositeLoss, ys: Vector
) -> tuple["_Blocks", str | None]:
    """The blocks of M, and the end of an error message if they have no square root, or None."""
    found = _Blocks(chosen, composite, ys)
    fault = found.fault()
    # If a softmax fits all examples, p - p^2 with p near 1 is rounding, which looks like a fault.
    # float64 decides, unless the criterion holds float32 tensors and raises.
    for exact in ([y.double() for y in ys], ys) if fault else ():
        with suppress(HoglibError, RuntimeError, TypeError, ValueError):
            dtype = composite.criterion(*exact).dtype
            if exact is ys or dtype == torch.float64:
                found = _Blocks(chosen, composite, exact)
                return found, found.fault(dtype)
    return found, fault


SHRUNK = (1 / 2, 1 / 4, 1 / 8, 1 / 16)  # the t of `_size_of_terms`


@final
class _Blocks:
    """The blocks of M at outputs, [N, n, n], with their eigenvalues and eigenvectors Q."""

    def __init__(self, chosen: OutputMetric, composite: CompositeLoss, ys: Vector) -> None:
        self._at, self._ys = partial(chosen.at, composite), ys  # M at any outputs; these outputs
        examples, wide = examples_of(composite, ys), upcast_half(ys[0])
        self._sizes = [y.numel() // max(examples, 1) for y in ys]  # numbers of one example
        total = sum(self._sizes)
        self._product = self._product_at(ys)
        self._blocks = wide.new_empty((examples, total, total))
        for i in range(total):
            unit = wide.new_zeros((examples, total))
            unit[:, i] = 1
            # one product gives column i of all blocks
            self._blocks[:, :, i] = self._product(unit)
        self.eigenvalues, self.Q = symmetric_eigen(self._blocks)

    def like_outputs(self, rows: Tensor) -> Vector:
        """Rows [N, n] in the shapes and dtypes of the outputs."""
        pairs = zip(rows.split(self._sizes, 1), self._ys, strict=True)
        return [part.reshape(y.shape).to(y.dtype) for part, y in pairs]

    def _product_at(self, ys: Vector) -> Callable[[Tensor], Tensor]:
        """M at these outputs, as a function of rows [N, n]."""
        with _output_ring(ys[0]):
            product = self._at(ys)

        def of_rows(rows: Tensor) -> Tensor:
            found = product(self.like_outputs(rows), True)
            return torch.cat([x.detach().reshape(len(rows), -1).to(rows) for x in found], 1)

        return of_rows

    def fault(self, criterion_dtype: torch.dtype | None = None) -> str | None:
        """The end of an error message if M is not block-diagonal or not positive semi-definite, else
        None.

        criterion_dtype: Allow for rounding in this dtype of terms of M that cancel at these outputs.
        """
        random = torch.Generator().manual_seed(0)
        u = torch.randn(
            self._blocks.shape[:2], generator=random, dtype=torch.float32, device="cpu"
        ).to(self._blocks)
        dtype, rule, sizes = self._ys[0].dtype, SUMS, []
        if criterion_dtype is not None:
            dtype = max(dtype, criterion_dtype, key=lambda one: torch.finfo(one).eps)
            rule, sizes = DIGITS, [self._size_of_terms(u)]
        elif dtype in HALF_DTYPES:
            rule = Rule(10)
        # If M couples examples, its product differs from the products with the blocks.
        whole, apart = self._product(u), (self._blocks @ u.unsqueeze(-1)).squeeze(-1)
        coupled = len(u) > 1 and not agree(whole, apart, rule, dtype=dtype, terms=sizes)
        if coupled and bool(whole.isfinite().all()):
            return (
                "expected a criterion that is a sum over examples, got one that couples them, such as "
                "a contrastive loss; Kronecker factors are for sums over examples. Use "
                "`hoglib.GGNOperator`, whose products are those of any criterion."
            )
        low = float(self.eigenvalues.min()) if len(u) else 0.0
        if -low <= rule.of(dtype) * max(largest(self.eigenvalues), *sizes, 0.0):
            return None
        return (
            "expected a criterion that is convex in the outputs, got one with the eigenvalue "
            f"{low:.3g}. Where it normalises the outputs first, as a cosine softmax does, normalise "
            "them in the model, or in `functional_loss(..., forward=)`: the rest is convex. Else give "
            "a likelihood=, as `hoglib.FisherOperator(likelihood=)` takes it, or use kind='empirical'."
        )

    def _size_of_terms(self, u: Tensor) -> float:
        """The largest t |M(t outputs) u| for some t < 1.

        If a softmax fits all examples it is one-hot, and M vanishes; at t outputs M does not. Not at
        t = 0: the Hessian of a criterion that normalises its outputs is infinite there, so any error
        would count as rounding. At t outputs this Hessian is at most 1 / t times as large.
        """
        found = [0.0]
        for t in SHRUNK:
            with suppress(HoglibError, RuntimeError, ValueError):
                found.append(t * largest(self._product_at([t * y for y in self._ys])(u)))
        return max(filter(isfinite, found))
