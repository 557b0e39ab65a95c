"""Pointwise ops, smooth and piecewise; ops that act on gradients; and what makes ops, by an example of each."""

from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from tests.ops.opinfo import references
from tests.ops.opinfo.op_info import (
    NEEDS_DIMENSIONS,
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


_POINTWISE = (
    elementwise_info("square", references.square).on(dtypes=WITH_COMPLEX),
    elementwise_info("exp", torch.exp).on(dtypes=WITH_COMPLEX),
    elementwise_info("sinh", torch.sinh).on(dtypes=WITH_COMPLEX),
    elementwise_info("tanh", torch.tanh).on(dtypes=WITH_COMPLEX),
    elementwise_info("sigmoid", torch.sigmoid).on(dtypes=WITH_COMPLEX),
    elementwise_info("relu", torch.relu).on(smooth=False),
    elementwise_info("power", torch.pow, numbers=(3,)).on(
        sample_input("cube of a matrix", lambda n: (n(2, 3), 3)),
        sample_input("fractional exponent", lambda n: (0.3 * n(2, 3).abs() + 0.5, 2.5)),
        sample_input("negative exponent", lambda n: (n(3).abs() + 0.5, -2)),
        sample_input("exponent 1", lambda n: (n(3), 1)),
        sample_input("exponent 0", lambda n: (n(3), 0)),
        dtypes=WITH_COMPLEX,
    ),
    elementwise_info("quadratic", references.quadratic, tensors=4).on(
        sample_input("coefficients like x", lambda n: tuple(n(2, 3) for _ in "xabc")),
        sample_input("numbers as coefficients", lambda n: (n(2, 3), 0.5, -1, 2.0)),
        broadcasting=normals((2, 1), (3,), (), (4, 1, 3)),
        dtypes=WITH_COMPLEX,
    ),
    elementwise_info("swish", references.swish, tensors=2).on(
        sample_input("beta for each column", normals((2, 3), (3,))),
        sample_input("beta a number", lambda n: (n(2, 3), 1.5)),
        broadcasting=normals((2, 1), (4, 1, 3)),
        dtypes=WITH_COMPLEX,
    ),
    elementwise_info("scaled_activation", references.scaled_activation).on(
        *matrix_samples(tanh={"scale": 1.7, "kind": "tanh"}, relu={"scale": 0.5, "kind": "relu"}, scale_zero={"scale": 0, "kind": "tanh"}),
        smooth=False,
    ),
    elementwise_info("smooth_l1", references.smooth_l1, tensors=2).on(
        sample_input("beta 1", normals((2, 3), (2, 3))),
        sample_input("beta 1.5", normals((2, 3), (2, 3)), beta=1.5),
        sample_input("beta 0", normals((2, 3), (2, 3)), beta=0),
        broadcasting=normals((2, 1), (4, 1, 3)),
        smooth=False,
    ),
    elementwise_info("clamp", references.clamp).on(
        *matrix_samples(both_bounds={"min": -0.5, "max": 0.7}, lower_bound={"min": -0.5}, upper_bound={"max": 0}, bounds_crossed={"min": 1, "max": -1}),
        smooth=False,
    ),
    elementwise_info("clamp, straight through", references.clamp).on(
        *matrix_samples(straight_through={"min": -0.5, "max": 0.7, "straight_through": True}),
        smooth=False,
        surrogate=True,
        skips=SURROGATE,
    ),
    elementwise_info("split_signs", references.split_signs).on(smooth=False),
    elementwise_info("hardsigmoid", _hardsigmoid, theme="missing").on(
        sample_input("inside and outside", lambda n: (3 * n(2, 3),)),
        sample_input("beyond both ends", lambda n: (torch.cat([n(1, 3) / 9 + 5, n(1, 3) / 9 - 5]),)),
        smooth=False,
    ),
    op_info("glu", "missing", _glu).on(
        sample_input("last", normals((3, 4))),
        sample_input("first", normals((4, 3)), dim=0),
        zero_size=normals((0, 4)),
        skips={**ONE_TENSOR, "no dimensions": "it halves a dimension, and needs one"},
    ),
)  # fmt: skip

_IDENTITY: dict[str, Any] = {"theme": "gradient", "surrogate": True, "skips": SURROGATE}
_CLIPPED: dict[str, str] = {
    **SURROGATE,
    "reverse over forward": "a clip is not linear, so no rule for tangents agrees with it",
    "hvp": "reverse-over-reverse clips once more than the oracle's tangents do",
    "plain operations": "those of Taylor mode, whose tangents are not clipped",
}

_GRADIENT_OPS = (
    elementwise_info("straight_through", references.straight_through).on(
        *matrix_samples(**{kind: {"kind": kind} for kind in ("sign", "heaviside", "round")}),
        smooth=False,
        **_IDENTITY,
    ),
    elementwise_info("scale_gradient", references.scale_gradient).on(
        *matrix_samples(half={"scale": 0.5}, zero={"scale": 0}),
        dtypes=WITH_COMPLEX,
        **_IDENTITY,
    ),
    elementwise_info("reverse_gradient", references.reverse_gradient).on(
        *matrix_samples(plain={}, scaled={"scale": 0.3}),
        dtypes=WITH_COMPLEX,
        **_IDENTITY,
    ),
    elementwise_info("clip_gradient", references.clip_gradient, theme="gradient").on(
        *matrix_samples(bound={"bound": 0.4}),
        surrogate=True,
        skips=_CLIPPED,
    ),
    elementwise_info("stop_gradient", references.stop_gradient, theme="gradient").on(
        dtypes=WITH_COMPLEX,
        surrogate=True,
        skips={
            **SURROGATE,
            "hvp": "hvp refuses a function without a graph",
            "undefined gradients": "no gradient comes back to it at all",
        },
    ),
    op_info("clipped_gradient_linear", "gradient", references.clipped_gradient_linear).on(
        sample_input("rows", normals((2, 3), (4, 3)), bound=0.5),
        zero_size=normals((0, 3), (4, 3)),
        surrogate=True,
        skips={**_CLIPPED, **NEEDS_DIMENSIONS, "broadcasting": "leading dimensions as for linear; none stretch"},
    ),
)  # fmt: skip

_OPAQUE = {"forward over forward": "raises: torch differentiates a custom Function to zero there"}


def _cube(x: Any) -> Any:
    return x**3


def _product(x: Any, y: Any) -> Any:
    return x**2 * y**3


cube = ops.external(_cube, lambda x: 3 * x**2, lambda x: 6 * x, lambda x: 6.0)
product = ops.external(
    _product,
    lambda x, y: (2 * x * y**3, 3 * x**2 * y**2),
    lambda x, y: ((2 * y**3, 6 * x * y**2), (6 * x * y**2, 6 * x**2 * y)),
    lambda x, y: (
        ((0.0, 6 * y**2), (6 * y**2, 12 * x * y)),
        ((6 * y**2, 12 * x * y), (12 * x * y, 6 * x**2)),
    ),
)


def _layer(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight).exp() * weight.sum()


remat_layer = ops.remat(_layer)

_MAKERS = (
    elementwise_info("external", _cube, cube, theme="external").on(max_order=3, dtypes=WITH_COMPLEX, skips=_OPAQUE),
    elementwise_info("external, two inputs", _product, product, theme="external", tensors=2).on(
        sample_input("same shapes", normals((2, 3), (2, 3))),
        sample_input("broadcast", normals((2, 1), (3,))),
        broadcasting=normals((2, 1), (3,)),
        max_order=3,
        dtypes=WITH_COMPLEX,
        skips=_OPAQUE,
    ),
    op_info("remat", "remat", _layer, remat_layer).on(
        sample_input("matrices", lambda n: (n(2, 3), n(3, 2) / 4)),
        zero_size=normals((0, 3), (3, 2)),
        dtypes=WITH_COMPLEX,
        skips={"no dimensions": "a matrix product needs dimensions", "broadcasting": "the function decides what stretches"},
    ),
)  # fmt: skip

OPS = (*_POINTWISE, *_GRADIENT_OPS, *_MAKERS)
