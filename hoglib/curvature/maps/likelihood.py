"""Losses as negative log-likelihoods: the distribution, its terms, samples and scores.

    loss = w sum_t -log p(y_t | outputs)        w = 1/T for the mean over terms, 1 for their sum

A term is one element of the distribution's batch_shape. Named likelihoods are exponential families in
their natural parameters, in closed form.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from inspect import signature
from math import fsum, isfinite, nan
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch import distributions as D
from torch.distributions import constraints

from hoglib import nn as hog_nn
from hoglib import ops
from hoglib._core.messages import validation
from hoglib._core.modules.state import draw_from, generator_state, preserve_random_state
from hoglib._core.numerics.trust import DERIVATIVES, SUMS, Rule, agree, memoize_on
from hoglib._core.runtime.device_reads import read_late
from hoglib._core.runtime.logger import LOGGER
from hoglib._core.substrate.autograd import Vector
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import tensors_in
from hoglib._core.torch_api.torch_internals import tracing
from hoglib._core.torch_api.torch_modes import value_checks_on
from hoglib.curvature.batches.data import as_dict, row_count, rows_of
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NonFiniteError, UnsupportedError

Tree = Any
Weight = float | Tensor


class Family(NamedTuple):
    """An exponential family in its natural parameters f, in closed form, accurate at any finite f.

    Attributes:
        distribution: f -> the distribution, with a term for each element of f, or with `classes` for
            each row of f along the dimension of the classes.
        information: (f, u) -> the product of u with the Fisher matrix of the sum of all terms.
        score: (f, y) -> d(-log p(y))/df for samples y, which have a leading dimension before the terms.
        classes: Whether f has a dimension of classes.
    """

    distribution: Callable[[Tensor], D.Distribution]
    information: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]
    classes: bool = False


def class_axis(f: Tensor) -> int:
    """The dimension of the classes: 1 in [N, C, ...] as in torch's cross_entropy, 0 in [C]."""
    return min(f.dim() - 1, 1)


def _validate_args(f: Tensor) -> bool | None:
    """validate_args of distributions: torch's default on a CPU. Off in a captured graph, which has no
    values, and on a device, where each check would synchronize: `fisher_metric` checks the outputs."""
    return None if value_checks_on() and f.device.type == "cpu" else False


def _normal(f: Tensor, scale: float) -> D.Distribution:
    return D.Normal(f, scale, validate_args=_validate_args(f))


def _categorical(axis_of: Callable[[Tensor], int]) -> Family:
    """The family of logits f with classes in dimension axis_of(f)."""

    def distribution(f: Tensor) -> D.Distribution:
        return D.Categorical(logits=f.movedim(axis_of(f), -1), validate_args=_validate_args(f))

    def information(f: Tensor, u: Tensor) -> Tensor:
        """(diag(p) - p p^T) u, as p (u - p.u), without cancellation."""
        p = f.softmax(axis_of(f))
        return p * (u - (p * u).sum(axis_of(f), keepdim=True))

    def score(f: Tensor, y: Tensor) -> Tensor:
        """p - onehot(y)"""
        axis = axis_of(f) + 1
        p = f.softmax(axis - 1).expand(len(y), *f.shape)
        y = y.unsqueeze(axis)
        return p.scatter_add(axis, y, torch.full_like(y, -1, dtype=p.dtype))

    return Family(distribution, information, score, True)


# p (1 - p) as s(f) s(-f): no cancellation for p near 1.
FAMILIES: dict[str, Family] = {
    "categorical": _categorical(class_axis),
    "bernoulli": Family(
        lambda f: D.Bernoulli(logits=f, validate_args=_validate_args(f)),
        lambda f, u: f.sigmoid() * (-f).sigmoid() * u,
        lambda f, y: f.sigmoid() - y,
    ),
    "gaussian": Family(lambda f: _normal(f, 1.0), lambda f, u: u.clone(), lambda f, y: f - y),
    "poisson": Family(
        lambda f: D.Poisson(f.exp(), validate_args=_validate_args(f)),
        lambda f, u: f.exp() * u,
        lambda f, y: f.exp() - y,
    ),
}
CLASSES_LAST = _categorical(lambda f: f.dim() - 1)
# -log p = (f - y)^2 + constant: a variance of 1/2
SQUARED_ERROR = Family(lambda f: _normal(f, 0.5**0.5), lambda f, u: 2 * u, lambda f, y: 2 * (f - y))


