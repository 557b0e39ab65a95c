"""Losses of examples with a weight for each."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import hoglib as hog
from experiments.shared.noisy_digits import Examples
from experiments.shared.second_order import SecondOrderProblem


class Weighted(NamedTuple):
    """Targets with a weight for each: label [n], weight [n]."""

    label: Tensor
    weight: Tensor


def weighted_loss(logits: Tensor, targets: Weighted) -> Tensor:
    """sum_i w_i l_i, with l_i the cross-entropy of example i."""
    losses = hog.ops.softmax_cross_entropy(logits, targets.label, reduction="none")
    return (targets.weight * losses).sum()


def even_weights(examples: Examples) -> Tensor:
    """Weights [n] of a mean."""
    return torch.full_like(examples.x[:, 0], 1 / len(examples.x))


def by_parameters_and_weights(objective: Any, examples: Examples) -> SecondOrderProblem:
    """The weighted loss of examples, by the parameters of its model and by the weights."""

    def loss(params: dict[str, Tensor], examples: Examples) -> Tensor:
        own = {name: value for name, value in params.items() if name != "weights"}
        return objective(own, (examples.x, Weighted(examples.label, params["weights"])))

    params = hog.trainable_params(objective.model)
    return loss, {**params, "weights": even_weights(examples)}, examples
