"""Learning to reweight examples: wrong labels are found by a few right ones, beside plain training."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import logs, runs
from experiments.checks import hidden_widths, learning_rate, one_of
from experiments.reweight.plots import plot_reweighting
from experiments.reweight.table import detect_wrong_labels, reweighting_table
from experiments.shared.digits import CLASSES, IMAGES, PIXELS
from experiments.shared.experiment import Experiment
from experiments.shared.networks import mlp
from experiments.shared.noisy_digits import Examples
from experiments.shared.second_order import SecondOrderProblem
from experiments.shared.stream import select
from experiments.shared.weights import (
    Weighted,
    by_parameters_and_weights,
    even_weights,
    weighted_loss,
)

Params = dict[str, Tensor]
Objective = Callable[[Params, Any], Tensor]
REWEIGHTED = "reweighted"
# What the other networks are trained on, with even weights.
OTHERS = {
    "noisy": "noisy labels as they are",
    "clean": "the clean set alone",
    "both": "noisy and clean together",
}
LABELS = {REWEIGHTED: "noisy labels, reweighted", **OTHERS}


class Reweighting(Experiment):
    """A network trained with learned weights, and others from the same start on the same batches.

    A training step takes noisy examples and all clean ones. The network "reweighted" learns from the
    noisy ones by `learned_weights`; clean examples influence it through these weights alone.

    Args:
        against: The other networks, with even weights: of "noisy" (the same examples), "clean" (the
            clean ones) and "both".
        hidden: Widths of the hidden layers of all networks.
        act: Their activation.
        lr: Learning rate of their Adam, which falls linearly to zero over the run.
    """

    weight_sum: Tensor
    visits: Tensor

    shared = ""
    one_process = "whose weights are of a whole batch"

    def __init__(
        self,
        against: list[str] | None = None,
        hidden: list[int] | None = None,
        act: str = "relu",
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        widths = hidden_widths(hidden, [128, 128])
        others = list(OTHERS) if against is None else against
        for name in others:
            one_of("against", name, OTHERS)
        self.lr = learning_rate("lr", lr)
        start = mlp([PIXELS, *widths, CLASSES], act)
        names = dict.fromkeys([REWEIGHTED, *others])
        self.networks = nn.ModuleDict({name: deepcopy(start) for name in names})
        self.objectives = {
            name: hog.functional_loss(network, weighted_loss)
            for name, network in self.networks.items()
        }
        self.options = {"networks": list(names), "hidden": widths, "act": act}
        # Of each image of the whole set, by its number: the sum of its weights, times the batch size,
        # and how often it was in a batch.
        self.register_buffer("weight_sum", torch.zeros(IMAGES))
        self.register_buffer("visits", torch.zeros(IMAGES))

    def forward(self, x: Tensor) -> Tensor:
        return self.networks[REWEIGHTED](x)

    def training_step(self, batch: tuple[Examples, Examples], batch_idx: int) -> Tensor:
        noisy, clean = batch
        weights = self.weights(noisy, clean)
        self.weight_sum[noisy.number] += weights * len(weights)
        self.visits[noisy.number] += 1
        losses = {name: self.loss(name, noisy, clean, weights) for name in self.networks}
        return self.sum_of(losses, "Lower lr, or look for NaN in the data.", len(weights))

    def weights(self, noisy: Examples, clean: Examples) -> Tensor:
        objective = self.objectives[REWEIGHTED]
        return learned_weights(objective, hog.trainable_params(objective.model), noisy, clean)

    def loss(self, name: str, noisy: Examples, clean: Examples, weights: Tensor) -> Tensor:
        """The loss that a network is trained on; the weights are those of the noisy examples."""
        both = Examples(*map(torch.cat, zip(noisy, clean, strict=True)))
        examples = {"clean": clean, "both": both}.get(name, noisy)
        if name != REWEIGHTED:
            weights = even_weights(examples)
        objective = self.objectives[name]
        params = hog.trainable_params(objective.model)
        return objective(params, (examples.x, Weighted(examples.label, weights)))

    def second_order_problem(self, batch: tuple[Examples, Examples]) -> SecondOrderProblem:
        """The weighted loss of the noisy examples, by the parameters and by the weights.

        `learned_weights` differentiates a step on it, theta - a dL/dtheta, by the weights: its
        derivatives of two orders, by parameters and weights, enter. Here at even weights, where it
        has others too.
        """
        return by_parameters_and_weights(self.objectives[REWEIGHTED], batch[0])

    def validation_step(self, batch: Examples, batch_idx: int) -> None:
        values = {f"val/{name}": c.float().mean() for name, c in self.correct(batch).items()}
        self.log_dict(values, batch_size=len(batch.x))

    def test_step(self, batch: Examples, batch_idx: int) -> None:
        folder = runs.run_folder(self.trainer)
        logged = logs.curves(folder)
        curves = {LABELS[name]: logged.get(f"val/{name}", []) for name in self.networks}
        correct = {LABELS[name]: flags.cpu() for name, flags in self.correct(batch).items()}
        noisy, weights = self.average_weights()
        detection = detect_wrong_labels(weights, noisy.label != noisy.truth)
        noise = self.data.noise
        table = reweighting_table(correct, curves, detection, noise)
        picture = plot_reweighting(folder / "weights.png", noisy, weights, curves, noise)
        runs.write_report(folder, table, picture)
        accuracies = {name: correct[LABELS[name]].float().mean() for name in self.networks}
        values = {f"test/accuracy_{name}": value for name, value in accuracies.items()}
        self.log_dict(values, batch_size=len(batch.x))
        self.log("test/auc", detection.auc, batch_size=len(batch.x))

    def correct(self, examples: Examples) -> dict[str, Tensor]:
        """Which examples [n] each network classifies correctly."""
        return {
            name: network(examples.x).argmax(1) == examples.truth
            for name, network in self.networks.items()
        }

    def average_weights(self) -> tuple[Examples, Tensor]:
        """The noisy examples that were in a batch, and their weights times the batch size, averaged."""
        noisy = self.data.split.noisy
        noisy = select(noisy, self.visits.cpu()[noisy.number] > 0)
        return noisy, (self.weight_sum / self.visits).cpu()[noisy.number]


def learned_weights(
    objective: Objective, params: Params, noisy: Examples, clean: Examples
) -> Tensor:
    """The weights [n] of noisy examples with which a step on them lowers the loss of clean ones most.

        theta'(e) = theta - a grad_theta sum_i e_i l_i(theta)
        u_i = -d/de_i L_clean(theta'(e)) at e = 0        w_i = max(u_i, 0) / sum_j max(u_j, 0)

    All are zero if no example would help. The rate a is 1 here: it multiplies each u_i and leaves w
    unchanged.

    References:
        Ren et al., Learning to Reweight Examples for Robust Deep Learning, 2018, eq. 12 to 14.
    """
    result = hog.meta.hypergradient(
        lambda params, _: objective(params, (clean.x, Weighted(clean.label, even_weights(clean)))),
        lambda params, e: objective(params, (noisy.x, Weighted(noisy.label, e))),
        params,
        torch.zeros_like(even_weights(noisy)),
        rule=hog.meta.sgd(1.0),
        steps=1,
    )
    useful = (-result.gradient).clamp(min=0)
    return useful / useful.sum().clamp(min=torch.finfo(useful.dtype).tiny)