class Likelihood(NamedTuple):
    """The distribution of the targets, given the outputs."""

    distribution: Callable[[Tree], D.Distribution]  # outputs -> the distribution of the targets
    family: Family | None = None  # the closed form, or None
    counted: Tensor | None = None  # mask of the terms that count; None: all


class Criterion(NamedTuple):
    """A negative log-likelihood among the criteria of torch and hoglib."""

    name: str  # the name of torch's function
    family: Family  # of the targets' distribution
    functions: tuple[Callable[..., Tensor], ...]  # the functions that compute the criterion
    modules: tuple[type[nn.Module], ...]  # the modules that compute the criterion
    required: Mapping[str, Any] = {}  # option -> the only value that makes a likelihood
    free: tuple[str, ...] = ()  # options with any value


_LEGACY = {"size_average": None, "reduce": None}
CRITERIA: tuple[Criterion, ...] = (
    Criterion(
        "cross_entropy", FAMILIES["categorical"],
        (F.cross_entropy, ops.softmax_cross_entropy), (nn.CrossEntropyLoss, hog_nn.CrossEntropyLoss),
        {"weight": None, "label_smoothing": 0.0, **_LEGACY}, ("ignore_index",),
    ),
    Criterion(
        "nll_loss", FAMILIES["categorical"], (F.nll_loss,), (nn.NLLLoss,),
        {"weight": None, **_LEGACY}, ("ignore_index",),
    ),
    Criterion(
        "mse_loss", SQUARED_ERROR, (F.mse_loss, ops.mse_loss), (nn.MSELoss,),
        {"weight": None, **_LEGACY},
    ),
    Criterion(
        "binary_cross_entropy_with_logits", FAMILIES["bernoulli"],
        (F.binary_cross_entropy_with_logits,), (nn.BCEWithLogitsLoss,),
        {"weight": None, "pos_weight": None, **_LEGACY},
    ),
    Criterion(
        "poisson_nll_loss", FAMILIES["poisson"], (F.poisson_nll_loss,), (nn.PoissonNLLLoss,),
        {"log_input": True, **_LEGACY}, ("full", "eps"),
    ),
)  # fmt: skip


def specified(likelihood: object, loss: object, outputs: Tree, batch: object) -> Likelihood:
    """The likelihood that the user gave, by name or as a function of the outputs."""
    if isinstance(likelihood, str):
        family = FAMILIES[validation.choice("likelihood", likelihood, FAMILIES)]
        result = _of_family(family, f"likelihood={likelihood!r}", outputs)
        # For logits [B, T, V] the classes may be in the last dimension, not in dimension 1.
        if family.classes and outputs.dim() > 2 and _classes_last(loss, outputs, batch):
            return Likelihood(CLASSES_LAST.distribution, CLASSES_LAST)
        return result
    return Likelihood(validation.function("likelihood", likelihood))


def token_axis(loss: object, outputs: Tree, batch: object) -> int:
    """The dimension of the classes of logits [N, V, T] or [N, T, V]."""
    row = row_of(loss)
    if isinstance(outputs, Tensor) and outputs.dim() > 2 and (row is None or row.family.classes):
        with suppress(ArgumentValueError):
            return -1 if _classes_last(loss, outputs, batch) else 1
    raise ArgumentValueError(
        "per_token=True: expected a cross-entropy of logits [N, V, T], or [N, T, V] where the shape of "
        f"the targets says so, got {validation.describe(outputs)} from {loss!r}. Use F.cross_entropy "
        "itself, `hoglib.language_model_loss(model)`, or forward=lambda model, batch: "
        "model(**batch).logits; leave per_token out where an example has one score."
    )


