"""Pointwise ops, smooth and piecewise."""

import torch
from torch import Tensor

from hoglib.testing.opinfo import references
from hoglib.testing.opinfo.hand_written import sinh_returning_intermediates
from hoglib.testing.opinfo.op_info import (
    HAND_WRITTEN,
    ONE_TENSOR,
    SURROGATE,
    WITH_COMPLEX,
    elementwise_info,
    matrix_samples,
    normals,
    op_info,
    sample_input,
)


def _hardsigmoid(input: Tensor) -> Tensor:
    inside = (input > -3) & (input < 3)
    return torch.where(inside, input / 6 + 0.5, (input >= 3).to(input.dtype))


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    n = x.shape[dim] // 2
    return x.narrow(dim, 0, n) / (1 + (-x.narrow(dim, n, n)).exp())


OPS = (
    elementwise_info("square", "x^2", references.square).on(dtypes=WITH_COMPLEX),
    elementwise_info("exp", "e^x", torch.exp).on(dtypes=WITH_COMPLEX),
    elementwise_info("sinh", "(e^x - e^-x) / 2", torch.sinh).on(dtypes=WITH_COMPLEX),
    elementwise_info(
        "sinh, returning intermediates",
        "(e^x - e^-x) / 2",
        torch.sinh,
        op=sinh_returning_intermediates,
    ).on(dtypes=WITH_COMPLEX, skips=HAND_WRITTEN),
    elementwise_info("tanh", "tanh(x)", torch.tanh).on(dtypes=WITH_COMPLEX),
    elementwise_info("sigmoid", "1 / (1 + e^-x)", torch.sigmoid).on(dtypes=WITH_COMPLEX),
    elementwise_info("relu", "max(x, 0)", torch.relu).on(smooth=False),
    elementwise_info("power", "x^n", torch.pow, numbers=(3,)).on(
        sample_input("cube of a matrix", lambda n: (n(2, 3), 3)),
        sample_input("fractional exponent", lambda n: (0.3 * n(2, 3).abs() + 0.5, 2.5)),
        sample_input("negative exponent", lambda n: (n(3).abs() + 0.5, -2)),
        sample_input("exponent 1", lambda n: (n(3), 1)),
        sample_input("exponent 0", lambda n: (n(3), 0)),
        dtypes=WITH_COMPLEX,
    ),
    elementwise_info("quadratic", "a x^2 + b x + c", references.quadratic, tensors=4).on(
        sample_input("coefficients like x", lambda n: tuple(n(2, 3) for _ in "xabc")),
        sample_input("numbers as coefficients", lambda n: (n(2, 3), 0.5, -1, 2.0)),
        broadcasting=normals((2, 1), (3,), (), (4, 1, 3)),
        dtypes=WITH_COMPLEX,
    ),
    elementwise_info("swish", "x / (1 + e^(-beta x))", references.swish, tensors=2).on(
        sample_input("beta for each column", normals((2, 3), (3,))),
        sample_input("beta a number", lambda n: (n(2, 3), 1.5)),
        broadcasting=normals((2, 1), (4, 1, 3)),
        dtypes=WITH_COMPLEX,
    ),
    elementwise_info("scaled_activation", "scale * act(x)", references.scaled_activation).on(
        *matrix_samples(
            tanh={"scale": 1.7, "kind": "tanh"},
            relu={"scale": 0.5, "kind": "relu"},
            scale_zero={"scale": 0, "kind": "tanh"},
        ),
        smooth=False,
    ),
    elementwise_info(
        "smooth_l1",
        "d^2 / (2 beta) or |d| - beta / 2, d = input - target",
        references.smooth_l1,
        tensors=2,
    ).on(
        sample_input("beta 1", normals((2, 3), (2, 3))),
        sample_input("beta 1.5", normals((2, 3), (2, 3)), beta=1.5),
        sample_input("beta 0", normals((2, 3), (2, 3)), beta=0),
        broadcasting=normals((2, 1), (4, 1, 3)),
        smooth=False,
    ),
    elementwise_info("clamp", "min(max(x, min), max)", references.clamp).on(
        *matrix_samples(
            both_bounds={"min": -0.5, "max": 0.7},
            lower_bound={"min": -0.5},
            upper_bound={"max": 0},
            bounds_crossed={"min": 1, "max": -1},
        ),
        smooth=False,
    ),
    elementwise_info(
        "clamp, straight through", "min(max(x, min), max), with the gradient of x", references.clamp
    ).on(
        *matrix_samples(straight_through={"min": -0.5, "max": 0.7, "straight_through": True}),
        smooth=False,
        surrogate=True,
        skips=SURROGATE,
    ),
    elementwise_info("split_signs", "(max(x, 0), max(-x, 0))", references.split_signs).on(
        smooth=False
    ),
    elementwise_info("hardsigmoid", "min(max(x + 3, 0), 6) / 6", _hardsigmoid, theme="missing").on(
        sample_input("inside and outside", lambda n: (3 * n(2, 3),)),
        sample_input(
            "beyond both ends", lambda n: (torch.cat([n(1, 3) / 9 + 5, n(1, 3) / 9 - 5]),)
        ),
        smooth=False,
    ),
    op_info("glu", "missing", "a sigmoid(b)", _glu).on(
        sample_input("last", normals((3, 4))),
        sample_input("first", normals((4, 3)), dim=0),
        zero_size=normals((0, 4)),
        skips={**ONE_TENSOR, "no dimensions": "it halves a dimension, and needs one"},
    ),
)
