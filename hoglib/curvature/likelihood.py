"""Likelihoods by name: exponential families in their natural parameters, in closed form."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch import distributions as D
from torch.distributions import constraints

from hoglib import nn as hog_nn
from hoglib import ops
from hoglib._core import validation
from hoglib._core.torch_internals import tracing
from hoglib._core.torch_modes import value_checks_on
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NonFiniteError, UnsupportedError


class Family(NamedTuple):
    """An exponential family in its natural parameters f, in closed form, right at any finite f.

    distribution(f) has a term for each element of f, or, if `classes`, for each of its rows along
    `class_axis(f)`. information(f, u) is the Fisher matrix of the sum of all terms times u, and
    score(f, y) = d(-log p(y))/df for draws y of a leading dimension more than the terms.
    """

    distribution: Callable[[Tensor], D.Distribution]
    information: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]
    classes: bool = False


def class_axis(f: Tensor) -> int:
    """The dimension of the classes: 1 in [N, C, ...] as in torch's cross_entropy, 0 in [C]."""
    return min(f.dim() - 1, 1)


def _validated() -> bool | None:
    """As torch has it, but not while a graph is captured: that looks at values."""
    return None if value_checks_on() else False


def _normal(f: Tensor, scale: float) -> D.Distribution:
    return D.Normal(f, scale, validate_args=_validated())


def _categorical(f: Tensor) -> D.Distribution:
    return D.Categorical(logits=f.movedim(class_axis(f), -1), validate_args=_validated())


def _categorical_information(f: Tensor, u: Tensor) -> Tensor:
    """(diag(p) - p p^T) u, as p (u - p.u), which does not cancel."""
    p = f.softmax(class_axis(f))
    return p * (u - (p * u).sum(class_axis(f), keepdim=True))


def _categorical_score(f: Tensor, y: Tensor) -> Tensor:
    """p - onehot(y)"""
    axis = class_axis(f) + 1
    p = f.softmax(axis - 1).expand(len(y), *f.shape)
    y = y.unsqueeze(axis)
    return p.scatter_add(axis, y, torch.full_like(y, -1, dtype=p.dtype))


# p (1 - p) as s(f) s(-f), which does not cancel where p is nearly 1
FAMILIES: dict[str, Family] = {
    "categorical": Family(_categorical, _categorical_information, _categorical_score, True),
    "bernoulli": Family(
        lambda f: D.Bernoulli(logits=f, validate_args=_validated()),
        lambda f, u: f.sigmoid() * (-f).sigmoid() * u,
        lambda f, y: f.sigmoid() - y,
    ),
    "gaussian": Family(lambda f: _normal(f, 1.0), lambda f, u: u.clone(), lambda f, y: f - y),
    "poisson": Family(
        lambda f: D.Poisson(f.exp(), validate_args=_validated()),
        lambda f, u: f.exp() * u,
        lambda f, y: f.exp() - y,
    ),
}
# -log p = (f - y)^2 + constant: a variance of 1/2
SQUARED_ERROR = Family(lambda f: _normal(f, 0.5**0.5), lambda f, u: 2 * u, lambda f, y: 2 * (f - y))


# === Which distribution a loss is the negative log-likelihood of, and which of its terms count.
#
#     loss = w sum_t -log p(y_t | outputs)        w = 1/T for the mean over terms, 1 for their sum
#
# A term is one element of the distribution's batch_shape.

Tree = Any
Weight = float | Tensor


class Likelihood(NamedTuple):
    """distribution(outputs), in closed form if of a family; counted: the terms that are not masked."""

    distribution: Callable[[Tree], D.Distribution]
    family: Family | None = None
    counted: Tensor | None = None


class Criterion(NamedTuple):
    """A criterion that is a negative log-likelihood.

    only: options, with the one value at which it is; free: options of any value.
    """

    called: str
    family: Family
    functions: tuple[Callable[..., Tensor], ...]
    modules: tuple[type[nn.Module], ...]
    only: Mapping[str, Any] = {}
    free: tuple[str, ...] = ()


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