def _classes_last(loss: object, f: Tensor, batch: object) -> bool:
    """Whether the classes of logits are in the last dimension, not in dimension 1, by the targets.

    Targets are indices of classes, shaped like the logits without the dimension of the classes.
    Raises ArgumentValueError if both dimensions fit, or neither does.
    """
    if row_of(loss) is not None:  # torch's own criteria: dimension 1
        return False
    shapes = {"1": (*f.shape[:1], *f.shape[2:]), "last": tuple(f.shape[:-1])}
    targets = loss.targets(batch) if hasattr(loss, "targets") else None
    indices = [t for _, t in tensors_in("", targets) if not pytree.is_float(t)]
    fitting = {axis for axis, shape in shapes.items() if any(t.shape == shape for t in indices)}
    if len(fitting) == 1:
        return fitting == {"last"}
    got = ", ".join(str(tuple(t.shape)) for t in indices) or "none"
    raise ArgumentValueError(
        f"likelihood='categorical': expected targets whose shape says which dimension of the logits "
        f"{tuple(f.shape)} has the classes, {shapes['1']} for dimension 1 or {shapes['last']} for the "
        f"last, got {got}"
        + (", which fits both" if fitting else "")
        + "; say it: likelihood=lambda outputs: torch.distributions.Categorical(logits=outputs) for "
        "the last, logits=outputs.movedim(1, -1) for dimension 1."
    )


def inferred(loss: Any, outputs: Tree, batch: Any, reduction: str) -> Likelihood:
    """The likelihood of a loss's criterion, from `CRITERIA`.

    Raises ArgumentValueError for a criterion outside the table, for options that make the criterion no
    likelihood, and for a reduction unlike the criterion's.
    """
    row = row_of(loss)
    criterion = getattr(loss, "user_criterion", None)
    if row is None:
        got = "none" if criterion is None else _criterion_name(criterion)
        known = ", ".join(f"F.{row.name}" for row in CRITERIA)
        raise ArgumentValueError(
            f"likelihood: expected a criterion whose likelihood is known ({known}, or a partial with "
            f"keywords or the module of one), got {got}; give the distribution that the outputs "
            "parametrise: likelihood=lambda outputs: torch.distributions.Normal(outputs, 1.0), or one "
            f"of {', '.join(map(repr, FAMILIES))}. kind='empirical' and the GGN need no likelihood."
        )
    _check_options(row, criterion)
    check_reduction(loss, reduction)
    result = _of_family(row.family, row.name, outputs)
    target = loss.targets(batch)
    if row.name == "nll_loss" and value_checks_on():
        total = outputs.detach().float().logsumexp(class_axis(outputs)).abs().amax()
        if total > 0.05:  # bfloat16 rounds log-probabilities by a few hundredths
            raise ArgumentValueError(
                "nll_loss: expected outputs that are log-probabilities, whose exponentials sum to one, "
                f"got a row whose logarithm of the sum is off by {total.item():.3g}; end the model "
                "with log_softmax, or use cross_entropy."
            )
    if row.name == "mse_loss":
        validation.tensor("targets", target)
        if torch.broadcast_shapes(outputs.shape, target.shape) != outputs.shape:
            raise ArgumentValueError(
                f"mse_loss: expected targets that broadcast to the outputs {tuple(outputs.shape)}, "
                f"got {tuple(target.shape)}, which makes more terms than there are outputs; give them "
                "one shape."
            )
    if row.family.classes and not target.is_floating_point():
        result = result._replace(counted=target != _options(criterion).get("ignore_index", -100))
    return result


def weight(likelihood: Likelihood, p: D.Distribution, reduction: str) -> Weight:
    """The factor w of the sum over terms."""
    if reduction != "mean":
        return 1.0
    counted, total = likelihood.counted, cast(Any, p.batch_shape.numel())
    known = total
    if counted is not None:  # total stays a tensor on a device, and in a captured graph
        total = counted.sum(dtype=torch.float64)
        known = read_late(("terms", counted.shape), total) if value_checks_on() else None
        total = float(total) if known is total else total
    if known is not None and known == 0:
        raise ArgumentValueError(
            "outputs: expected at least one term of the loss, got none "
            + ("" if counted is None else "(every target is ignore_index) ")
            + "whose mean does not exist; leave such a batch out, or use reduction='sum'."
        )
    return 1 / total


def mask(likelihood: Likelihood, f: Tensor) -> Tensor:
    """A factor for tensors like f: 1 for terms that count, else 0."""
    if likelihood.counted is None:
        return f.new_ones(())
    return likelihood.counted.to(f).unsqueeze(class_axis(f))


_OF_FUNCTION = {id(function): row for row in CRITERIA for function in row.functions}
_OF_MODULE: dict[Any, Criterion] = {module: row for row in CRITERIA for module in row.modules}


