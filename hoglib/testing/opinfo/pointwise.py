"""Pointwise ops, smooth and piecewise."""

import torch
from torch import Tensor

from hoglib import ops
from hoglib.testing.opinfo import references
from hoglib.testing.opinfo.hand_written import sinh_returning_intermediates
from hoglib.testing.opinfo.op_info import (
    HAND_WRITTEN,
    ONE_TENSOR,
    SURROGATE,
    WITH_COMPLEX,
    OpInfo,
    broadcasting_sample,
    elementwise_corners,
    matrix_samples,
    same_shape_corners,
    sample_input,
    unary_info,
)


def _hardsigmoid(input: Tensor) -> Tensor:
    inside = (input > -3) & (input < 3)
    return torch.where(inside, input / 6 + 0.5, (input >= 3).to(input.dtype))


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    n = x.shape[dim] // 2
    return x.narrow(dim, 0, n) / (1 + (-x.narrow(dim, n, n)).exp())


OPS = (
    unary_info("square", "x^2", ops.square, references.square, dtypes=WITH_COMPLEX),
    unary_info("exp", "e^x", ops.exp, torch.exp, dtypes=WITH_COMPLEX),
    unary_info("sinh", "(e^x - e^-x) / 2", ops.sinh, torch.sinh, dtypes=WITH_COMPLEX),
    unary_info(
        "sinh, returning intermediates",
        "(e^x - e^-x) / 2",
        sinh_returning_intermediates,
        torch.sinh,
        dtypes=WITH_COMPLEX,
        skips=HAND_WRITTEN,
    ),
    unary_info("tanh", "tanh(x)", ops.tanh, torch.tanh, dtypes=WITH_COMPLEX),
    unary_info("sigmoid", "1 / (1 + e^-x)", ops.sigmoid, torch.sigmoid, dtypes=WITH_COMPLEX),
    unary_info("relu", "max(x, 0)", ops.relu, torch.relu, smooth=False),
    OpInfo(
        "power",
        "pointwise",
        "x^n",
        ops.power,
        torch.pow,
        (
            sample_input("cube of a matrix", lambda n: (n(2, 3), 3)),
            sample_input("fractional exponent", lambda n: (0.3 * n(2, 3).abs() + 0.5, 2.5)),
            sample_input("negative exponent", lambda n: (n(3).abs() + 0.5, -2)),
            sample_input("exponent 1", lambda n: (n(3), 1)),
            sample_input("exponent 0", lambda n: (n(3), 0)),
        ),
        corners=elementwise_corners(lambda x: (x, 3)),
        dtypes=WITH_COMPLEX,
        skips=ONE_TENSOR,
    ),
    OpInfo(
        "quadratic",
        "pointwise",
        "a x^2 + b x + c",
        ops.quadratic,
        references.quadratic,
        (
            sample_input("coefficients like x", lambda n: tuple(n(2, 3) for _ in "xabc")),
            sample_input("numbers as coefficients", lambda n: (n(2, 3), 0.5, -1, 2.0)),
        ),
        corners={
            **same_shape_corners(4),
            "broadcasting": broadcasting_sample((2, 1), (3,), (), (4, 1, 3)),
        },
        dtypes=WITH_COMPLEX,
    ),
    OpInfo(
        "swish",
        "pointwise",
        "x / (1 + e^(-beta x))",
        ops.swish,
        references.swish,
        (
            sample_input("beta for each column", lambda n: (n(2, 3), n(3))),
            sample_input("beta a number", lambda n: (n(2, 3), 1.5)),
        ),
        corners={**same_shape_corners(2), "broadcasting": broadcasting_sample((2, 1), (4, 1, 3))},
        dtypes=WITH_COMPLEX,
    ),
    unary_info(
        "scaled_activation",
        "scale * act(x)",
        ops.scaled_activation,
        references.scaled_activation,
        samples=matrix_samples(
            tanh={"scale": 1.7, "kind": "tanh"},
            relu={"scale": 0.5, "kind": "relu"},
            scale_zero={"scale": 0, "kind": "tanh"},
        ),
        smooth=False,
    ),
    OpInfo(
        "smooth_l1",
        "pointwise",
        "d^2 / (2 beta) or |d| - beta / 2, d = input - target",
        ops.smooth_l1,
        references.smooth_l1,
        (
            sample_input("beta 1", lambda n: (n(2, 3), n(2, 3))),
            sample_input("beta 1.5", lambda n: (n(2, 3), n(2, 3)), beta=1.5),
            sample_input("beta 0", lambda n: (n(2, 3), n(2, 3)), beta=0),
        ),
        corners={**same_shape_corners(2), "broadcasting": broadcasting_sample((2, 1), (4, 1, 3))},
        smooth=False,
    ),
    unary_info(
        "clamp",
        "min(max(x, min), max)",
        ops.clamp,
        references.clamp,
        samples=matrix_samples(
            both_bounds={"min": -0.5, "max": 0.7},
            lower_bound={"min": -0.5},
            upper_bound={"max": 0},
            bounds_crossed={"min": 1, "max": -1},
        ),
        smooth=False,
    ),
    unary_info(
        "clamp, straight through",
        "min(max(x, min), max), with the gradient of x",
        ops.clamp,
        references.clamp,
        samples=matrix_samples(
            straight_through={"min": -0.5, "max": 0.7, "straight_through": True}
        ),
        smooth=False,
        surrogate=True,
        skips=SURROGATE,
    ),
    unary_info(
        "split_signs",
        "(max(x, 0), max(-x, 0))",
        ops.split_signs,
        references.split_signs,
        smooth=False,
    ),
    unary_info(
        "hardsigmoid",
        "min(max(x + 3, 0), 6) / 6",
        ops.hardsigmoid,
        _hardsigmoid,
        theme="missing",
        samples=(
            sample_input("inside and outside", lambda n: (3 * n(2, 3),)),
            sample_input(
                "beyond both ends", lambda n: (torch.cat([n(1, 3) / 9 + 5, n(1, 3) / 9 - 5]),)
            ),
        ),
        smooth=False,
    ),
    OpInfo(
        "glu",
        "missing",
        "a sigmoid(b)",
        ops.glu,
        _glu,
        (
            sample_input("last", lambda n: (n(3, 4),)),
            sample_input("first", lambda n: (n(4, 3),), dim=0),
        ),
        corners={"zero size": sample_input("zero size", lambda n: (n(0, 4),))},
        skips={**ONE_TENSOR, "no dimensions": "it halves a dimension, and needs one"},
    ),
)
