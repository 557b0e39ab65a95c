"""The catalogue of the theme gradient."""

from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.ops._external import cube as cube_by_hand
from hoglib.testing.opinfo import references
from hoglib.testing.opinfo.entry import (
    HAND_WRITTEN,
    NEEDS_DIMENSIONS,
    SURROGATE,
    WITH_COMPLEX,
    Op,
    matrices,
    same_shapes,
    sample,
    unary,
)

_IDENTITY: dict[str, Any] = {"theme": "gradient", "surrogate": True, "skips": SURROGATE}
_CLIPPED: dict[str, str] = {
    **SURROGATE,
    "reverse over forward": "a clip is not linear, so no rule for tangents agrees with it",
    "hessian by hvp columns": "reverse-over-reverse clips once more than the oracle's tangents do",
}

GRADIENT = (
    unary(
        "straight_through",
        "sign(x), heaviside(x) or round(x), with the gradient of x",
        ops.straight_through,
        references.straight_through,
        samples=matrices(**{kind: {"kind": kind} for kind in ("sign", "heaviside", "round")}),
        smooth=False,
        **_IDENTITY,
    ),
    unary(
        "scale_gradient",
        "x, gradient scaled",
        ops.scale_gradient,
        references.scale_gradient,
        samples=matrices(half={"scale": 0.5}, zero={"scale": 0}),
        dtypes=WITH_COMPLEX,
        **_IDENTITY,
    ),
    unary(
        "reverse_gradient",
        "x, gradient reversed",
        ops.reverse_gradient,
        references.reverse_gradient,
        samples=matrices(plain={}, scaled={"scale": 0.3}),
        dtypes=WITH_COMPLEX,
        **_IDENTITY,
    ),
    unary(
        "clip_gradient",
        "x, gradient clipped",
        ops.clip_gradient,
        references.clip_gradient,
        samples=matrices(bound={"bound": 0.4}),
        theme="gradient",
        surrogate=True,
        skips=_CLIPPED,
    ),
    unary(
        "stop_gradient",
        "x, no gradient",
        ops.stop_gradient,
        references.stop_gradient,
        theme="gradient",
        dtypes=WITH_COMPLEX,
        surrogate=True,
        skips={
            **SURROGATE,
            "hessian by hvp columns": "hvp refuses a function without a graph",
            "undefined gradients": "no gradient comes back to it at all",
        },
    ),
    Op(
        "clipped_gradient_linear",
        "gradient",
        "x W^T, gradient to x clipped",
        ops.clipped_gradient_linear,
        references.clipped_gradient_linear,
        (sample("rows", lambda n: (n(2, 3), n(4, 3)), bound=0.5),),
        corners={"zero size": sample("no rows", lambda n: (n(0, 3), n(4, 3)), bound=0.5)},
        surrogate=True,
        skips={
            **_CLIPPED,
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions as for linear; none stretch",
        },
    ),
)


# === The catalogue of the themes external and remat: what makes ops, by an example of each.

_OPAQUE = {
    "forward over forward": "raises: torch differentiates a custom Function to zero there",
}


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


rematerialized = ops.remat(_layer)

OTHER = (
    unary(
        "cube by hand",
        "x^3, by NumPy",
        cube_by_hand,
        _cube,
        theme="external",
        orders=3,
        dtypes=(torch.float64, torch.float32, torch.complex128),
        skips={
            **HAND_WRITTEN,
            "cuda": "NumPy takes no CUDA tensors",
            "bfloat16": "NumPy has no bfloat16",
        },
    ),
    unary(
        "external",
        "x^3, by NumPy",
        cube,
        _cube,
        theme="external",
        orders=3,
        dtypes=WITH_COMPLEX,
        skips=_OPAQUE,
    ),
    Op(
        "external, two inputs",
        "external",
        "x^2 y^3, by NumPy",
        product,
        _product,
        (
            sample("same shapes", lambda n: (n(2, 3), n(2, 3))),
            sample("broadcast", lambda n: (n(2, 1), n(3))),
        ),
        corners={**same_shapes(2), "broadcasting": sample("broadcast", lambda n: (n(2, 1), n(3)))},
        orders=3,
        dtypes=WITH_COMPLEX,
        skips=_OPAQUE,
    ),
    Op(
        "remat",
        "remat",
        "fn(x, W) = exp(tanh(x W)) sum(W), recomputed",
        rematerialized,
        _layer,
        (sample("matrices", lambda n: (n(2, 3), n(3, 2) / 4)),),
        corners={"zero size": sample("no rows", lambda n: (n(0, 3), n(3, 2)))},
        dtypes=WITH_COMPLEX,
        skips={
            "no dimensions": "a matrix product needs dimensions",
            "broadcasting": "the function decides what stretches",
        },
    ),
)