def row_of(loss: object) -> Criterion | None:
    """The row of `CRITERIA` for the criterion of a loss; None for other criteria."""
    criterion = getattr(loss, "user_criterion", None)
    called = criterion.func if isinstance(criterion, partial) else criterion
    # not isinstance: a subclass may compute something else
    return _OF_FUNCTION.get(id(called)) or _OF_MODULE.get(type(called))


def check_reduction(loss: object, reduction: str) -> None:
    """Raise if the criterion's own `reduction` differs; "batchmean" is a mean over examples."""
    criterion = getattr(loss, "user_criterion", None)
    if criterion is None:
        return
    own = _options(criterion).get("reduction")
    if own is None and not isinstance(criterion, nn.Module):
        try:
            parameter = signature(criterion).parameters.get("reduction")
        except (TypeError, ValueError):  # a callable without a signature
            return
        own = None if parameter is None else parameter.default
    if isinstance(own, str) and {"batchmean": "mean"}.get(own, own) != reduction:
        raise ArgumentValueError(
            f"reduction: expected the criterion's own, {own!r}, got {reduction!r}; pass the "
            f"reduction of {_criterion_name(criterion)}, or change the criterion."
        )


def example_counts(loss: Any, batch: Any) -> Tensor | None:
    """The summand of each example in the denominator of a mean, [N]; None if unknown.

    From `loss.batch_size`; for a criterion in `CRITERIA` from `counts_of_targets`.
    """
    batch = as_dict(batch)
    count = row_count(batch)
    if count and hasattr(loss, "batch_size"):
        parts = [loss.batch_size(pytree.rows(batch, count, n, n + 1)) for n in range(count)]
        return torch.tensor(parts, dtype=torch.float64, device="cpu")
    counts = counts_of_targets(loss, batch)
    return None if counts is None or len(counts) != count else counts


def counts_of_targets(loss: Any, batch: Any) -> Tensor | None:
    """The summand of each row of the targets in the denominator of the criterion's mean: the summed
    class weights of labels other than ignore_index. None for a criterion that is not in `CRITERIA`.

    The targets may have other rows than the batch's first tensor, such as time steps.
    """
    row = row_of(loss)
    target = None if row is None else loss.targets(as_dict(batch))
    if row is None or not isinstance(target, Tensor) or not target.dim() or not len(target):
        return None
    count, options = len(target), _all_options(loss.user_criterion)
    if options.get("reduction", "mean") != "mean":
        return None
    if not row.family.classes or target.is_floating_point():
        return torch.ones(target.shape, dtype=torch.float64, device="cpu").reshape(count, -1).sum(1)
    ignored, weights = options.get("ignore_index", -100), options.get("weight")

    def counts() -> Tensor:
        own = target.cpu()
        kept = own != ignored
        each = kept.double()
        if weights is not None:
            # where(): an ignored label may lie beyond the classes
            each *= weights.detach().cpu().double()[own.where(kept, 0)]
        return each if each.dim() == 1 else each.reshape(count, -1).sum(1)

    # Inference tensors have no version counter for the key.
    if target.device.type == "cpu" or target.is_inference():
        return counts()
    key = ("counts", target._version, ignored, id(weights), getattr(weights, "_version", 0))
    return memoize_on(target, key, counts)  # else each pass would synchronize the device


# The denominator of a mean over a batch: the criterion's own, the number of terms of a given
# distribution, or the number of examples.
Counting = Literal["criterion", "terms", "examples"]
Relation = Literal["mean", "sum", "weighted", "mean and sum", "coupled", "no rows"]


CLOSE = Rule(1e2)  # strict, because the fitted t of "weighted" comes near any slowly varying loss


