"""Which distribution a loss is the negative log-likelihood of, and which of its terms count.

    loss = w sum_t -log p(y_t | outputs)        w = 1/T for the mean over terms, 1 for their sum

A term is one element of the distribution's batch_shape.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributions as D

from hoglib import _arguments as arguments
from hoglib import nn as hog_nn
from hoglib import ops
from hoglib._guarding import guarded
from hoglib.curvature._families import FAMILIES, SQUARED_ERROR, Family, class_axis

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
        family = FAMILIES[arguments.one_of("likelihood", likelihood, FAMILIES)]
        return _of_family(family, f"likelihood={likelihood!r}", outputs)
    return Likelihood(arguments.function("likelihood", likelihood))


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
        raise arguments.WrongValue(
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
        arguments.tensor("targets", target)
        if torch.broadcast_shapes(outputs.shape, target.shape) != outputs.shape:
            raise arguments.WrongValue(
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
    if counted is not None and reduction == "mean" and not guarded():
        return counted.sum(dtype=torch.float64).reciprocal()
    total = p.batch_shape.numel() if counted is None else int(counted.sum())
    if total == 0 and reduction == "mean":
        raise arguments.WrongValue(
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
        raise arguments.WrongValue(
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
            raise arguments.WrongValue(
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
            raise arguments.WrongValue(
                f"{row.called}: expected {name}={wanted} to read a likelihood from it, got "
                f"{arguments.describe(value)}; {advice}."
            )


def _of_family(family: Family, what: str, outputs: Tree) -> Likelihood:
    if not isinstance(outputs, Tensor):
        raise arguments.WrongValue(
            f"{what}: expected outputs that are one tensor, got {type(outputs).__name__}; say how the "
            "distribution is made of them: "
            "likelihood=lambda outputs: torch.distributions.Categorical(logits=outputs['logits'])."
        )
    if family.classes and outputs.dim() == 0:
        raise arguments.WrongValue(
            f"{what}: expected logits [C], [N, C] or [N, C, ...], got one number; "
            "use 'bernoulli' for a single logit."
        )
    return Likelihood(family.distribution, family)


def _check_normalised(outputs: Tensor) -> None:
    if not guarded():
        return
    total = outputs.detach().float().logsumexp(class_axis(outputs)).abs().amax()
    if total > 0.05:  # bfloat16 rounds log-probabilities by a few hundredths
        raise arguments.WrongValue(
            "nll_loss: expected outputs that are log-probabilities, whose exponentials sum to one, got "
            f"a row whose logarithm of the sum is off by {total.item():.3g}; end the model with "
            "log_softmax, or use cross_entropy."
        )


def _name(criterion: Any) -> str:
    return getattr(criterion, "__name__", None) or arguments.describe(criterion)
