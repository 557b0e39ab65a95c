"""Potentials of clusters, learned from energies alone and from energies and forces."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import runs
from experiments.checks import hidden_widths, learning_rate, positive
from experiments.forces.clusters import Structures, energies_and_forces
from experiments.forces.plots import Cut, plot_forces
from experiments.forces.potential import Potential, move_atom, outermost
from experiments.forces.table import Errors, forces_table
from experiments.shared.experiment import Experiment
from experiments.shared.second_order import SecondOrderProblem, sum_by_parameters_and_inputs

ENERGIES, BOTH = "energies", "both"
LABELS = {ENERGIES: "energies", BOTH: "energies and forces"}
UNTRAINED = "mean energy, no forces"
CUT_POINTS = 200  # of a cut through the energy


class Potentials(Experiment):
    """Two potentials from the same start on the same clusters: one learns from energies, one from both.

        energies   1/N sum_n (E_n - E(x_n))^2 / var E
        both       that + w / (3 N atoms) sum_n |F_n + dE(x_n)/dx_n|^2 / mean F^2

    with the variance of the energies and the mean square of the force components of the training set,
    so that both terms are 1 for a potential that predicts the mean energy and no forces.

    Args:
        weight: w.
        hidden: Widths of the hidden layers of the network of an atom.
        act: Their activation.
        features: Features of an atom.
        lr: Learning rate of Adam, which falls linearly to zero over the run.
    References:
        Behler and Parrinello, 2007; both terms: Schütt et al., SchNet, 2017, eq. 4.
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
        widths = hidden_widths(hidden, [64, 64])
        self.weight = positive("weight", weight)
        self.lr = learning_rate("lr", lr)
        start = Potential(features, widths, act)
        self.potentials = nn.ModuleDict({ENERGIES: deepcopy(start), BOTH: start})
        self.register_buffer("energy_variance", torch.ones(()))
        self.register_buffer("force_square", torch.ones(()))
        self.options: dict[str, Any] = {
            "weight": weight, "hidden": widths, "act": act, "features": features,
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.potentials[BOTH](x)

    def on_fit_start(self) -> None:
        """Compute the scales of the training set; checkpoints hold them, for a test without a fit."""
        clusters: Structures = self.data.train
        clusters = Structures(*(part.to(self.device) for part in clusters))
        self.energy_variance.copy_(clusters.energy.var())
        self.force_square.copy_(clusters.forces.square().mean())
        for potential in self.potentials.values():
            potential.scale_to(clusters)  # type: ignore[operator]

    def training_step(self, batch: Structures, batch_idx: int) -> Tensor:
        losses = {name: self.loss(name, batch) for name in self.potentials}
        return self.sum_of(losses, "Lower lr.", len(batch.x))

    def loss(self, name: str, batch: Structures) -> Tensor:
        potential = self.potentials[name]
        if name == ENERGIES:
            return (potential(batch.x) - batch.energy).square().mean() / self.energy_variance
        energy, forces = hog.penalties.forces(potential, batch.x)
        of_energy = (energy - batch.energy).square().mean() / self.energy_variance
        of_forces = (forces - batch.forces).square().mean() / self.force_square
        return of_energy + self.weight * of_forces

    def second_order_problem(self, batch: Structures) -> SecondOrderProblem:
        """The sum of the energies of clusters, by the parameters and by the positions."""
        return sum_by_parameters_and_inputs(self.potentials[BOTH], batch.x)

    def validation_step(self, batch: Structures, batch_idx: int) -> None:
        for name, errors in self.errors(batch).items():
            values = {f"val/{part}/{name}": e.mean() for part, e in errors._asdict().items()}
            self.log_dict(values, batch_size=len(batch.x))

    def test_step(self, batch: Structures, batch_idx: int) -> None:
        folder = runs.run_folder(self.trainer)
        train: Structures = self.data.train
        errors = self.errors(batch)
        mean_energy = train.energy.mean().to(batch.energy).expand_as(batch.energy)
        rows = {LABELS[name]: errors[name] for name in self.potentials}
        rows[UNTRAINED] = errors_of(batch, mean_energy, torch.zeros_like(batch.forces))
        table = forces_table(rows, batch.x.shape[1], len(train.x))
        forces = {LABELS[name]: self.predict(name, batch.x)[1].cpu() for name in self.potentials}
        cut = self._cut(batch, train)
        picture = plot_forces(folder / "forces.png", batch.forces.cpu(), forces, cut)
        runs.write_report(folder, table, picture)
        for name, of in errors.items():
            values = {f"test/{part}/{name}": e.mean() for part, e in of._asdict().items()}
            self.log_dict(values, batch_size=len(batch.x))

    def errors(self, batch: Structures) -> dict[str, Errors]:
        return {name: errors_of(batch, *self.predict(name, batch.x)) for name in self.potentials}

    def predict(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Energies and forces, without a graph, also in inference mode."""
        return hog.penalties.forces(self.potentials[name], x)

    def _cut(self, held_out: Structures, train: Structures) -> Cut:
        """Energies where the outermost atom of the held-out cluster of lowest energy is moved."""
        lowest = held_out.x[held_out.energy.argmin()].cpu()
        atom, start = (part[0].item() for part in outermost(lowest[None]))
        distances = outermost(train.x)[1]
        grid = torch.linspace(0.8 * start, float(distances.max()), CUT_POINTS)
        path = move_atom(lowest, int(atom), grid)
        found = {name: E(path.to(self.device)).cpu() for name, E in self.potentials.items()}
        energies = {LABELS[name]: energy for name, energy in found.items()}
        truth = energies_and_forces(path.double())[0]
        return Cut(grid, truth, energies, start, distances)


def errors_of(batch: Structures, energy: Tensor, forces: Tensor) -> Errors:
    """|E_n - energy_n| / atoms, and the mean of |F_n - forces_n| over atoms and directions."""
    atoms = batch.x.shape[1]
    return Errors(
        ((energy - batch.energy).abs() / atoms).cpu(),
        (forces - batch.forces).abs().mean((1, 2)).cpu(),
    )
