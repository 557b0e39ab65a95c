"""The catalogue of the theme pointwise."""

import torch
from torch import Tensor

from hoglib import ops
from hoglib.ops._losses import soft_margin_loss
from hoglib.ops._pointwise import glu, sinh_returning_intermediates
from hoglib.testing.opinfo import references
from hoglib.testing.opinfo.entry import (
    HAND_WRITTEN,
    ONE_TENSOR,
    SURROGATE,
    WITH_COMPLEX,
    Op,
    broadcast,
    corners,
    matrices,
    same_shapes,
    sample,
    unary,
)

POINTWISE = (
    unary("square", "x^2", ops.square, references.square, dtypes=WITH_COMPLEX),
    unary("exp", "e^x", ops.exp, torch.exp, dtypes=WITH_COMPLEX),
    unary("sinh", "(e^x - e^-x) / 2", ops.sinh, torch.sinh, dtypes=WITH_COMPLEX),
    unary(
        "sinh, returning intermediates",
        "(e^x - e^-x) / 2",
        sinh_returning_intermediates,
        torch.sinh,
        dtypes=WITH_COMPLEX,
        skips=HAND_WRITTEN,
    ),
    unary("tanh", "tanh(x)", ops.tanh, torch.tanh, dtypes=WITH_COMPLEX),
    unary("sigmoid", "1 / (1 + e^-x)", ops.sigmoid, torch.sigmoid, dtypes=WITH_COMPLEX),
    unary("relu", "max(x, 0)", ops.relu, torch.relu, smooth=False),
    Op(
        "power",
        "pointwise",
        "x^n",
        ops.power,
        torch.pow,
        (
            sample("cube of a matrix", lambda n: (n(2, 3), 3)),
            sample("fractional exponent", lambda n: (0.3 * n(2, 3).abs() + 0.5, 2.5)),
            sample("negative exponent", lambda n: (n(3).abs() + 0.5, -2)),
            sample("exponent 1", lambda n: (n(3), 1)),
            sample("exponent 0", lambda n: (n(3), 0)),
        ),
        corners=corners(lambda x: (x, 3)),
        dtypes=WITH_COMPLEX,
        skips=ONE_TENSOR,
    ),
    Op(
        "quadratic",
        "pointwise",
        "a x^2 + b x + c",
        ops.quadratic,
        references.quadratic,
        (
            sample("coefficients like x", lambda n: tuple(n(2, 3) for _ in "xabc")),
            sample("numbers as coefficients", lambda n: (n(2, 3), 0.5, -1, 2.0)),
        ),
        corners={
            **same_shapes(4),
            "broadcasting": broadcast((2, 1), (3,), (), (4, 1, 3)),
        },
        dtypes=WITH_COMPLEX,
    ),
    Op(
        "swish",
        "pointwise",
        "x / (1 + e^(-beta x))",
        ops.swish,
        references.swish,
        (
            sample("beta for each column", lambda n: (n(2, 3), n(3))),
            sample("beta a number", lambda n: (n(2, 3), 1.5)),
        ),
        corners={**same_shapes(2), "broadcasting": broadcast((2, 1), (4, 1, 3))},
        dtypes=WITH_COMPLEX,
    ),
    unary(
        "scaled_activation",
        "scale * act(x)",
        ops.scaled_activation,
        references.scaled_activation,
        samples=matrices(
            tanh={"scale": 1.7, "kind": "tanh"},
            relu={"scale": 0.5, "kind": "relu"},
            scale_zero={"scale": 0, "kind": "tanh"},
        ),
        smooth=False,
    ),
    Op(
        "smooth_l1",
        "pointwise",
        "d^2 / (2 beta) or |d| - beta / 2, d = input - target",
        ops.smooth_l1,
        references.smooth_l1,
        (
            sample("beta 1", lambda n: (n(2, 3), n(2, 3))),
            sample("beta 0.3", lambda n: (n(2, 3), n(2, 3)), beta=0.3),
            sample("beta 0", lambda n: (n(2, 3), n(2, 3)), beta=0),
        ),
        corners={**same_shapes(2), "broadcasting": broadcast((2, 1), (4, 1, 3))},
        smooth=False,
    ),
    unary(
        "clamp",
        "min(max(x, min), max)",
        ops.clamp,
        references.clamp,
        samples=matrices(
            both_bounds={"min": -0.5, "max": 0.7},
            lower_bound={"min": -0.5},
            upper_bound={"max": 0},
            bounds_crossed={"min": 1, "max": -1},
        ),
        smooth=False,
    ),
    unary(
        "clamp, straight through",
        "min(max(x, min), max), with the gradient of x",
        ops.clamp,
        references.clamp,
        samples=matrices(straight_through={"min": -0.5, "max": 0.7, "straight_through": True}),
        smooth=False,
        surrogate=True,
        skips=SURROGATE,
    ),
    unary(
        "split_signs",
        "(max(x, 0), max(-x, 0))",
        ops.split_signs,
        references.split_signs,
        smooth=False,
    ),
)


# === Entries of the catalogue: the gated linear unit and the soft margin loss.

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