def relation_of_halves(
    values: Sequence[Sequence[float]], share: float, dtype: torch.dtype
) -> Relation | None:
    """How the loss L of a batch follows from the losses l and m of its halves, at several points.

        mean      L = s l + (1 - s) m, with the share s of the first half in the examples
        sum       L = l + m
        weighted  L = t l + (1 - t) m for a t in [0, 1], t != s: a mean with another denominator
        coupled   anything else, such as a contrastive loss; None if no loss is finite

    `_is_mean_and_sum` recognises a mean plus a sum. values: (L, l, m) at each point.
    """
    found = [v for v in values if isfinite(v[0])]
    for L, *parts in found:
        if not all(map(isfinite, parts)):  # 0 / 0: no term of one half counts
            other = next(filter(isfinite, parts), nan)
            return "weighted" if agree(L, other, DERIVATIVES, dtype=dtype) else None
    made: dict[Relation, Callable[[float, float], float]] = {
        "mean": lambda a, b: share * a + (1 - share) * b,
        "sum": lambda a, b: a + b,
    }
    square = fsum((a - b) ** 2 for _, a, b in found)
    if square:
        t = fsum((L - b) * (a - b) for L, a, b in found) / square
        if 0 <= t <= 1:
            made["weighted"] = lambda a, b: t * a + (1 - t) * b
    for name, make in made.items():
        rule = CLOSE if name == "weighted" else DERIVATIVES
        if all(agree(L, make(a, b), rule, terms=(a, b), dtype=dtype) for L, a, b in found):
            # Zeros fit every relation, so they tell nothing.
            return name if any(map(any, found)) else None
    return "coupled" if found else None


def compare_halves(
    at: Callable[[int, Any], Tensor], batch: object, value: Tensor | None = None
) -> Relation | None:
    """`relation_of_halves` for the halves of a batch, at the point and at points nearby.

    None for a batch of one row, and for losses that draw random numbers or raise at the batch; "no
    rows" if the loss raises at the halves, or does not depend on the rows.
    at: (seed, batch) -> the loss at the point `nearby(..., seed)`.
    """
    count = row_count(batch) or 0
    if count < 2:
        return None
    half = count // 2
    ends = ((0, half), (half, count))
    parts = [batch, *(rows_of(batch, count, start, stop) for start, stop in ends)]
    share = half / count

    def values(seed: int) -> list[float]:
        return [float(at(seed, part)) for part in parts]

    whole: float | None = None
    try:
        with preserve_random_state():
            value = at(0, batch) if value is None else value
            before, whole = generator_state(value.device), float(value)
            first = [whole, *(float(at(0, part)) for part in parts[1:])]
            # If the loss draws random numbers, halves differ for this reason alone.
            if not torch.equal(before, generator_state(value.device)):
                return None
            if relation_of_halves([first], share, value.dtype) == "mean":
                # Equal losses, and tensors that were not split: the rows may not enter the loss.
                sizes = {len(x) for x in pytree.tensors(as_dict(batch)) if x.dim()}
                return "no rows" if len(sizes) > 1 and len({*first}) == 1 and first[0] else "mean"
            # A loss of zero fits every relation: points nearby decide.
            others = [values(seed) for seed in (1, 2, 3)]
    except Exception as error:  # rows of this batch are not examples
        LOGGER.debug("the halves of a batch were not compared: %s", error)
        return None if whole is None else "no rows"
    finite = [other for other in others if isfinite(other[0])]
    found = relation_of_halves(finite or [first], share, value.dtype)
    if found == "coupled" and count >= 4 and _is_mean_and_sum(at, batch, count, value.dtype):
        return "mean and sum"
    return found


def _is_mean_and_sum(
    at: Callable[[int, Any], Tensor], batch: object, count: int, dtype: torch.dtype
) -> bool:
    """Whether a loss is a mean over examples plus a sum over examples, such as a summed penalty on
    outputs.

    Let l and m be the losses of the halves of a batch with the loss L. L - (l + m) / 2 is half of the
    sum over the batch. So, with the losses of the quarters,

        L - (l + m) / 2 = [l - (l_1 + l_2) / 2] + [m - (m_1 + m_2) / 2]
    """
    quarter = count // 4
    cuts = [(0, 4), (0, 2), (2, 4), (0, 1), (1, 2), (2, 3), (3, 4)]
    parts = [rows_of(batch, count, start * quarter, stop * quarter) for start, stop in cuts]
    for seed in (1, 2, 3):
        L, a, b, *quarters = (float(at(seed, part)) for part in parts)
        whole, halves = L - (a + b) / 2, a + b - fsum(quarters) / 2
        terms = (L, a, b, *quarters)
        if not agree(whole, halves, DERIVATIVES, terms=terms, dtype=dtype):
            return False
    # the sum over the batch is zero for a mean alone
    return not agree(whole, 0.0, DERIVATIVES, terms=terms, dtype=dtype)


