"""Potentials of clusters, learned from energies alone and from energies and forces."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import plots, runs, tables
from experiments.belonging import Belonging
from experiments.data.clusters import Structures, energies_and_forces
from experiments.double import by_parameters_and_inputs
from experiments.networks import mlp
from experiments.schedules import stepwise
from hoglib._core import validation

ENERGIES, BOTH = "energies", "both"
LABELS = {ENERGIES: "energies", BOTH: "energies and forces"}
NOTHING = "mean energy, no forces"
NEAREST, FARTHEST = 0.8, 3.2  # centres of the features, in sigma: of all distances that matter
POINTS = 200  # of a cut through the energy


class Potential(nn.Module):
    """The energy of a cluster, a sum over its atoms of a network of the distances to the others.

        E = sum_i (e + s f((G_i - m) / d))        G_im = sum_(j != i) exp(-(r_ij - c_m)^2 / (2 w^2))

    c_m are evenly from NEAREST to FARTHEST, w is their distance; e, s, m and d are those of training
    clusters (`scale_to`). It stays as it is where a cluster is moved, turned or mirrored and where
    atoms change places; it has derivatives of any order where no two atoms are in one place.

    Shapes: positions [n, atoms, 3] to energies [n], for any number of atoms from 2.
    Source: Behler and Parrinello, Generalized Neural-Network Representation of High-Dimensional
    Potential-Energy Surfaces, 2007, eq. 1 and 4, without their cutoff and angles.
    """

    centres: Tensor
    level: Tensor
    spread: Tensor
    middle: Tensor
    width: Tensor

    def __init__(self, features: int, hidden: list[int], act: str) -> None:
        super().__init__()
        self.network = mlp([validation.at_least("features", features, 2), *hidden, 1], act)
        self.register_buffer("centres", torch.linspace(NEAREST, FARTHEST, features))
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))
        self.register_buffer("middle", torch.zeros(features))
        self.register_buffer("width", torch.ones(features))

    def features(self, x: Tensor) -> Tensor:
        """G [n, atoms, features]."""
        atoms = torch.arange(x.shape[1], device=x.device)
        others = (atoms[:, None] + atoms[1:]) % len(atoms)
        distances = hog.ops.square(x[:, :, None] - x[:, others]).sum(-1).sqrt()
        apart = (distances.unsqueeze(-1) - self.centres) / (self.centres[1] - self.centres[0])
        return hog.ops.exp(-hog.ops.square(apart) / 2).sum(2)

    def forward(self, x: Tensor) -> Tensor:
        scaled = (self.features(x) - self.middle) / self.width
        return (self.level + self.spread * self.network(scaled)[..., 0]).sum(1)

    @torch.no_grad()
    def scale_to(self, clusters: Structures) -> None:
        """Features with mean 0 and variance 1, an energy about as large as those of the clusters."""
        found = self.features(clusters.x)
        atoms = clusters.x.shape[1]
        self.middle.copy_(found.mean((0, 1)))
        # a distance that none has is no feature; what is far from it in a test must not explode
        self.width.copy_(found.std((0, 1)).clamp(min=1e-2))
        self.level.copy_(clusters.energy.mean() / atoms)
        self.spread.copy_(clusters.energy.std() / atoms**0.5)


class Errors(NamedTuple):
    """Of each cluster [n]: that of its energy by atom, and the mean of those of 3 atoms forces."""

    energy: Tensor
    force: Tensor


class Potentials(Belonging):
    """Two potentials from the same start on the same clusters: one learns from energies, one from both.

        energies   1/N sum_n (E_n - E(x_n))^2 / var E
        both       that + w / (3 N atoms) sum_n |F_n + dE(x_n)/dx_n|^2 / mean F^2

    with the variance of the energies and the mean square of the force components of the training set,
    so that both terms are 1 where nothing is known.

    weight: w; hidden, act: of the network of an atom; features: that it sees; lr: of Adam, which falls
    linearly to zero over the run.
    Source: Behler and Parrinello, 2007; both terms: Schütt et al., SchNet, 2017, eq. 4.
    """

    energy_variance: Tensor
    force_square: Tensor

    def __init__(
        self,
        weight: float = 1.0,
        hidden: list[int] | None = None,
        act: str = "swish",
        features: int = 24,
        lr: float = 3e-3,
    ) -> None:
        super().__init__()
        widths = [64, 64] if hidden is None else hidden
        for width in widths:
            validation.at_least("hidden", width, 1)
        self.weight = validation.positive("weight", weight)
        self.lr = validation.positive("lr", lr)
        start = Potential(features, widths, act)
        self.potentials = nn.ModuleDict({ENERGIES: deepcopy(start), BOTH: start})
        self.register_buffer("energy_variance", torch.ones(()))
        self.register_buffer("force_square", torch.ones(()))
        self.options: dict[str, Any] = {
            "weight": weight, "hidden": list(widths), "act": act, "features": features,
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.potentials[BOTH](x)

    def configure_optimizers(self) -> Any:
        """One Adam for both: its steps are by element, so each has those of its own loss."""
        return stepwise(self, torch.optim.Adam(self.parameters(), lr=self.lr))

    def on_fit_start(self) -> None:
        """The scales of the training set, which checkpoints hold too, for those who test alone."""
        clusters: Structures = self.trainer.datamodule.train  # type: ignore[attr-defined]
        clusters = Structures(*(part.to(self.device) for part in clusters))
        self.energy_variance.copy_(clusters.energy.var())
        self.force_square.copy_(clusters.forces.square().mean())
        for potential in self.potentials.values():
            potential.scale_to(clusters)  # type: ignore[operator]

    def training_step(self, batch: Structures, batch_idx: int) -> Tensor:
        losses = {name: self.loss(name, batch) for name in self.potentials}
        for name, loss in losses.items():
            validation.finite(f"loss of {name}", loss, "Lower lr.")
        values = {f"train/{name}": loss.detach() for name, loss in losses.items()}
        self.log_dict(values, prog_bar=True, batch_size=len(batch.x))
        return torch.stack([*losses.values()]).sum()

    def loss(self, name: str, batch: Structures) -> Tensor:
        potential = self.potentials[name]
        if name == ENERGIES:
            return (potential(batch.x) - batch.energy).square().mean() / self.energy_variance
        energy, forces = hog.penalties.forces(potential, batch.x)
        of_energy = (energy - batch.energy).square().mean() / self.energy_variance
        of_forces = (forces - batch.forces).square().mean() / self.force_square
        return of_energy + self.weight * of_forces

    def second_order_problem(self, batch: Structures) -> tuple[Any, dict[str, Tensor], None]:
        """The sum of the energies of clusters, by the parameters and by the positions."""
        return by_parameters_and_inputs(self.potentials[BOTH], batch.x)

    def predicted(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Energies and forces, without a graph, also in inference mode."""
        return hog.penalties.forces(self.potentials[name], x)

    def errors(self, batch: Structures) -> dict[str, Errors]:
        return {name: errors(batch, *self.predicted(name, batch.x)) for name in self.potentials}

    def validation_step(self, batch: Structures, batch_idx: int) -> None:
        for name, found in self.errors(batch).items():
            values = {f"val/{part}/{name}": e.mean() for part, e in found._asdict().items()}
            self.log_dict(values, batch_size=len(batch.x))

    def test_step(self, batch: Structures, batch_idx: int) -> None:
        folder = runs.run_folder(self.trainer)
        train: Structures = self.trainer.datamodule.train  # type: ignore[attr-defined]
        found = self.errors(batch)
        known = train.energy.mean().to(batch.energy).expand_as(batch.energy)
        rows = {LABELS[name]: found[name] for name in self.potentials}
        rows[NOTHING] = errors(batch, known, torch.zeros_like(batch.forces))
        table = tables.forces(rows, batch.x.shape[1], len(train.x))
        print(f"\n{table}\n")
        (folder / "table.txt").write_text(table + "\n")
        forces = {LABELS[name]: self.predicted(name, batch.x)[1].cpu() for name in self.potentials}
        picture = plots.forces(
            batch.forces.cpu(), forces, self._cut(batch, train), folder / "forces.png"
        )
        print(f"Saved {folder / 'table.txt'}, {picture}")
        for name, of in found.items():
            values = {f"test/{part}/{name}": e.mean() for part, e in of._asdict().items()}
            self.log_dict(values, batch_size=len(batch.x))

    def _cut(self, held_out: Structures, train: Structures) -> "plots.Cut":
        """The energy where the outermost atom of the held-out cluster of lowest energy is moved."""
        lowest = held_out.x[held_out.energy.argmin()].cpu()
        outer, start = (part[0].item() for part in outermost(lowest[None]))
        distances = outermost(train.x)[1]
        grid = torch.linspace(0.8 * start, float(distances.max()), POINTS)
        path = moved(lowest, int(outer), grid)
        energies = {
            LABELS[name]: self.potentials[name](path.to(self.device)).cpu()
            for name in self.potentials
        }
        truth = energies_and_forces(path.double())[0]
        return plots.Cut(grid, truth, energies, start, distances)


