"""Points in the plane whose distribution is known: 25 Gaussians on a grid, or a Swiss roll.

References:
    Gulrajani et al., Improved Training of Wasserstein GANs, 2017, figure 2 and its code.
"""

from collections.abc import Callable
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.checks import at_least, one_of
from experiments.shared.stream import StreamData, seeded

PARTS = 25
GRID_SIGMA = 0.05
# Noise 0.25 on scikit-learn's roll, which is then divided by 7.5.
ROLL_SIGMA, ROLL_SCALE = 0.25 / 7.5, 7.5
ROLL_POINTS = 100 * PARTS  # they lie at most a quarter of a sigma apart

# Held-out points are the same for every run, whatever its seed.
VALIDATION_SEED = 2**40
TEST_SEED = 0  # also that of a run's first batch, whose size differs, and so do its numbers


class Points(StreamData):
    """Points in the plane: a stream for training, fixed held-out samples for validation and test.

    Args:
        kind: "gaussians" or "swiss_roll".
        iterations: Batches in the run.
        batch: Points in a batch.
        validation_points: Points of each of the two samples for validation.
        test_points: Points of each of the two samples for the test.
        seed: Seed of the training stream. Default: that of the run.
    """

    def __init__(
        self,
        kind: str = "gaussians",
        iterations: int = 10000,
        batch: int = 256,
        validation_points: int = 500,
        test_points: int = 2500,
        seed: int | None = None,
    ) -> None:
        super().__init__(iterations, seed)
        self.kind = one_of("kind", kind, TARGETS)
        self.batch = at_least("batch", batch, 2)
        self.validation_points = at_least("validation_points", validation_points, 2)
        self.test_points = at_least("test_points", test_points, 2)
        self.options = {"kind": self.target.name}

    @property
    def target(self) -> "Target":
        return TARGETS[self.kind]()

    def batch_of(self, seed: int) -> Tensor:
        return sample_points(self.kind, self.batch, seed)

    def test_batch(self) -> tuple[Tensor, Tensor]:
        return two_samples(self.kind, self.test_points, TEST_SEED)

    def validation_batch(self) -> tuple[Tensor, Tensor]:
        return two_samples(self.kind, self.validation_points, VALIDATION_SEED)


class Target(NamedTuple):
    """A known distribution: it lies within a few sigma of `points`, in equally likely parts.

    Attributes:
        points: The centres of the Gaussians, or points along the roll, [P, 2].
        part: The part that each point belongs to [P], 0 to PARTS - 1.
        sigma: Standard deviation of the noise around the points.
        name: Name of the distribution in tables.
        parts: Name of its parts in tables.
    """

    points: Tensor
    part: Tensor
    sigma: float
    name: str
    parts: str


def gaussians() -> Target:
    """25 Gaussians on a 5 x 5 grid of spacing 1 around 0, with sigma 0.05."""
    axis = torch.arange(-2.0, 3.0)
    return Target(
        torch.cartesian_prod(axis, axis), torch.arange(PARTS), GRID_SIGMA, "25 Gaussians", "modes"
    )


def swiss_roll() -> Target:
    """(t cos t, t sin t) / 7.5 for t in [1.5 pi, 4.5 pi], in 25 pieces of equal length in t."""
    u = (torch.arange(ROLL_POINTS) + 0.5) / ROLL_POINTS
    return Target(_on_roll(u), (u * PARTS).long(), ROLL_SIGMA, "Swiss roll", "pieces")


TARGETS: dict[str, Callable[[], Target]] = {"gaussians": gaussians, "swiss_roll": swiss_roll}


def sample_points(kind: str, count: int, seed: int) -> Tensor:
    """The points [count, 2] that belong to a seed, on the CPU whatever the device of the run."""
    generator = seeded(seed)
    if kind == "swiss_roll":
        # anywhere on the roll, and not at the points that stand for it in scores
        clean, sigma = _on_roll(torch.rand(count, generator=generator)), ROLL_SIGMA
    else:
        target = gaussians()
        clean = target.points[torch.randint(len(target.points), (count,), generator=generator)]
        sigma = target.sigma
    return clean + sigma * torch.randn(count, 2, generator=generator)


def _on_roll(u: Tensor) -> Tensor:
    t = 1.5 * pi * (1 + 2 * u)
    return torch.stack([t * t.cos(), t * t.sin()], 1) / ROLL_SCALE


def two_samples(kind: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A sample to compare generated points with, and another, whose distance to it is the floor."""
    # what two samples of the truth are apart is what a generator cannot go below
    return sample_points(kind, count, seed), sample_points(kind, count, seed + 1)
