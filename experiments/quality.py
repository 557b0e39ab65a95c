"""How good generated points are, where the distribution that they should have is known."""

from typing import NamedTuple

import torch
from torch import Tensor

from experiments.data.mixture import PARTS, Target
from hoglib import _arguments as arguments


class Quality(NamedTuple):
    """covered: parts with a sample of high quality; high: share of these; rarest: see `judge`."""

    covered: int
    high: float
    rarest: float


def judge(points: Tensor, target: Target) -> Quality:
    """Coverage and quality of points [n, 2], by the usual counts.

    A sample is of high quality if it is within 3 sigma of the nearest mode; a mode is covered if it
    is the nearest one of at least one sample of high quality. Of the true mixture 1 - exp(-4.5) =
    98.9% are of high quality. One sample is little for a mode, so there is also the share of the
    rarest mode in those of high quality, times the number of modes: 1 if all are equally frequent.

    Source: Srivastava et al., VEEGAN, 2017, section 4.1, and Lin et al., PacGAN, 2018, section 4.1,
    both with 2500 samples.
    """
    distance, nearest = torch.cdist(points, target.points.to(points)).min(1)
    high = distance <= 3 * target.sigma
    counts = torch.bincount(target.part.to(points.device)[nearest[high]], minlength=PARTS)
    rarest = counts.min().item() * PARTS / max(int(high.sum()), 1)
    return Quality(int((counts > 0).sum()), high.float().mean().item(), rarest)


def wasserstein(a: Tensor, b: Tensor) -> float:
    """The Wasserstein-1 distance of two samples of n points each, exactly.

        min over permutations s of 1/n sum_i |a_i - b_s(i)|

    The assignment problem is solved by SciPy in O(n^3): a second for 2500 points.
    """
    from scipy.optimize import linear_sum_assignment  # not needed to train

    if len(a) != len(b):
        raise arguments.WrongValue(
            f"wasserstein: expected two samples of one size, got {len(a)} and {len(b)} points."
        )
    costs = torch.cdist(a.double(), b.double()).cpu().numpy()
    rows, columns = linear_sum_assignment(costs)
    return float(costs[rows, columns].mean())
