"""Losses of examples with a weight for each."""

from typing import NamedTuple

import torch
from torch import Tensor

import hoglib as hog
from experiments.shared.noisy_digits import Examples


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