def given(likelihood: Any, outputs: Tree) -> Likelihood:
    """The likelihood that the user names, or gives as a function of the outputs."""
    if isinstance(likelihood, str):
        family = FAMILIES[validation.one_of("likelihood", likelihood, FAMILIES)]
        return _of_family(family, f"likelihood={likelihood!r}", outputs)
    return Likelihood(validation.function("likelihood", likelihood))


def inferred(loss: Any, outputs: Tree, batch: Any, reduction: str) -> Likelihood:
    """The likelihood whose negative logarithm the criterion of a loss is, by the table above.

    Raises ValueError for a criterion that is not in it, or has options under which it is no
    likelihood, and for a reduction that is not the criterion's own.
    """
    row = row_of(loss)
    criterion = getattr(loss, "user_criterion", None)
    if row is None:
        came = "none" if criterion is None else _name(criterion)
        known = ", ".join(f"F.{row.called}" for row in CRITERIA)
        raise ArgumentValueError(
            f"likelihood: expected a criterion whose likelihood is known ({known}, or a partial with "
            f"keywords or the module of one), got {came}; say which distribution the outputs stand "
            "for: likelihood=lambda outputs: torch.distributions.Normal(outputs, 1.0), or one of "
            f"{', '.join(map(repr, FAMILIES))}. kind='empirical' and the GGN need no likelihood."
        )
    _check_options(row, criterion)
    check_reduction(loss, reduction)
    result = _of_family(row.family, row.called, outputs)
    target = loss.targets(batch)
    if row.called == "nll_loss":
        _check_normalised(outputs)
    if row.called == "mse_loss":
        validation.tensor("targets", target)
        if torch.broadcast_shapes(outputs.shape, target.shape) != outputs.shape:
            raise ArgumentValueError(
                f"mse_loss: expected targets that broadcast to the outputs {tuple(outputs.shape)}, "
                f"got {tuple(target.shape)}, which makes more terms than there are outputs; give them "
                "one shape."
            )
    if row.family.classes and not target.is_floating_point():
        ignored = _options(criterion).get("ignore_index", -100)
        result = result._replace(counted=target != ignored)
    return result


def weight(likelihood: Likelihood, p: D.Distribution, reduction: str) -> Weight:
    """w"""
    counted = likelihood.counted
    if counted is not None and reduction == "mean" and not value_checks_on():
        return counted.sum(dtype=torch.float64).reciprocal()
    total = p.batch_shape.numel() if counted is None else int(counted.sum())
    if total == 0 and reduction == "mean":
        raise ArgumentValueError(
            "outputs: expected at least one term of the loss, got none "
            + ("" if counted is None else "(every target is ignore_index) ")
            + "whose mean does not exist; leave such a batch out, or use reduction='sum'."
        )
    return 1 / total if reduction == "mean" else 1.0


def mask(likelihood: Likelihood, f: Tensor) -> Tensor:
    """1 where a term counts and 0 where not, to multiply a tensor like f with."""
    if likelihood.counted is None:
        return f.new_ones(())
    return likelihood.counted.to(f).unsqueeze(class_axis(f))


def row_of(loss: Any) -> Criterion | None:
    """The row of the table that the criterion of a loss belongs to."""
    criterion = getattr(loss, "user_criterion", None)
    called = criterion.func if isinstance(criterion, partial) else criterion
    for row in CRITERIA:
        # a subclass may compute anything else
        if any(called is function for function in row.functions) or type(called) in row.modules:
            return row
    return None


def check_reduction(loss: Any, reduction: str, *, besides: Mapping[str, str] | None = None) -> None:
    """That a criterion which says how it reduces says the same; besides: other words for one."""
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
    if isinstance(own, str) and (besides or {}).get(own, own) != reduction:
        raise ArgumentValueError(
            f"reduction: expected the criterion's own, {own!r}, got {reduction!r}; pass a reduction "
            f"that says what {_name(criterion)} computes, or change its reduction."
        )


def _options(criterion: Any) -> Mapping[str, Any]:
    return (
        criterion.keywords if isinstance(criterion, partial) else getattr(criterion, "__dict__", {})
    )


