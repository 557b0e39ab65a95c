"""Scores of generated samples: points of a known distribution, and digits seen by a classifier."""

from math import log, nan
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.shared.digit_classifier import Features
from experiments.shared.digits import CLASSES
from experiments.shared.mixture import PARTS, Target
from hoglib.errors import ArgumentValueError

CONFIDENT = 0.9  # probability of a class above which the classifier counts as confident


class PointQuality(NamedTuple):
    """Scores of points in the plane; see `score_points`.

    Attributes:
        covered: Number of parts with a sample of high quality.
        high: Fraction of samples of high quality.
        rarest: Relative frequency of the rarest part.
        distance: Wasserstein distance to real points.
    """

    covered: int
    high: float
    rarest: float
    distance: float


def score_points(points: Tensor, target: Target, real: Tensor | None = None) -> PointQuality:
    """Coverage and quality of points [n, 2], and their distance to as many real ones, if given.

    A sample is of high quality if it is within 3 sigma of the nearest mode; a mode is covered if it
    is the nearest one of at least one sample of high quality. Of the true mixture 1 - exp(-4.5) =
    98.9% are of high quality. One sample is little for a mode, so there is also the share of the
    rarest mode in those of high quality, times the number of modes: 1 if all are equally frequent.

    References:
        Srivastava et al., VEEGAN, 2017, section 4.1, and Lin et al., PacGAN, 2018, section 4.1,
        both with 2500 samples.
    """
    distance, nearest = torch.cdist(points, target.points.to(points)).min(1)
    high = distance <= 3 * target.sigma
    counts = torch.bincount(target.part.to(points.device)[nearest[high]], minlength=PARTS)
    # without any sample of high quality it is 0
    rarest = counts.min().item() * PARTS / max(int(high.sum()), 1)
    to_real = nan if real is None else wasserstein_distance(points, real)
    return PointQuality(int((counts > 0).sum()), high.float().mean().item(), rarest, to_real)


def wasserstein_distance(a: Tensor, b: Tensor) -> float:
    """The Wasserstein-1 distance of two samples of n points each, exactly.

        min over permutations s of 1/n sum_i |a_i - b_s(i)|

    SciPy solves the assignment problem in O(n^3): a second for 2500 points.
    """
    from scipy.optimize import linear_sum_assignment  # not needed to train

    if len(a) != len(b):
        raise ArgumentValueError(
            f"wasserstein_distance: expected two samples of one size, got {len(a)} and {len(b)} points."
        )
    # by products of matrices, a distance near zero would be right to the root of the rounding only
    exact = "donot_use_mm_for_euclid_dist"
    costs = torch.cdist(a.double(), b.double(), compute_mode=exact).cpu().numpy()
    rows, columns = linear_sum_assignment(costs)
    return float(costs[rows, columns].mean())


class DigitQuality(NamedTuple):
    """Scores of generated digits; see `score_digits`."""

    frechet: float
    confident: float
    classes: int
    entropy: float
    shares: Tensor


def score_digits(generated: Features, real: Features) -> DigitQuality:
    """How far generated digits are from real ones, and how they are distributed over the classes.

    Args:
        generated: Features and class probabilities of the generated digits.
        real: Those of real digits.
    Returns:
        frechet: Frechet distance of the features. confident: fraction of generated digits that the
        classifier assigns to one class with a probability over 0.9. shares [10]: frequencies of the
        classes among these. classes: how many classes occur. entropy: -sum p log p of the shares, over
        log 10; 1 where all are equally frequent, 0 where there is none or one alone.
    """
    probability, label = generated.probabilities.max(1)
    confident = probability > CONFIDENT
    counts = torch.bincount(label[confident], minlength=CLASSES)
    shares = counts.double() / max(int(confident.sum()), 1)
    return DigitQuality(
        frechet=frechet_distance(generated.features, real.features),
        confident=confident.double().mean().item(),
        classes=int((counts > 0).sum()),
        entropy=torch.special.entr(shares).sum().item() / log(CLASSES),
        shares=shares,
    )


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """The squared Frechet distance of the Gaussians with mean and covariance of two samples.

        |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))

    C_a C_b has the eigenvalues of the symmetric C_a^(1/2) C_b C_a^(1/2), so both roots are of symmetric
    matrices; in float64. Samples of a few hundred overestimate the distance.

    Args:
        a: Sample [n, d].
        b: Sample [m, d].
    Returns:
        The squared distance.
    Raises:
        ArgumentValueError: for samples that are not matrices of one width, or have fewer than two rows.
    References:
        Heusel et al., GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
        Equilibrium, 2017, eq. 6.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ArgumentValueError(
            "frechet_distance: expected two samples [n, d] of one width with at least 2 rows, got "
            f"{tuple(a.shape)} and {tuple(b.shape)}."
        )
    a, b = a.double(), b.double()
    # of one feature torch gives a number, not a matrix
    C_a, C_b = (torch.cov(x.mT).reshape(x.shape[1], -1) for x in (a, b))
    root = _matrix_root(C_a)
    cross = torch.linalg.eigvalsh(root @ C_b @ root).clamp(min=0).sqrt().sum()
    distance = (a.mean(0) - b.mean(0)).square().sum() + C_a.trace() + C_b.trace() - 2 * cross
    return distance.item()


def _matrix_root(C: Tensor) -> Tensor:
    """The symmetric square root; eigenvalues that rounding made negative are set to zero."""
    values, vectors = torch.linalg.eigh(C)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
