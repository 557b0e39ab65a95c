"""Likelihoods by name: exponential families in their natural parameters, in closed form."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributions as D

from hoglib._guarding import guarded


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
    return None if guarded() else False


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