def _check_options(row: Criterion, criterion: Any) -> None:
    options = dict(_options(criterion))
    if isinstance(criterion, nn.Module):
        options |= criterion._buffers  # class weights
    elif isinstance(criterion, partial):
        unknown = sorted(options.keys() - row.only.keys() - {*row.free, "reduction"})
        if criterion.args or unknown:
            raise ArgumentValueError(
                f"criterion: expected a partial of {row.called} with options by keyword only, got "
                f"{_name(criterion)}; leave outputs and targets to the caller."
            )
    for name, wanted in row.only.items():
        value = options.get(name, wanted)
        if isinstance(value, Tensor) or value != wanted:
            advice = (
                "use reduction=" if name in _LEGACY
                else "pass likelihood=, a function of the outputs, or use the GGN"
            )  # fmt: skip
            raise ArgumentValueError(
                f"{row.called}: expected {name}={wanted} to read a likelihood from it, got "
                f"{validation.describe(value)}; {advice}."
            )


def _of_family(family: Family, what: str, outputs: Tree) -> Likelihood:
    if not isinstance(outputs, Tensor):
        raise ArgumentValueError(
            f"{what}: expected outputs that are one tensor, got {type(outputs).__name__}; say how the "
            "distribution is made of them: "
            "likelihood=lambda outputs: torch.distributions.Categorical(logits=outputs['logits'])."
        )
    if family.classes and outputs.dim() == 0:
        raise ArgumentValueError(
            f"{what}: expected logits [C], [N, C] or [N, C, ...], got one number; "
            "use 'bernoulli' for a single logit."
        )
    return Likelihood(family.distribution, family)


def _check_normalised(outputs: Tensor) -> None:
    if not value_checks_on():
        return
    total = outputs.detach().float().logsumexp(class_axis(outputs)).abs().amax()
    if total > 0.05:  # bfloat16 rounds log-probabilities by a few hundredths
        raise ArgumentValueError(
            "nll_loss: expected outputs that are log-probabilities, whose exponentials sum to one, got "
            f"a row whose logarithm of the sum is off by {total.item():.3g}; end the model with "
            "log_softmax, or use cross_entropy."
        )


def _name(criterion: Any) -> str:
    return getattr(criterion, "__name__", None) or validation.describe(criterion)


# === What Fisher matrices ask of torch.distributions: draws by a generator, scores, refusals.


def distribution(likelihood: Likelihood, outputs: Tree) -> D.Distribution:
    try:
        found = likelihood.distribution(outputs)
    except Exception as error:
        if likelihood.family is not None or not tracing():
            raise
        raise UnsupportedError(
            "likelihood: expected a function that can be captured where compile=True, got one that "
            f"raises {type(error).__name__} there; torch.distributions look at values unless they are "
            "told not to: pass validate_args=False to what it makes."
        ) from error
    if not isinstance(found, D.Distribution):
        raise ArgumentTypeError(
            "likelihood: expected a function that makes a torch.distributions.Distribution of the "
            f"outputs, got {validation.describe(found)} from it."
        )
    return found


def sample(p: D.Distribution, count: int, like: Tensor, generator: Generator | None) -> Tensor:
    """Draws [count, *terms, *event]: from the generator, which advances as torch's own would, or from
    torch's own without one. (The samplers of torch.distributions take none.)"""
    if validation.generator(generator) is None:
        return _sample(p, count)
    assert generator is not None
    device = like.device
    if generator.device.type != device.type or generator.device.index not in (None, device.index):
        raise ArgumentValueError(
            f"generator: expected one on the device of the outputs, {device}, got one on "
            f"{generator.device}; make it with `torch.Generator({str(device)!r})`."
        )
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(generator.get_state())
            draws = _sample(p, count)
            generator.set_state(torch.get_rng_state())
        return draws
    module = torch.get_device_module(device)
    with torch.random.fork_rng(devices=[device.index], device_type=device.type):
        module.set_rng_state(generator.get_state(), device)
        draws = _sample(p, count)
        generator.set_state(module.get_rng_state(device))
    return draws


def _sample(p: D.Distribution, count: int) -> Tensor:
    try:
        return p.sample(torch.Size([count]))
    except NotImplementedError as error:
        raise UnsupportedError(
            f"kind='mc': expected a distribution that can be sampled, got {type(p).__name__}, which "
            "torch cannot sample; use kind='exact' or 'empirical'."
        ) from error


