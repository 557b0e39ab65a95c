"""p-norms of the last dimension that have every derivative, 0 where the norm itself has none."""

import torch
from torch import Tensor

INFINITY = float("inf")


def norm_of_rows(d: Tensor, p: float) -> Tensor:
    r"""(sum_k |d_k|^p)^(1/p); for p = 0 the number of d_k that are not 0, for infinity their maximum.

    A row of zeros has derivatives 0 at every order, and so has |d_k|^p at d_k = 0 where it has none.
    """
    if p == 0:
        return d.sign().abs().sum(-1)  # its derivatives are 0, but it has them
    if p == 1:
        return d.abs().sum(-1)
    if p == 2:
        return root((d * d).sum(-1))
    if p == INFINITY:
        return largest(d.abs())
    return root(powers(d, p).sum(-1), p)


def powers(d: Tensor, p: float) -> Tensor:
    if p % 2 == 0:
        return d**p  # smooth at 0 too
    zero = d == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, d).abs() ** p)


def root(s: Tensor, p: float = 2.0) -> Tensor:
    """s^(1/p); 0 where s is 0, with derivatives 0."""
    zero = s == 0
    positive = torch.where(zero, 1.0, s)
    return torch.where(zero, 0.0, positive.sqrt() if p == 2 else positive ** (1 / p))


def largest(a: Tensor) -> Tensor:
    """The maximum of each row; every entry that attains it has the whole derivative, as in cdist."""
    if not a.shape[-1]:
        return a.sum(-1)
    maximum = a.detach().amax(-1, keepdim=True)
    attained = torch.where(a.detach() == maximum, a - a.detach(), 0.0)
    return maximum.squeeze(-1) + attained.sum(-1)
