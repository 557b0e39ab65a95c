"""Full-batch gradient descent on digits, and the spectrum of its Hessian during training."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hoglib as hog
from experiments import logs, runs
from experiments.checks import finite, hidden_widths, learning_rate, one_of
from experiments.curvature.plots import plot_spectrum_over_training
from experiments.curvature.table import spectrum_table
from experiments.shared.digits import CLASSES, PIXELS, Images
from experiments.shared.experiment import Experiment
from experiments.shared.networks import mlp
from experiments.shared.second_order import SecondOrderProblem, measurements


class Descent(Experiment):
    """A classifier trained by plain gradient descent, theta - lr dL/dtheta.

    Where a batch is the whole training set, the largest eigenvalue of its Hessian rises to 2 / lr and
    then stays close to it: the edge of stability.

    Args:
        hidden: Widths of the hidden layers.
        act: Their activation.
        loss: "squared_error" (of one-hot labels) or "cross_entropy".
        lr: Learning rate.
    References:
        Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability,
        2021.
    """

    def __init__(
        self,
        hidden: list[int] | None = None,
        act: str = "tanh",
        loss: str = "squared_error",
        lr: float = 0.1,
    ) -> None:
        super().__init__()
        widths = hidden_widths(hidden, [64, 64, 64])
        self.lr = learning_rate("lr", lr)
        self.network = mlp([PIXELS, *widths, CLASSES], act)
        criterion = LOSSES[one_of("loss", loss, LOSSES)]
        self.objective = hog.functional_loss(self.network, criterion)
        self.options: dict[str, Any] = {"hidden": widths, "act": act, "loss": loss, "lr": lr}

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        finite("loss", loss, "Lower lr.")
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch.x))
        return loss

    def loss(self, batch: Images) -> Tensor:
        return self.objective(hog.trainable_params(self.network), (batch.x, batch.label))

    def second_order_problem(self, batch: Images) -> SecondOrderProblem:
        """The training loss by all parameters."""
        return self.objective, hog.trainable_params(self.network), (batch.x, batch.label)

    def validation_step(self, batch: Images, batch_idx: int) -> None:
        self.log("val/accuracy", self.accuracy(batch), batch_size=len(batch.x))

    def accuracy(self, batch: Images) -> Tensor:
        return (self(batch.x).argmax(1) == batch.label).float().mean()

    def test_step(self, batch: Images, batch_idx: int) -> None:
        accuracy = self.accuracy(batch)
        self.log("test/accuracy", accuracy, batch_size=len(batch.x))
        history = measurements(self.trainer)
        if not history:
            if runs.is_rank_zero():
                print(
                    "No CurvatureMonitor among trainer.callbacks: no table, no picture of spectra."
                )
            return
        folder = runs.run_folder(self.trainer)
        curves = logs.curves(folder)
        # a row of training is numbered by the steps before it, at which its loss was computed
        losses = {step - 1: loss for step, loss in curves.get("train/loss", [])}
        accuracies = dict(curves.get("val/accuracy", []))
        last = history[-1].batch
        accuracies[last] = float(accuracy)
        train = Images(*(part.to(self.device) for part in self.data.train))
        losses[last] = float(self.loss(train))
        title = f"{self.options['loss'].replace('_', ' ')}, lr {self.lr:g}"
        table = spectrum_table(history, losses, accuracies, f"{title}: 2 / lr = {2 / self.lr:.4g}")
        file = folder / "spectrum_over_training.png"
        shown = f"Gradient descent on {title}, {history[-1].spectrum.size:,} parameters"
        picture = plot_spectrum_over_training(file, history, losses, self.lr, shown)
        runs.write_report(folder, table, picture)
        summary = {
            **self.options, "steps": last, "loss_train": losses[last], "accuracy": float(accuracy),
            "largest": float(history[-1].spectrum.largest[-1]), "edge": 2 / self.lr,
        }  # fmt: skip
        runs.write_summary(folder, summary)


def squared_error(outputs: Tensor, label: Tensor) -> Tensor:
    """1/2 |outputs - one-hot label|^2, the mean over images."""
    return (outputs - F.one_hot(label, CLASSES).to(outputs)).square().sum(1).mean() / 2


def cross_entropy(outputs: Tensor, label: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return hog.ops.softmax_cross_entropy(outputs, label)


LOSSES = {"squared_error": squared_error, "cross_entropy": cross_entropy}
