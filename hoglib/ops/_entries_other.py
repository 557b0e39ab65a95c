"""The catalogue of the themes external and remat: what makes ops, by an example of each."""

from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.ops._cube import cube as cube_by_hand
from hoglib.ops._entry import (
    HAND_WRITTEN,
    WITH_COMPLEX,
    Op,
    same_shapes,
    sample,
    unary,
)

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
