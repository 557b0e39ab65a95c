"""An interatomic potential: the energy of a cluster as a sum over its atoms."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments.checks import at_least
from experiments.forces.clusters import Structures
from experiments.shared.networks import mlp

NEAREST, FARTHEST = 0.8, 3.2  # centres of the features, in sigma: of all distances that matter


class Potential(nn.Module):
    """The energy of a cluster, a sum over its atoms of a network of the distances to the others.

        E = sum_i (e + s f((G_i - m) / d))        G_im = sum_(j != i) exp(-(r_ij - c_m)^2 / (2 w^2))

    The centres c_m are spaced evenly by w from NEAREST to FARTHEST; `scale_to` sets e, s, m and d.
    E is invariant to translations, rotations, reflections and permutations of the atoms, and has
    derivatives of every order where no two atoms coincide.

    Args:
        features: Number of features G_i of an atom, at least 2.
        hidden: Widths of the hidden layers of f.
        act: Activation of f.
    Shape:
        - positions: [n, atoms, 3], for any number of atoms from 2
        - energies: [n]
    References:
        Behler and Parrinello, Generalized Neural-Network Representation of High-Dimensional
        Potential-Energy Surfaces, 2007, eq. 1 and 4, without their cutoff and angles.
    """

    centres: Tensor
    level: Tensor
    spread: Tensor
    middle: Tensor
    width: Tensor

    def __init__(self, features: int, hidden: Sequence[int], act: str) -> None:
        super().__init__()
        self.network = mlp([at_least("features", features, 2), *hidden, 1], act)
        self.register_buffer("centres", torch.linspace(NEAREST, FARTHEST, features))
        self.register_buffer("level", torch.zeros(()))  # e
        self.register_buffer("spread", torch.ones(()))  # s
        self.register_buffer("middle", torch.zeros(features))  # m
        self.register_buffer("width", torch.ones(features))  # d

    def features(self, x: Tensor) -> Tensor:
        """G [n, atoms, features]."""
        atoms = torch.arange(x.shape[1], device=x.device)
        others = (atoms[:, None] + atoms[1:]) % len(atoms)
        distances = hog.ops.square(x[:, :, None] - x[:, others]).sum(-1).sqrt()
        z = (distances.unsqueeze(-1) - self.centres) / (self.centres[1] - self.centres[0])
        return hog.ops.exp(-hog.ops.square(z) / 2).sum(2)

    def forward(self, x: Tensor) -> Tensor:
        scaled = (self.features(x) - self.middle) / self.width
        return (self.level + self.spread * self.network(scaled)[..., 0]).sum(1)

    @torch.no_grad()
    def scale_to(self, clusters: Structures) -> None:
        """Scale features to mean 0 and variance 1, and energies to those of the clusters."""
        features = self.features(clusters.x)
        atoms = clusters.x.shape[1]
        self.middle.copy_(features.mean((0, 1)))
        # A feature that is constant in training must not explode where it is not constant in a test.
        self.width.copy_(features.std((0, 1)).clamp(min=1e-2))
        self.level.copy_(clusters.energy.mean() / atoms)
        self.spread.copy_(clusters.energy.std() / atoms**0.5)


def outermost(x: Tensor) -> tuple[Tensor, Tensor]:
    """Which atom of clusters [n, atoms, 3] is farthest from the centre of the others, and how far."""
    atoms = x.shape[1]
    # the centre of the others is farther than that of all, by atoms / (atoms - 1)
    distances = (x - x.mean(1, keepdim=True)).square().sum(-1).sqrt() * atoms / (atoms - 1)
    farthest = distances.max(1)
    return farthest.indices, farthest.values


def move_atom(cluster: Tensor, atom: int, distances: Tensor) -> Tensor:
    """Copies of a cluster in which one atom is at given distances from the centre of the others.

    Args:
        cluster: Positions [atoms, 3].
        atom: Number of the atom, which is moved along the line from the centre through its position.
        distances: Distances [m].
    Returns:
        Positions [m, atoms, 3].
    """
    centre = (cluster.sum(0) - cluster[atom]) / (len(cluster) - 1)
    direction = torch.nn.functional.normalize(cluster[atom] - centre, dim=0)
    path = cluster.repeat(len(distances), 1, 1)
    path[:, atom] = centre + distances[:, None] * direction
    return path
