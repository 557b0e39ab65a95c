"""What makes ops, by an example of each: external and remat."""

from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.testing.opinfo import hand_written
from hoglib.testing.opinfo.op_info import (
    HAND_WRITTEN,
    WITH_COMPLEX,
    elementwise_info,
    normals,
    op_info,
    sample_input,
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


remat_layer = ops.remat(_layer)

OPS = (
    elementwise_info(
        "cube by hand", "x^3, by NumPy", _cube, hand_written.cube, theme="external"
    ).on(
        max_order=3,
        dtypes=(torch.float64, torch.float32, torch.complex128),
        skips={
            **HAND_WRITTEN,
            "cuda": "NumPy takes no CUDA tensors",
            "bfloat16": "NumPy has no bfloat16",
        },
    ),
    elementwise_info("external", "x^3, by NumPy", _cube, cube, theme="external").on(
        max_order=3, dtypes=WITH_COMPLEX, skips=_OPAQUE
    ),
    elementwise_info(
        "external, two inputs", "x^2 y^3, by NumPy", _product, product, theme="external", tensors=2
    ).on(
        sample_input("same shapes", normals((2, 3), (2, 3))),
        sample_input("broadcast", normals((2, 1), (3,))),
        broadcasting=normals((2, 1), (3,)),
        max_order=3,
        dtypes=WITH_COMPLEX,
        skips=_OPAQUE,
    ),
    op_info(
        "remat", "remat", "fn(x, W) = exp(tanh(x W)) sum(W), recomputed", _layer, remat_layer
    ).on(
        sample_input("matrices", lambda n: (n(2, 3), n(3, 2) / 4)),
        zero_size=normals((0, 3), (3, 2)),
        dtypes=WITH_COMPLEX,
        skips={
            "no dimensions": "a matrix product needs dimensions",
            "broadcasting": "the function decides what stretches",
        },
    ),
)
