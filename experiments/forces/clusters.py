"""Lennard-Jones clusters at a temperature: positions by a Metropolis walk, energies and forces exact.

    E = sum_(i < j) 4 (r_ij^-12 - r_ij^-6)        F_i = -dE/dx_i

in reduced units: lengths in sigma, energies in the depth of a pair's well, which lies at 2^(1/6).

References:
    The walk: Metropolis et al., Equation of State Calculations by Fast Computing Machines, 1953.
    The clusters: Wales and Doye, Global Optimization by Basin-Hopping, 1997.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.checks import at_least, positive
from experiments.shared.stream import StreamData, subset
from hoglib.errors import ArgumentValueError

HOT = 2.0  # temperature at which the walk begins: clusters are gas
STEP = 0.2  # the longest move of an atom in a direction
# Seeds of the walks of each part: the test part does not depend on the number of training clusters.
TEST, VALIDATION, TRAIN = range(3)


class Clusters(StreamData):
    """Clusters of a few atoms: a stream for training, others for validation and test.

    Args:
        atoms: Atoms in a cluster.
        temperature: Temperature, in depths of a pair's well.
        radius: Radius of the sphere that holds a cluster.
        sweeps: Sweeps of the Metropolis walk that ends in a cluster.
        train: Training clusters.
        val: Validation clusters.
        test: Test clusters.
        iterations: Batches in the run.
        batch: Clusters in a batch.
        seed: Seed of the walks and the stream. Default: that of the run.
    """

    def __init__(
        self,
        atoms: int = 6,
        temperature: float = 0.3,
        radius: float = 2.0,
        sweeps: int = 300,
        train: int = 30,
        val: int = 100,
        test: int = 500,
        iterations: int = 4000,
        batch: int = 10,
        seed: int | None = None,
    ) -> None:
        super().__init__(iterations, seed)
        at_least("atoms", atoms, 2)
        positive("temperature", temperature)
        positive("radius", radius)
        at_least("sweeps", sweeps, 2)
        at_least("train", train, 2)
        at_least("val", val, 1)
        at_least("test", test, 2)
        self.batch = at_least("batch", batch, 1)
        if batch > train:
            raise ArgumentValueError(
                f"batch: expected at most the {train} clusters of train, got {batch}."
            )
        self.held_out, self.validation, self.train = (
            structures(count, atoms, temperature, radius, sweeps, 3 * self.seed + part)
            for count, part in ((test, TEST), (val, VALIDATION), (train, TRAIN))
        )
        self.options = {
            "atoms": atoms, "temperature": temperature, "radius": radius, "sweeps": sweeps,
            "train": train, "val": val, "test": test, "seed": self.seed,
        }  # fmt: skip

    def batch_of(self, seed: int) -> "Structures":
        return subset(self.train, self.batch, seed)

    def validation_batch(self) -> "Structures":
        return self.validation

    def test_batch(self) -> "Structures":
        return self.held_out


class Structures(NamedTuple):
    """Positions [n, atoms, 3], energies [n] and forces [n, atoms, 3]."""

    x: Tensor
    energy: Tensor
    forces: Tensor


def energies_and_forces(x: Tensor) -> tuple[Tensor, Tensor]:
    """E [...] and F [..., atoms, 3] of positions x [..., atoms, 3], by the formulas.

    F_i = sum_(j != i) 24 (2 r_ij^-12 - r_ij^-6) (x_i - x_j) / r_ij^2
    """
    differences = x.unsqueeze(-2) - x.unsqueeze(-3)
    squares = differences.square().sum(-1)
    squares.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)  # no atom acts on itself
    sixth = squares**-3
    energy = 2 * (sixth.square() - sixth).sum((-1, -2))
    factor = 24 * (2 * sixth.square() - sixth) / squares
    return energy, (factor.unsqueeze(-1) * differences).sum(-2)


def metropolis_walk(
    count: int, atoms: int, temperature: float, radius: float, sweeps: int, seed: int
) -> Tensor:
    """Positions [count, atoms, 3] in float64, each the end of a walk of its own, centred at the origin.

    A Metropolis walk with density exp(-E / temperature) where all atoms are within `radius` of their
    centre, and 0 elsewhere, so that no atom evaporates. It moves one atom at a time; a sweep moves each
    once. In the first half the temperature falls from HOT, geometrically, so that the result does not
    depend on where a walk begins.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    x = uniform(count, atoms, 3) * radius / 2
    centre = x.mean(1)
    others = [[j for j in range(atoms) if j != k] for k in range(atoms)]
    for sweep in range(sweeps):
        cooled = min(1.0, 2 * sweep / sweeps)
        current = HOT ** (1 - cooled) * temperature**cooled
        moves = STEP * (2 * uniform(atoms, count, 3) - 1)
        allowed = -current * uniform(atoms, count).log()
        for k in range(atoms):
            both = torch.stack([x[:, k], x[:, k] + moves[k]])
            sixth = (both.unsqueeze(2) - x[:, others[k]]).square().sum(-1) ** -3
            before, after = 4 * (sixth.square() - sixth).sum(-1)
            new, shifted = x.clone(), centre + moves[k] / atoms
            new[:, k] = both[1]
            inside = (new - shifted[:, None]).square().sum(-1).amax(1) <= radius**2
            accepted = (inside & (after - before <= allowed[k]))[:, None]
            x[:, k] = torch.where(accepted, both[1], both[0])
            centre = torch.where(accepted, shifted, centre)
    return x - x.mean(1, keepdim=True)


@cache
def structures(
    count: int, atoms: int, temperature: float, radius: float, sweeps: int, seed: int
) -> Structures:
    """The clusters that belong to a seed, with energies and forces computed in float64, as float32."""
    x = metropolis_walk(count, atoms, temperature, radius, sweeps, seed)
    return Structures(*(part.float() for part in (x, *energies_and_forces(x))))
