"""Networks from one start, each trained by an optimizer of its own, at one cost."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import nan
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from experiments.checks import finite
from experiments.logs import Points
from experiments.shared.experiment import Experiment

NEWTON, PRECONDITIONED, KFAC, ADAM = "newton_cg", "newton_kfac", "kfac", "adam"
LEVENBERG_MARQUARDT, LBFGS = "levenberg_marquardt", "lbfgs"
LABELS = {
    NEWTON: "NewtonCG", PRECONDITIONED: "NewtonCG, KFAC", KFAC: "KFAC", ADAM: "Adam",
    LEVENBERG_MARQUARDT: "Levenberg-Marquardt", LBFGS: "L-BFGS",
}  # fmt: skip
# The cost of a loss in gradients: one pass through the network of three, which are forward, backward to
# the inputs, and backward to the weights.
LOSS_COST = 1 / 3


class Raced(Experiment, ABC):
    """A training step is a step of the first optimizer, and then steps of each of the others until it
    has cost as much, in gradients of the whole batch.

    Attributes:
        networks: The networks by the names of their optimizers.
        evaluations: The cost of each so far, which checkpoints hold, as they do the seconds.
    """

    evaluations: Tensor
    shared = ""

    def start_race(self, networks: dict[str, torch.nn.Module]) -> None:
        """Take the networks, each of which has cost nothing."""
        self.automatic_optimization = False
        self.networks = torch.nn.ModuleDict(networks)
        self.register_buffer("evaluations", torch.zeros(len(networks), dtype=torch.float64))
        self.seconds = [0.0] * len(networks)

    @abstractmethod
    def losses(self, batch: Any) -> dict[str, Tensor]:
        """The training loss of each network."""

    @abstractmethod
    def error(self, name: str, held_out: Any) -> Tensor:
        """The error of a network on held-out data."""

    def race(self, batch: Any, held_out: Any, steps: Mapping[str, Callable[[], float]]) -> None:
        """Take the steps, which return their cost, and log what they have given."""
        for i, step in enumerate(steps.values()):
            started = self._now()
            if i == 0:
                self.evaluations[0] += step()
            while self.evaluations[i] < self.evaluations[0]:
                self.evaluations[i] += step()
            self.seconds[i] += self._now() - started
        for i, (name, loss) in enumerate(self.losses(batch).items()):
            finite(f"loss of {name}", loss, "Lower adam_lr, or raise damping.")
            values: dict[str, Any] = {"train": loss.detach(), "val": self.error(name, held_out)}
            values |= {"gradients": self.evaluations[i].item(), "seconds": self.seconds[i]}
            for key, value in values.items():
                self.log(f"{key}/{name}", value, prog_bar=key == "val", batch_size=1)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Held-out errors, for the command `validate`; in a fit every step logs them."""
        self.log_dict(
            {f"val/{name}": self.error(name, batch) for name in self.networks}, batch_size=1
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["seconds"] = list(self.seconds)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.seconds = list(checkpoint["seconds"])


def spent(curves: dict[str, Points], name: str) -> list[str]:
    """What an optimizer has cost at the end: gradients and seconds, as cells of a table."""
    last = [curves.get(f"{what}/{name}", [(0, nan)])[-1][1] for what in ("gradients", "seconds")]
    return ["-" if value != value else f"{value:.{digits}f}" for digits, value in enumerate(last)]
