"""Norms that torch has wrong in forward mode or at a higher order."""

from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.testing.opinfo.op_info import WITH_COMPLEX, OpInfo, normals, op_info, sample_input


def _standardize(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(dims, keepdim=True) + eps)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, trailing: int = 0) -> Tensor:
    weight, bias = (None if p is None else p[(..., *[None] * trailing)] for p in (weight, bias))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _layer_norm(
    x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    return _affine(_standardize(x, tuple(range(-len(shape), 0)), eps), weight, bias)


def _batch_norm(
    x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    trailing = x.dim() - 2
    y = _standardize(x, (0, *range(2, x.dim())), eps)
    return _affine(y, weight, bias, trailing)


def _instance_norm(
    x: Tensor, mean: Any = None, var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    return _affine(_standardize(x, tuple(range(2, x.dim())), eps), weight, bias, x.dim() - 2)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = tuple(d for d in range(v.dim()) if dim == -1 or d != dim % v.dim())
    squares = v.abs() ** 2
    return g * v / (squares.sum(others, keepdim=True) if others else squares).sqrt()


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Running statistics, which are no input to differentiate by."""
    mean = torch.linspace(-0.5, 0.5, x.shape[1], dtype=x.dtype, device=x.device)
    return mean, 1 + mean**2


def _batch_norm_evaluation(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    return ops.batch_norm(x, *_statistics(x), weight, bias)


def _instance_norm_evaluation(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    return ops.instance_norm(x, *_statistics(x), weight, bias, use_input_stats=False)


def _with_running_statistics(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    trailing = (1,) * (x.dim() - 2)
    mean, var = (value.reshape(-1, *trailing) for value in _statistics(x))
    return _affine((x - mean) / torch.sqrt(var + 1e-5), weight, bias, len(trailing))


_SKIPS = {
    "no dimensions": "needs dimensions to take the mean over",
    "broadcasting": "weight and bias have one element a channel or feature",
}


def _evaluation(name: str, function: Any) -> OpInfo:
    return op_info(
        f"{name}_evaluation",
        "wrong",
        "(x - m) / sqrt(v + eps) w + b",
        _with_running_statistics,
        function,
    ).on(
        sample_input("weight and bias", normals((3, 2, 2), (2,), (2,))),
        sample_input("no weight", lambda n: (n(3, 2), None, n(2))),
        sample_input("input alone", normals((2, 2, 1, 2))),
        zero_size=normals((0, 3), (3,), (3,)),
        skips=_SKIPS,
    )


OPS = (
    op_info("layer_norm", "wrong", "(x - m) / sqrt(var x + eps) w + b", _layer_norm).on(
        sample_input("weight and bias", lambda n: (n(2, 4), (4,), n(4), n(4))),
        sample_input("two dimensions", lambda n: (n(2, 3, 2), (3, 2), n(3, 2), n(3, 2)), eps=0.1),
        sample_input("no bias", lambda n: (n(1, 2, 3), [3], n(3))),
        sample_input("no weight", lambda n: (n(2, 3), (3,), None, n(3))),
        sample_input("input alone", lambda n: (n(2, 4), (4,))),
        zero_size=lambda n: (n(0, 3), (3,), n(3), n(3)),
        skips=_SKIPS,
    ),
    op_info("batch_norm", "wrong", "(x - m) / sqrt(var x + eps) w + b", _batch_norm).on(
        sample_input("weight and bias", lambda n: (n(4, 2), None, None, n(2), n(2), True)),
        sample_input("images", lambda n: (n(2, 2, 2, 1), None, None, n(2), n(2), True), eps=0.1),
        sample_input("no bias", lambda n: (n(3, 2, 2), None, None, n(2), None, True)),
        sample_input("no weight", lambda n: (n(3, 2), None, None, None, n(2), True)),
        sample_input("input alone", lambda n: (n(4, 2), None, None), training=True),
        zero_size=lambda n: (n(0, 3), None, None, n(3), n(3), True),
        skips=_SKIPS,
    ),
    op_info("instance_norm", "wrong", "(x - m) / sqrt(var x + eps) w + b", _instance_norm).on(
        sample_input("weight and bias", lambda n: (n(2, 2, 3), None, None, n(2), n(2))),
        sample_input("images", lambda n: (n(2, 2, 2, 2), None, None, n(2), n(2)), eps=0.1),
        sample_input("no bias", lambda n: (n(1, 2, 3), None, None, n(2))),
        sample_input("no weight", lambda n: (n(1, 2, 3), None, None, None, n(2))),
        sample_input("input alone", normals((2, 1, 4))),
        zero_size=lambda n: (n(0, 3, 2), None, None, n(3), n(3)),
        skips=_SKIPS,
    ),
    _evaluation("batch_norm", _batch_norm_evaluation),
    _evaluation("instance_norm", _instance_norm_evaluation),
    op_info("weight_norm", "wrong", "g v / ||v||", _weight_norm).on(
        sample_input("first dimension", normals((2, 3), (2, 1))),
        sample_input("last dimension", lambda n: (n(2, 1, 3), n(1, 1, 3), 2)),
        sample_input("middle dimension", normals((2, 3, 2), (1, 3, 1)), dim=1),
        sample_input("one norm over all", lambda n: (n(2, 3), n(), -1)),
        zero_size=normals((0, 3), (0, 1)),
        no_dimensions=lambda n: (n(), n(), -1),
        broadcasting=lambda n: (n(2, 3, 2), n(2, 3, 1), 1),
        dtypes=WITH_COMPLEX,
    ),
)