def nearby(tensors: Sequence[Tensor], seed: int) -> Vector:
    """The tensors themselves for seed 0; for other seeds tensors at random distances nearby."""
    if not seed:
        return list(tensors)
    random = torch.Generator().manual_seed(seed)
    options: Any = {"generator": random, "dtype": torch.float32, "device": "cpu"}
    noise = (torch.randn(x.shape, **options).to(x) for x in tensors)
    return [x.detach() * (1 + 0.5 * r) + 0.3 * r for x, r in zip(tensors, noise, strict=True)]


def _all_options(criterion: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function, partial or module, with class weights."""
    buffers = criterion._buffers if isinstance(criterion, nn.Module) else {}
    return {**_options(criterion), **buffers}


def _options(func: object) -> Mapping[str, Any]:
    """The keywords of a partial, or the attributes of a module."""
    return func.keywords if isinstance(func, partial) else getattr(func, "__dict__", {})


def _check_options(row: Criterion, criterion: Any) -> None:
    """Raise for options that make the criterion no likelihood."""
    options = _all_options(criterion)
    if isinstance(criterion, partial):
        unknown = sorted(options.keys() - row.required.keys() - {*row.free, "reduction"})
        if criterion.args or unknown:
            raise ArgumentValueError(
                f"criterion: expected a partial of {row.name} with options by keyword only, got "
                f"{_criterion_name(criterion)}; leave outputs and targets to the caller."
            )
    for name, required in row.required.items():
        value = options.get(name, required)
        if isinstance(value, Tensor) or value != required:
            of_loss = "pass likelihood=, a function of the outputs, or use the GGN"
            advice = "use reduction=" if name in _LEGACY else of_loss
            raise ArgumentValueError(
                f"{row.name}: expected {name}={required}, for which it is a likelihood, got "
                f"{validation.describe(value)}; {advice}."
            )


def _of_family(family: Family, name: str, outputs: Tree) -> Likelihood:
    """A named likelihood; raises unless outputs are one tensor."""
    if not isinstance(outputs, Tensor):
        raise ArgumentValueError(
            f"{name}: expected outputs that are one tensor, got {type(outputs).__name__}; give a "
            "function that makes the distribution of them: "
            "likelihood=lambda outputs: torch.distributions.Categorical(logits=outputs['logits'])."
        )
    if family.classes and outputs.dim() == 0:
        raise ArgumentValueError(
            f"{name}: expected logits [C], [N, C] or [N, C, ...], got one number; "
            "use 'bernoulli' for a single logit."
        )
    return Likelihood(family.distribution, family)


def _criterion_name(criterion: Callable[..., Any]) -> str:
    return getattr(criterion, "__name__", None) or validation.describe(criterion)


def make_distribution(likelihood: Likelihood, outputs: Tree) -> D.Distribution:
    """The distribution of a likelihood at some outputs."""
    try:
        found = likelihood.distribution(outputs)
    except Exception as error:
        if likelihood.family is not None or not tracing():
            raise
        raise UnsupportedError(
            "likelihood: expected a function that can be captured where compile=True, got one that "
            f"raises {type(error).__name__} there; a torch.distributions.Distribution checks values "
            "unless it is made with validate_args=False."
        ) from error
    if not isinstance(found, D.Distribution):
        raise ArgumentTypeError(
            "likelihood: expected a function that makes a torch.distributions.Distribution of the "
            f"outputs, got {validation.describe(found)} from it."
        )
    return found


def sample(
    likelihood: Likelihood, p: D.Distribution, count: int, outputs: Tree, random: Generator | None
) -> Tensor:
    """Samples [count, *terms, *event] of p, the distribution at the outputs.

    random: The generator; None is torch's own. The generator's device draws the samples, so they do not
    depend on the outputs' device. The samplers of torch.distributions take no generator: torch's own
    generator has the state of `random` while they run.
    """
    context: AbstractContextManager[Any] = nullcontext()
    device = next(x.device for x in pytree.tensors(outputs) if x.is_floating_point())
    if (own := validation.generator(random)) is not None:
        there = device if own.device in (device, torch.device(device.type)) else own.device
        context = draw_from(own, there)
        if there != device:
            p = make_distribution(likelihood, pytree.map_tensors(lambda x: x.to(there), outputs))
    try:
        with context:
            return p.sample(torch.Size([count])).to(device)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"kind='mc': expected a distribution that can be sampled, got {type(p).__name__}, which "
            "torch cannot sample; use kind='exact' or 'empirical'."
        ) from error


def scores(q: D.Distribution, samples: Tensor, own: Vector) -> tuple[Vector, bool]:
    """d(-log p(y))/doutputs for each sample, summed over terms; and whether scores separate by
    example.

    Scores separate if the terms and every leaf have one common leading dimension, and no term depends
    on the outputs of another example.
    """

    def gradient(y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        nll = -q.log_prob(y)
        if not nll.requires_grad:
            refuse_constant()
        if weights is not None:
            nll = nll.reshape(len(weights), -1) * weights.to(nll).unsqueeze(1)
        return torch.autograd.grad(nll.sum(), own, materialize_grads=True, retain_graph=True)

    each = [gradient(y) for y in samples]
    stacked = [torch.stack(parts) for parts in zip(*each, strict=True)]
    for part in stacked:
        advice = "Use a named likelihood, in closed form, or bound the outputs of the model."
        validation.finite("the gradient of log p at a sample", part, advice, late=True)
    examples = q.batch_shape[:1]
    if not examples or not examples[0] or any(leaf.shape[:1] != examples for leaf in own):
        return stacked, False
    # A different weight for each example: a gradient by another example's outputs would have the wrong
    # weight. Multiples of the golden ratio, modulo 1, stay apart for any number of examples (Knuth, The
    # Art of Computer Programming, volume 3, section 6.4).
    order = torch.arange(examples[0], dtype=torch.float64, device=own[0].device)
    weights = 1 + (order * 0.6180339887498949).frac()
    for whole, weighted in zip(each[0], gradient(samples[0], weights), strict=True):
        expected = whole * weights.to(whole).reshape(-1, *[1] * (whole.dim() - 1))
        if not agree(weighted, expected, SUMS):
            return stacked, False
    return stacked, True


def refuse_moving_support(q: D.Distribution) -> None:
    """Raise if the support depends on the outputs: E[s] is then not 0, and no Fisher matrix exists."""
    try:
        support = q.support
    except NotImplementedError:
        return
    if _differentiable(support):
        raise ArgumentValueError(
            f"likelihood: expected a distribution whose support does not depend on the outputs, got "
            f"{type(q).__name__}, which has no Fisher matrix there; fix the bounds, or use the GGN."
        )


def refuse_wrong_divergence(q: D.Distribution) -> None:
    """Raise if autograd's second derivative of torch's KL(p || q) is not the Fisher matrix.

    For Laplace it is zero by the location, because the derivative of |x| at 0 is 0. For a
    TransformedDistribution torch takes the divergence of the base distributions, which is right only
    if the transforms are constant.
    """
    part: Any = q
    while part is not None:
        transforms = getattr(part, "transforms", ())
        moves = not isinstance(part, D.Gumbel) and any(map(_differentiable, transforms))
        why = ": torch leaves out transforms that depend on the outputs"
        if isinstance(part, D.Laplace):
            moves, why = True, " at equal locations"
        if moves:
            raise UnsupportedError(
                f"kind='exact': expected a KL divergence that autograd can differentiate twice, got "
                f"that of {type(q).__name__}, whose second derivative is silently wrong{why}; use "
                "kind='mc'."
            )
        part = getattr(part, "base_dist", None)


@contextmanager
def translate_divergence_errors(q: D.Distribution) -> Iterator[None]:
    """Explain the errors of a distribution without a KL divergence, or without its second
    derivative."""
    try:
        yield
    except ArgumentValueError:
        raise
    except (NonFiniteError, NotImplementedError, RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise UnsupportedError(
            "kind='exact': expected a distribution with a KL divergence that is twice differentiable, "
            f"got {type(q).__name__}: {why}. Use kind='mc', or a named likelihood, which is in closed "
            "form."
        ) from error


def refuse_constant() -> None:
    """Raise for a distribution that does not depend on the outputs."""
    raise ArgumentValueError(
        "likelihood: expected a distribution that depends on the outputs, got one that does not; look "
        "for .detach(), .item() or a torch.no_grad() in the function."
    )


def _differentiable(value: object) -> bool:
    """Whether a tensor requires grad, also inside a constraint, a transform or a sequence."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, list | tuple):
        return any(map(_differentiable, value))
    if isinstance(value, constraints.Constraint | D.Transform):
        return any(map(_differentiable, vars(value).values()))
    return False
