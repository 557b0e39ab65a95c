"""A deep autoencoder trained by Gauss-Newton steps, beside Adam with as many gradients."""

from copy import deepcopy
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import logs, runs
from experiments.checks import at_least, finite, hidden_widths, learning_rate
from experiments.data.digits import PIXELS, Images
from experiments.models.networks import mlp
from experiments.plots.digits import plot_race
from experiments.tables.curvature import race_table
from experiments.training.experiment import Experiment
from experiments.training.second_order import SecondOrderProblem

NEWTON, ADAM = "newton_cg", "adam"
LABELS = {NEWTON: "NewtonCG", ADAM: "Adam"}
# The cost of a loss in gradients: one pass through the network of three, which are forward, backward to
# the inputs, and backward to the weights.
LOSS_COST = 1 / 3


class Race(Experiment):
    """Two autoencoders from the same start: one takes Newton steps, the other many steps of Adam.

    A training step is one step of NewtonCG on the batch, and then steps of Adam, on adam_batch of its
    images each, until both have cost the same. The cost is counted in gradients of the whole batch: a
    loss counts a third, as it is one pass of three; a Gauss-Newton product one (J v takes one pass,
    J^T w two), times the fraction of the images that it uses; a step of Adam adam_batch / batch.

    Args:
        hidden: Widths of the hidden layers, from pixels to pixels.
        act: Their activation.
        curvature_batch: Images that the matrix of a step is computed on; null for all.
        damping: Initial damping of `hoglib.curvature.NewtonCG`.
        max_iter: Its largest number of iterations of conjugate gradients.
        stagnation_tol: Its relative progress below which conjugate gradients stop.
        adam_batch: Images of a step of Adam.
        adam_lr: Learning rate of Adam.
    """

    evaluations: Tensor

    def __init__(
        self,
        hidden: list[int] | None = None,
        act: str = "tanh",
        curvature_batch: int | None = 256,
        damping: float = 0.1,
        max_iter: int = 100,
        stagnation_tol: float = 0.01,
        adam_batch: int = 128,
        adam_lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        widths = hidden_widths(hidden, [256, 128, 64, 32, 4, 32, 64, 128, 256])
        if curvature_batch is not None:
            at_least("curvature_batch", curvature_batch, 1)
        self.curvature_batch = curvature_batch
        self.adam_batch = at_least("adam_batch", adam_batch, 1)
        self.adam_lr = learning_rate("adam_lr", adam_lr)
        self.newton: dict[str, Any] = {
            "damping": damping,
            "max_iter": max_iter,
            "stagnation_tol": stagnation_tol,
        }
        start = mlp([PIXELS, *widths, PIXELS], act)
        self.networks = nn.ModuleDict({NEWTON: deepcopy(start), ADAM: start})
        self.objective = hog.functional_loss(
            self.networks[NEWTON], reconstruction_error, forward=lambda network, x: network(x)
        )
        self.options = {
            "hidden": widths, "act": act, "curvature_batch": curvature_batch, **self.newton,
            "adam_batch": adam_batch, "adam_lr": adam_lr,
        }  # fmt: skip
        # The cost of both so far, in gradients; and in seconds, which differ from run to run.
        self.register_buffer("evaluations", torch.zeros(2, dtype=torch.float64))
        self.seconds = [0.0, 0.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.networks[NEWTON](x)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.networks[ADAM].parameters(), lr=self.adam_lr)
        return [hog.curvature.NewtonCG(self.objective, **self.newton), adam]

    def training_step(self, batch: Images, batch_idx: int) -> None:
        started = self._now()
        self.evaluations[0] += self._newton_step(batch.x)
        between = self._now()
        while self.evaluations[1] < self.evaluations[0]:
            self._adam_step(batch.x)
        self.seconds[0] += between - started
        self.seconds[1] += self._now() - between
        held_out = self.trainer.datamodule.held_out.x.to(batch.x)  # type: ignore[attr-defined]
        values: dict[str, Any] = {}
        for i, name in enumerate(self.networks):
            values[f"train/{name}"] = self.error(name, batch.x)
            values[f"val/{name}"] = self.error(name, held_out)
            values[f"gradients/{name}"] = self.evaluations[i].item()
            values[f"seconds/{name}"] = self.seconds[i]
        for name in self.networks:
            finite(f"loss of {name}", values[f"train/{name}"], "Lower adam_lr, or raise damping.")
        for key, value in values.items():
            self.log(key, value, prog_bar=key.startswith("val/"), batch_size=len(batch.x))

    def _newton_step(self, x: Tensor) -> float:
        """Take a step of NewtonCG; returns its cost, in gradients of the whole batch."""
        count = len(x) if self.curvature_batch is None else min(self.curvature_batch, len(x))
        part = x if count == len(x) else random_part(x, count)
        optimizer: Any = self.optimizers()[0]  # type: ignore[index]
        optimizer.step(lambda: x, curvature=part)
        info = optimizer.optimizer.info
        self.log("damping", info.damping, batch_size=len(x))
        return 1 + LOSS_COST * info.values + info.products * count / len(x)

    def _adam_step(self, x: Tensor) -> None:
        count = min(self.adam_batch, len(x))
        part = random_part(x, count)
        # not Lightning's wrapper, which would count it as a step of the run
        optimizer = self.optimizers(use_pl_optimizer=False)[1]  # type: ignore[index]
        optimizer.zero_grad()
        reconstruction_error(self.networks[ADAM](part), part).backward()
        optimizer.step()
        self.evaluations[1] += count / len(x)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["seconds"] = list(self.seconds)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("trained_with", {})
        if "progress" in saved:  # the option's name in earlier checkpoints
            saved["stagnation_tol"] = saved.pop("progress")
        super().on_load_checkpoint(checkpoint)
        self.seconds = list(checkpoint["seconds"])

    def second_order_problem(self, batch: Images) -> SecondOrderProblem:
        """The reconstruction error, by the parameters of the network that Newton steps train."""
        return self.objective, hog.trainable_params(self.networks[NEWTON]), batch.x

    def validation_step(self, batch: Images, batch_idx: int) -> None:
        """Held-out errors, for the command `validate`; in a fit every step logs them."""
        values = {f"val/{name}": self.error(name, batch.x) for name in self.networks}
        self.log_dict(values, batch_size=len(batch.x))

    def test_step(self, batch: Images, batch_idx: int) -> None:
        folder = runs.run_folder(self.trainer)
        errors = {name: self.error(name, batch.x).item() for name in self.networks}
        self.log_dict({f"test/{key}": e for key, e in errors.items()}, batch_size=len(batch.x))
        curves = logs.curves(folder)
        table = race_table(curves, {name: (LABELS[name], e) for name, e in errors.items()})
        images = {"digits": batch.x}
        with torch.no_grad():
            images |= {LABELS[name]: self.networks[name](batch.x) for name in errors}
        picture = plot_race(folder / "race.png", curves, LABELS, images)
        runs.write_report(folder, table, picture)

    @torch.no_grad()
    def error(self, name: str, x: Tensor) -> Tensor:
        return reconstruction_error(self.networks[name](x), x)


def reconstruction_error(outputs: Tensor, images: Tensor) -> Tensor:
    """1/4 |outputs - images|^2, the mean over images: the squared error of pixels from 0 to 1."""
    return (outputs - images).square().sum(1).mean() / 4


def random_part(x: Tensor, count: int) -> Tensor:
    """Random rows, drawn on the CPU, so that a run on a GPU draws the same."""
    return x[torch.randperm(len(x))[:count].to(x.device)]
