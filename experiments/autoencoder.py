"""A deep autoencoder trained by Gauss-Newton steps, beside Adam with as many gradients."""

from copy import deepcopy
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import plots, runs, tables
from experiments.belonging import Belonging
from experiments.data.digits import PIXELS, Images
from experiments.networks import mlp
from hoglib._core import validation

NEWTON, ADAM = "newton_cg", "adam"
LABELS = {NEWTON: "NewtonCG", ADAM: "Adam"}
# Of a gradient, in passes through the network: forward, and backward to inputs and weights.
VALUE = 1 / 3


def reconstruction(outputs: Tensor, images: Tensor) -> Tensor:
    """1/4 |outputs - images|^2, the mean over images: a squared error of pixels from 0 to 1."""
    return (outputs - images).square().sum(1).mean() / 4


def of_images(network: nn.Module, x: Tensor) -> Any:
    return network(x)


class Race(Belonging):
    """Two autoencoders from the same start: one takes Newton steps, the other many of Adam.

    A training step is one step of NewtonCG on the batch, and then as many of Adam, on adam_batch of its
    images each, as bring it to as many gradients. What they cost, in gradients of the whole batch: a
    loss a third, as it is one pass of three; a Gauss-Newton product one (J v takes one pass, J^T w
    two), times the share of the images that it is of; a step of Adam adam_batch / batch.

    hidden, act: of the networks, from pixels to pixels; curvature_batch: images that the matrix of a
    step is of, null for all; damping, max_iter, stagnation_tol: of
    `hoglib.curvature.NewtonCG`; adam_batch, adam_lr: of Adam.
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
        widths = [256, 128, 64, 32, 4, 32, 64, 128, 256] if hidden is None else hidden
        for width in widths:
            validation.at_least("hidden", width, 1)
        if curvature_batch is not None:
            validation.at_least("curvature_batch", curvature_batch, 1)
        self.curvature_batch = curvature_batch
        self.adam_batch = validation.at_least("adam_batch", adam_batch, 1)
        self.adam_lr = validation.positive("adam_lr", adam_lr)
        self.newton: dict[str, Any] = {
            "damping": damping,
            "max_iter": max_iter,
            "stagnation_tol": stagnation_tol,
        }
        start = mlp([PIXELS, *widths, PIXELS], act)
        self.networks = nn.ModuleDict({NEWTON: deepcopy(start), ADAM: start})
        self.objective = hog.functional_loss(
            self.networks[NEWTON], reconstruction, forward=of_images
        )
        self.options = {
            "hidden": list(widths), "act": act, "curvature_batch": curvature_batch, **self.newton,
            "adam_batch": adam_batch, "adam_lr": adam_lr,
        }  # fmt: skip
        # in gradients, so far, of both; and seconds, which no two runs have alike
        self.register_buffer("evaluations", torch.zeros(2, dtype=torch.float64))
        self.seconds = [0.0, 0.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.networks[NEWTON](x)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.networks[ADAM].parameters(), lr=self.adam_lr)
        return [hog.curvature.NewtonCG(self.objective, **self.newton), adam]

    def training_step(self, batch: Images, batch_idx: int) -> None:
        started = self._now()
        spent = self._newton_step(batch.x)
        between = self._now()
        self.evaluations[0] += spent
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
            validation.finite(
                f"loss of {name}", values[f"train/{name}"], "Lower adam_lr, or raise damping."
            )
        for key, value in values.items():
            self.log(key, value, prog_bar=key.startswith("val/"), batch_size=len(batch.x))

    def _newton_step(self, x: Tensor) -> float:
        """What it cost, in gradients of the whole batch."""
        count = len(x) if self.curvature_batch is None else min(self.curvature_batch, len(x))
        # on the CPU, whose generator is the one that a run on any device has
        part = x if count == len(x) else x[torch.randperm(len(x))[:count].to(x.device)]
        optimizer: Any = self.optimizers()[0]  # type: ignore[index]
        optimizer.step(lambda: x, curvature=part)
        info = optimizer.optimizer.info
        self.log("damping", info.damping, batch_size=len(x))
        return 1 + VALUE * info.values + info.products * count / len(x)

    def _adam_step(self, x: Tensor) -> None:
        count = min(self.adam_batch, len(x))
        part = x[torch.randperm(len(x))[:count].to(x.device)]
        # past Lightning, which would count it as a step of the run
        optimizer = self.optimizers(use_pl_optimizer=False)[1]  # type: ignore[index]
        optimizer.zero_grad()
        reconstruction(self.networks[ADAM](part), part).backward()
        optimizer.step()
        self.evaluations[1] += count / len(x)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    @torch.no_grad()
    def error(self, name: str, x: Tensor) -> Tensor:
        return reconstruction(self.networks[name](x), x)

    def second_order_problem(self, batch: Images) -> tuple[Any, dict[str, Tensor], Tensor]:
        """The reconstruction error, by the parameters of the network that Newton steps train."""
        return self.objective, hog.trainable_params(self.networks[NEWTON]), batch.x

    def validation_step(self, batch: Images, batch_idx: int) -> None:
        """Both errors are in every row of metrics.csv already; `validate` asks for them alone."""
        values = {f"val/{name}": self.error(name, batch.x) for name in self.networks}
        self.log_dict(values, batch_size=len(batch.x))

    def test_step(self, batch: Images, batch_idx: int) -> None:
        folder = runs.run_folder(self.trainer)
        errors = {name: self.error(name, batch.x).item() for name in self.networks}
        self.log_dict({f"test/{key}": e for key, e in errors.items()}, batch_size=len(batch.x))
        metrics = folder / "metrics.csv"
        columns = plots.columns(metrics) if metrics.exists() else {}
        table = tables.race(columns, {name: (LABELS[name], e) for name, e in errors.items()})
        print(f"\n{table}\n")
        (folder / "table.txt").write_text(table + "\n")
        images = {"digits": batch.x}
        with torch.no_grad():
            images |= {LABELS[name]: self.networks[name](batch.x) for name in errors}
        picture = plots.race(columns, LABELS, images, folder / "race.png")
        print(f"Saved {folder / 'table.txt'}, {picture}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["seconds"] = list(self.seconds)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.seconds = list(checkpoint["seconds"])
