"""p-norms over the last dimension. Where the norm has no derivative, theirs is 0, at every order."""

import torch
from torch import Tensor

INFINITY = float("inf")


def norm_of_rows(d: Tensor, p: float) -> Tensor:
    r"""(sum_k |d_k|^p)^(1/p); for p = 0 the number of d_k that are not 0, for infinity their maximum.

    All derivatives are 0 at a row of zeros, and those of |d_k|^p are 0 at d_k = 0 where it has none.
    """
    if p == 0:
        return d.sign().abs().sum(-1)  # connected to the graph, with derivatives 0
    if p == 1:
        return d.abs().sum(-1)
    if p == 2:
        return root((d * d).sum(-1))
    if p == INFINITY:
        return largest(d.abs())
    return root(powers(d, p).sum(-1), p)


def powers(d: Tensor, p: float) -> Tensor:
    """|d|^p, with derivatives 0 at d = 0 where it has none."""
    if p % 2 == 0:
        return d**p  # smooth at 0 too
    zero = d == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, d).abs() ** p)


def root(s: Tensor, p: float = 2.0) -> Tensor:
    """s^(1/p), with derivatives 0 at s = 0."""
    zero = s == 0
    # torch.where would make a tensor of each number
    positive = s.masked_fill(zero, 1.0)
    return (positive.sqrt() if p == 2 else positive ** (1 / p)).masked_fill(zero, 0.0)


def largest(a: Tensor) -> Tensor:
    """The maximum of each row. Every entry equal to it has the whole derivative, as in torch.cdist."""
    if not a.shape[-1]:
        return a.sum(-1)
    maximum = a.detach().amax(-1, keepdim=True)
    attained = torch.where(a.detach() == maximum, a - a.detach(), 0.0)
    return maximum.squeeze(-1) + attained.sum(-1)
