"""Entries of the catalogue: the gated linear unit and the soft margin loss."""

import torch
from torch import Tensor

from hoglib.ops._entry import ONE_TENSOR, Op, sample
from hoglib.ops._glu import glu
from hoglib.ops._soft_margin import soft_margin_loss

SIGNS = torch.tensor([[1, -1, 1], [-1, -1, 1]])


def _logistic(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    loss = (1 + (-target * x).exp()).log()
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


GATES = (
    Op(
        "glu", "missing", "a sigmoid(b)", glu,
        lambda x, dim=-1: x.narrow(dim, 0, x.shape[dim] // 2)
        / (1 + (-x.narrow(dim, x.shape[dim] // 2, x.shape[dim] // 2)).exp()),
        (
            sample("last", lambda n: (n(3, 4),)),
            sample("first", lambda n: (n(4, 3),), dim=0),
        ),
        corners={"zero size": sample("zero size", lambda n: (n(0, 4),))},
        skips={**ONE_TENSOR, "no dimensions": "it halves a dimension, and needs one"},
    ),
    Op(
        "soft_margin_loss", "missing", "log(1 + exp(-t x))", soft_margin_loss, _logistic,
        (
            sample("mean", lambda n: (n(2, 3), SIGNS)),
            sample("sum", lambda n: (n(2, 3), SIGNS), reduction="sum"),
            sample("each", lambda n: (n(2, 3), SIGNS), reduction="none"),
        ),
        corners={
            "zero size": sample("zero size", lambda n: (n(2, 0), SIGNS[:, :0]), reduction="sum"),
        },
        skips={**ONE_TENSOR, "no dimensions": "the targets of the sample have two dimensions"},
    ),
)  # fmt: skip