def scores(q: D.Distribution, draws: Tensor, own: list[Tensor]) -> tuple[list[Tensor], bool]:
    """d(-log p(y))/doutputs for each draw, summed over terms; and whether they separate by example.

    They do if the terms, and every leaf, have one leading dimension, and the terms of an example
    depend on the outputs of that example only.
    """

    def gradient(y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        surprise = -q.log_prob(y)
        if not surprise.requires_grad:
            refuse_constant()
        if weights is not None:
            surprise = surprise.reshape(len(weights), -1) * weights.to(surprise).unsqueeze(1)
        return torch.autograd.grad(
            surprise.sum(), own, allow_unused=True, materialize_grads=True, retain_graph=True
        )

    each = [gradient(y) for y in draws]
    stacked = [torch.stack(parts) for parts in zip(*each, strict=True)]
    for part in stacked:
        advice = "Use a named likelihood, which is in closed form, or bound what the model gives."
        validation.finite("the gradient of log p at a draw", part, advice)
    examples = q.batch_shape[:1]
    if not examples or not examples[0] or any(leaf.shape[:1] != examples for leaf in own):
        return stacked, False
    # No two weights are alike: what a term gives to another example's outputs has the wrong one.
    order = torch.arange(examples[0], dtype=torch.float64, device=own[0].device)
    weights = 1 + (order * 0.6180339887498949).frac()
    for whole, weighted in zip(each[0], gradient(draws[0], weights), strict=True):
        expected = whole * weights.to(whole).reshape(-1, *[1] * (whole.dim() - 1))
        rounding = 1e3 * torch.finfo(whole.dtype).eps * whole.abs().amax()
        if (weighted - expected).abs().amax() > rounding:
            return stacked, False
    return stacked, True


def refuse_moving_support(q: D.Distribution) -> None:
    """Where the support depends on the outputs there is no Fisher matrix: E[s] is not zero."""
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
    """Where the second derivative that autograd finds of torch's KL(p || q) is not the Fisher matrix.

    Of Laplace's it is zero by the location, because that of |x| is zero at 0. That of a
    TransformedDistribution is the divergence of its bases, right only if the transforms are constant.
    """
    part: Any = q
    while part is not None:
        transforms = getattr(part, "transforms", ())
        if isinstance(part, D.Laplace) or (
            not isinstance(part, D.Gumbel) and any(map(_differentiable, transforms))
        ):
            raise UnsupportedError(
                f"kind='exact': expected a KL divergence that autograd can differentiate twice, got "
                f"that of {type(q).__name__}, whose second derivative is silently wrong"
                + (
                    " at equal locations"
                    if isinstance(part, D.Laplace)
                    else ": torch leaves out transforms that depend on the outputs"
                )
                + "; use kind='mc'."
            )
        part = getattr(part, "base_dist", None)


@contextmanager
def no_second_derivative(q: D.Distribution) -> Iterator[None]:
    """What torch raises where it has no KL divergence, or none with a second derivative."""
    try:
        yield
    except ArgumentValueError:
        raise
    except NonFiniteError as error:
        raise UnsupportedError(_cannot(q, str(error))) from error
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UnsupportedError(_cannot(q, str(error).splitlines()[0])) from error


def _cannot(q: D.Distribution, why: str) -> str:
    return (
        "kind='exact': expected a distribution with a KL divergence that is twice differentiable, got "
        f"{type(q).__name__}: {why.rstrip('.')}. Use kind='mc', or a named likelihood, which is in "
        "closed form."
    )


def refuse_constant() -> None:
    raise ArgumentValueError(
        "likelihood: expected a distribution that depends on the outputs, got one that does not; look "
        "for .detach(), .item() or a torch.no_grad() in the function."
    )


def _differentiable(value: Any) -> bool:
    """Whether a tensor in a constraint or transform, or in the parts of one, requires grad."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, list | tuple):
        return any(map(_differentiable, value))
    if isinstance(value, constraints.Constraint | D.Transform):
        return any(map(_differentiable, vars(value).values()))
    return False
