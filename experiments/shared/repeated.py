"""A classifier of mislabelled digits by full-batch descent, which trains again on subsets."""

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments.checks import finite, hidden_widths, learning_rate, not_negative
from experiments.shared.digits import CLASSES
from experiments.shared.experiment import Experiment
from experiments.shared.mislabelled import POOLED, Split
from experiments.shared.networks import mlp
from experiments.shared.noisy_digits import Examples
from experiments.shared.second_order import SecondOrderProblem
from experiments.shared.weights import (
    Weighted,
    by_parameters_and_weights,
    even_weights,
    weighted_loss,
)

Params = dict[str, Tensor]


class RepeatedTraining(Experiment, ABC):
    r"""Gradient descent with momentum on sum_i w_i l_i + weight_decay/2 |theta|^2, w_i = 1 / n.

    Subclasses say what the training examples are worth at the end, in `report`.

    Args:
        hidden: Widths of the hidden layers.
        act: Their activation.
        lr: Learning rate of gradient descent with momentum.
        momentum: The momentum.
        weight_decay: The weight decay.
    """

    shared = ""
    one_process = "whose training is repeated step by step"

    def __init__(
        self,
        hidden: list[int] | None = None,
        act: str = "tanh",
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        widths = hidden_widths(hidden, [32])
        self.lr = learning_rate("lr", lr)
        self.momentum = not_negative("momentum", momentum)
        self.weight_decay = not_negative("weight_decay", weight_decay)
        self.network = mlp([POOLED**2, *widths, CLASSES], act)
        self.start = deepcopy(self.network).requires_grad_(False)  # where every training starts
        self.objective = hog.functional_loss(self.network, weighted_loss)
        self.options = {
            "hidden": widths, "act": act, "lr": lr, "momentum": momentum,
            "weight_decay": weight_decay,
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            self.network.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay
        )

    def rule(self) -> hog.meta.GradientTransformation:
        """The same as a function that can be differentiated."""
        return hog.meta.sgd(self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def training_step(self, batch: Examples, batch_idx: int) -> Tensor:
        loss = self.loss(hog.trainable_params(self.network), even_weights(batch), batch)
        finite("loss", loss, "Lower lr.")
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch.x))
        return loss

    def loss(self, params: Params, weights: Tensor, examples: Examples) -> Tensor:
        """sum_i w_i l_i."""
        return self.objective(params, (examples.x, Weighted(examples.label, weights)))

    def second_order_problem(self, batch: Examples) -> SecondOrderProblem:
        """The training loss by parameters and weights."""
        return by_parameters_and_weights(self.objective, batch)

    def validation_step(self, batch: Examples, batch_idx: int) -> None:
        correct = self(batch.x).argmax(1) == batch.truth
        self.log("val/accuracy", correct.float().mean(), batch_size=len(batch.x))

    def test_step(self, batch: Examples, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.no_grad():  # Lightning's mode has no derivatives
            self.report(Examples(*(part.clone() for part in batch)))

    @abstractmethod
    def report(self, batch: Examples) -> None:
        """Write table and picture; batch: the test examples."""

    def parts(self) -> Split:
        """The examples of the run, on the device of the network."""
        parts = (Examples(*(t.to(self.device) for t in part)) for part in self.data.split)
        return Split(*parts)

    def first_params(self) -> Params:
        """The parameters that every training starts from."""
        return {name: p.detach().clone() for name, p in self.start.named_parameters()}

    def trained(self, train: Examples, left_out: Tensor) -> Params:
        """The parameters after a training without some examples, whose numbers are given."""
        weights = even_weights(train)
        weights[left_out] = 0
        targets = Weighted(train.label, weights)
        steps = self.data.iterations
        return hog.meta.adapt(
            self.objective, self.first_params(), (train.x, targets), self.rule(), steps=steps
        )

    def logits(self, params: Params, examples: Examples) -> Tensor:
        """The outputs of the network at other parameters."""
        return torch.func.functional_call(self.network, params, (examples.x,))

    def correct(self, params: Params, examples: Examples) -> Tensor:
        """Which examples are classified correctly."""
        return self.logits(params, examples).argmax(1) == examples.truth