def errors(batch: Structures, energy: Tensor, forces: Tensor) -> Errors:
    """|E_n - energy_n| / atoms, and the mean of |F_n - forces_n| over atoms and directions."""
    atoms = batch.x.shape[1]
    return Errors(
        ((energy - batch.energy).abs() / atoms).cpu(),
        (forces - batch.forces).abs().mean((1, 2)).cpu(),
    )


def outermost(x: Tensor) -> tuple[Tensor, Tensor]:
    """Which atom of clusters [n, atoms, 3] is farthest from the centre of the others, and how far."""
    atoms = x.shape[1]
    # from the centre of all it is nearer, by one part in atoms
    apart = (x - x.mean(1, keepdim=True)).square().sum(-1).sqrt() * atoms / (atoms - 1)
    farthest = apart.max(1)
    return farthest.indices, farthest.values


def moved(cluster: Tensor, atom: int, distances: Tensor) -> Tensor:
    """Copies [m, atoms, 3] of a cluster [atoms, 3] with one atom at these distances [m] from the centre
    of the others, on the line that it is on."""
    centre = (cluster.sum(0) - cluster[atom]) / (len(cluster) - 1)
    direction = torch.nn.functional.normalize(cluster[atom] - centre, dim=0)
    path = cluster.repeat(len(distances), 1, 1)
    path[:, atom] = centre + distances[:, None] * direction
    return path
