"""Helium by variational Monte Carlo: a wave function whose kinetic energy is a Laplacian."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments import logs, runs
from experiments.checks import at_least, finite, hidden_widths, learning_rate
from experiments.helium.plots import plot_helium
from experiments.helium.table import helium_table
from experiments.helium.wave_function import WaveFunction, potential
from experiments.shared.experiment import Experiment
from experiments.shared.layout import mean_and_error
from experiments.shared.second_order import SecondOrderProblem
from experiments.shared.stream import StreamData, seeded

LogPsi = Callable[[Tensor], Tensor]
OUTLIERS = 5.0  # mean absolute deviations, where the local energies of a training step are clipped


def local_energy(log_psi: LogPsi, x: Tensor, create_graph: bool | None = None) -> Tensor:
    """E_L = -1/2 (Lap log psi + |grad log psi|^2) + V, that is (H psi) / psi, at positions [n, 6]."""
    _, lap, gradient = hog.laplacian(log_psi, x, return_gradient=True, create_graph=create_graph)
    return -(lap + gradient.square().sum(1)) / 2 + potential(x)


def metropolis(
    log_psi: LogPsi, x: Tensor, moves: int, width: float, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Moves of walkers [n, 6] that leave psi^2 invariant, and the part of them that was accepted."""
    accepted = 0.0
    with torch.no_grad():
        value = log_psi(x)
        for _ in range(moves):
            proposal = x + width * torch.randn(x.shape, generator=generator).to(x)
            proposed = log_psi(proposal)
            u = torch.rand(len(x), generator=generator).to(x)
            taken = u < (2 * (proposed - value)).exp()
            x = torch.where(taken[:, None], proposal, x)
            value = torch.where(taken, proposed, value)
            accepted += taken.float().mean().item() / moves
    return x, accepted


def energy_loss(log_psi: LogPsi, x: Tensor, energies: Tensor) -> Tensor:
    """A loss whose gradient is that of the energy: 2 mean of (E_L - E) d log psi / d theta."""
    return 2 * ((energies - energies.mean()) * log_psi(x)).mean()


class Helium(Experiment):
    """The ground state of helium: Adam on the energy of walkers, which are sampled from psi^2.

        E(theta) = <psi| H |psi> / <psi|psi> = mean of E_L over psi^2  >=  E_0

    A training step moves the walkers, clips their local energies, and takes a step of Adam.

    Args:
        hidden: Widths of the hidden layers of the network.
        walkers: Number of walkers.
        moves: Metropolis moves of each in a training step.
        lr: Learning rate of Adam, which falls linearly to zero.
        samples: Of each walker, after the training, for the energy.
    References:
        McMillan, Ground State of Liquid He4, 1965; the gradient: Umrigar and Filippi, 2005.
        Li et al., A Computational Framework for Neural Network-based Variational Monte Carlo with
        Forward Laplacian, 2024.
    """

    walkers: Tensor
    width: Tensor

    shared = ""
    one_process = "whose walkers are one chain of random moves"

    def __init__(
        self,
        hidden: list[int] | None = None,
        walkers: int = 1000,
        moves: int = 10,
        lr: float = 1e-2,
        samples: int = 300,
    ) -> None:
        super().__init__()
        widths = hidden_widths(hidden, [24, 24])
        self.moves = at_least("moves", moves, 1)
        self.lr = learning_rate("lr", lr)
        self.samples = at_least("samples", samples, 2)
        self.log_psi = WaveFunction(widths)
        start = torch.randn(at_least("walkers", walkers, 2), 6)
        self.register_buffer("walkers", start)
        self.register_buffer("width", torch.tensor(0.4))
        self.options = {"hidden": widths, "walkers": walkers, "moves": moves, "lr": lr}

    def forward(self, x: Tensor) -> Tensor:
        return self.log_psi(x)

    def training_step(self, batch: torch.Generator, batch_idx: int) -> Tensor:
        moves = self.moves if self.trainer.global_step else 20 * self.moves  # from a random start
        x, accepted = metropolis(self.log_psi, self.walkers, moves, self.width.item(), batch)
        self.walkers.copy_(x)
        self.width.mul_(1.05 if accepted > 0.5 else 1 / 1.05)
        E = local_energy(self.log_psi, x, create_graph=False)
        finite("energy", E.mean(), "Lower lr.")
        middle = E.median()
        spread = OUTLIERS * (E - middle).abs().mean()
        energy, error = mean_and_error(E)
        values: dict[str, Any] = {
            "train/energy": energy,
            "train/error": error,
            "train/variance": E.var(),
            "accepted": accepted,
        }
        self.log_dict(values, prog_bar=True, batch_size=len(x))
        return energy_loss(self.log_psi, x, E.clamp(middle - spread, middle + spread))

    def second_order_problem(self, batch: torch.Generator) -> SecondOrderProblem:
        """The variance of the local energies, by the parameters of the wave function."""
        loss = hog.functional_loss(
            self.log_psi, lambda energies, _: energies.var(), forward=local_energy
        )
        return loss, hog.trainable_params(self.log_psi), self.walkers

    def validation_step(self, batch: torch.Generator, batch_idx: int) -> None:
        energies = local_energy(self.log_psi, self.walkers, create_graph=False)
        self.log("val/energy", energies.mean(), batch_size=len(energies))

    def test_step(self, batch: torch.Generator, batch_idx: int) -> None:
        x, sampled = self.walkers, []
        for _ in range(self.samples):
            x, accepted = metropolis(self.log_psi, x, 2 * self.moves, self.width.item(), batch)
            sampled.append(local_energy(self.log_psi, x, create_graph=False).double())
        E = torch.stack(sampled)
        energy, error = mean_and_error(E.mean(0))  # the walkers are independent
        self.log_dict({"test/energy": energy, "test/error": error}, batch_size=len(x))
        folder = runs.run_folder(self.trainer)
        curves = logs.curves(folder)
        table = helium_table(energy, error, E.var().item(), E.numel(), accepted)
        means, hole = E.mean(1).cpu(), self.coulomb_hole()
        picture = plot_helium(folder / "helium.png", curves, means, (energy, error), hole)
        runs.write_report(folder, table, picture)

    @torch.no_grad()
    def coulomb_hole(self, size: int = 121, end: float = 1.5) -> Tensor:
        """psi^2 with the second electron at (x, y, 0), over that with it at (-x, -y, 0), the first one
        at (1/2, 0, 0): 1 without correlation. [size, size], by x and y."""
        axis = torch.linspace(-end, end, size)
        plane = torch.cartesian_prod(axis, axis)
        x = torch.zeros(2, len(plane), 6)
        x[..., 0], x[0, :, 3:5], x[1, :, 3:5] = 0.5, plane, -plane
        there, mirrored = self.log_psi(x.flatten(0, 1).to(self.walkers)).unflatten(0, (2, -1))
        return (2 * (there - mirrored)).exp().reshape(size, size).cpu()


class Moves(StreamData):
    """The random numbers of each step.

    Args:
        iterations: Steps in the run.
        seed: Seed of the moves. Default: that of the run.
    """

    def __init__(self, iterations: int = 1000, seed: int | None = None) -> None:
        super().__init__(iterations, seed)

    def batch_of(self, seed: int) -> torch.Generator:
        return seeded(seed)

    def test_batch(self) -> torch.Generator:
        return seeded(self.seed * 2**20 + self.iterations)
