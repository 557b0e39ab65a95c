"""Full-batch gradient descent on digits, and the spectrum of its Hessian while it goes on."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hoglib as hog
from experiments import plots, runs, tables
from experiments.belonging import Belonging
from experiments.data.digits import CLASSES, PIXELS, Images
from experiments.networks import mlp
from hoglib._core import validation
from hoglib.lightning import CurvatureMonitor

Params = dict[str, Tensor]


def squared_error(outputs: Tensor, label: Tensor) -> Tensor:
    """1/2 |outputs - one-hot label|^2, the mean over images."""
    return (outputs - F.one_hot(label, CLASSES).to(outputs)).square().sum(1).mean() / 2


def cross_entropy(outputs: Tensor, label: Tensor) -> Tensor:
    return hog.ops.softmax_cross_entropy(outputs, label)


LOSSES = {"squared_error": squared_error, "cross_entropy": cross_entropy}


class Descent(Belonging):
    """A classifier trained by plain gradient descent, theta - lr dL/dtheta.

    Where a batch is the whole training set, the largest eigenvalue of its Hessian rises to 2 / lr
    and stays about there: the edge of stability (Cohen et al., Gradient Descent on Neural Networks
    Typically Occurs at the Edge of Stability, 2021).

    hidden, act: of the network; loss: squared_error (on one-hot labels) or cross_entropy.
    """

    def __init__(
        self,
        hidden: list[int] | None = None,
        act: str = "tanh",
        loss: str = "squared_error",
        lr: float = 0.1,
    ) -> None:
        super().__init__()
        widths = [64, 64, 64] if hidden is None else hidden
        for width in widths:
            validation.at_least("hidden", width, 1)
        self.lr = validation.positive("lr", lr)
        self.network = mlp([PIXELS, *widths, CLASSES], act)
        chosen = LOSSES[validation.one_of("loss", loss, LOSSES)]
        self.objective = hog.functional_loss(self.network, chosen)
        self.options: dict[str, Any] = {"hidden": list(widths), "act": act, "loss": loss, "lr": lr}

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def loss(self, batch: Images) -> Tensor:
        return self.objective(hog.trainable_params(self.network), (batch.x, batch.label))

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        validation.finite("loss", loss, "Lower lr.")
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch.x))
        return loss

    def second_order_problem(self, batch: Images) -> tuple[Any, Params, Any]:
        """The training loss by all parameters."""
        return self.objective, hog.trainable_params(self.network), (batch.x, batch.label)

    def accuracy(self, batch: Images) -> Tensor:
        return (self(batch.x).argmax(1) == batch.label).float().mean()

    def validation_step(self, batch: Images, batch_idx: int) -> None:
        self.log("val/accuracy", self.accuracy(batch), batch_size=len(batch.x))

    def test_step(self, batch: Images, batch_idx: int) -> None:
        accuracy = self.accuracy(batch)
        self.log("test/accuracy", accuracy, batch_size=len(batch.x))
        folder = runs.run_folder(self.trainer)
        history = self._history()
        if not history:
            print(
                "No CurvatureMonitor among trainer.callbacks: no spectra, so no table or picture."
            )
            return
        metrics = folder / "metrics.csv"
        columns = plots.columns(metrics) if metrics.exists() else {}
        # a row of training is numbered by the steps before it, where its loss was computed
        losses = {step - 1: loss for step, loss in columns.get("train/loss", [])}
        accuracies = dict(columns.get("val/accuracy", []))
        last = history[-1].batch
        accuracies[last] = float(accuracy)
        losses[last] = float(self.loss(self._training_set()))
        title = f"{self.options['loss'].replace('_', ' ')}, lr {self.lr:g}"
        edge = f"{title}: 2 / lr = {2 / self.lr:.4g}"
        table = tables.curvature(history, losses, accuracies, edge)
        print(f"\n{table}\n")
        (folder / "table.txt").write_text(table + "\n")
        size = history[-1].spectrum.size
        picture = plots.spectrum_over_training(
            history,
            losses,
            self.lr,
            f"Gradient descent on {title}, {size:,} parameters",
            folder / "spectrum_over_training.png",
        )
        print(f"Saved {folder / 'table.txt'}, {picture}")
        largest = history[-1].spectrum.largest[-1]
        summary = {
            **self.options, "steps": last, "loss_train": losses[last], "accuracy": float(accuracy),
            "largest": float(largest), "edge": 2 / self.lr,
        }  # fmt: skip
        runs.write_summary(folder, summary)

    def _history(self) -> list[Any]:
        """Of a run that went through, or that a checkpoint holds."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CurvatureMonitor):
                return callback.history
        return []

    def _training_set(self) -> Images:
        images = self.trainer.datamodule.train  # type: ignore[attr-defined]
        return Images(*(part.to(self.device) for part in images))
