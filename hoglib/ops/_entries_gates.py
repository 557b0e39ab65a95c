"""Entries of the catalogue: the gated linear unit and the soft margin loss."""

import torch

from hoglib.ops._entry import ONE_TENSOR, Op, sample
from hoglib.ops._glu import glu
from hoglib.ops._soft_margin import soft_margin_loss

SIGNS = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]])

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
        "soft_margin_loss", "missing", "log(1 + exp(-t x))",
        lambda x, **options: soft_margin_loss(x, SIGNS[:, : x.shape[1]].to(x.dtype), **options),
        lambda x, reduction="mean": getattr(
            (1 + (-SIGNS[:, : x.shape[1]].to(x.dtype) * x).exp()).log(),
            {"mean": "mean", "sum": "sum", "none": "clone"}[reduction],
        )(),
        (
            sample("mean", lambda n: (n(2, 3),)),
            sample("sum", lambda n: (n(2, 3),), reduction="sum"),
            sample("each", lambda n: (n(2, 3),), reduction="none"),
        ),
        corners={"zero size": sample("zero size", lambda n: (n(2, 0),), reduction="sum")},
        skips={**ONE_TENSOR, "no dimensions": "the targets of the sample have two dimensions"},
    ),
)  # fmt: skip
