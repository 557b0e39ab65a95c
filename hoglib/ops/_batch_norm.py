"""Batch norm, right in every mode and at every order."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops import _running as running
from hoglib.ops._standardise import (
    affine,
    can_fuse,
    flat_value,
    fused,
    moments,
    same_dtype,
    scaled,
    wide,
    widened,
)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Batch norm of each channel over the batch, as `torch.nn.functional.batch_norm`.

        training    d = x - mean(x)    y = d / sqrt(mean(d^2) + eps) * weight + bias
        evaluation  y = (x - running_mean) / sqrt(running_var + eps) * weight + bias

    Shapes: input [N, C, ...]; all others [C] or None; y like input. In training the running statistics,
    where given, move by momentum toward the batch's, with the unbiased variance; under a torch.func
    transform, and without elements, they stay. They have no derivative. Half precision is computed in
    float32, and may have float32 parameters. To any order, in every mode, under vmap.
    Raises ValueError in training for one value a channel or an eps of 0 or less, for one running
    statistic alone; TypeError for an integer or complex input; RuntimeError for missing running
    statistics, for those that require grad, and for shapes and dtypes that do not fit.
    Ioffe & Szegedy, Batch Normalization, 2015.
    """
    arguments.real("input", input)
    running.per_channel(input)
    if training and input.numel() and input.numel() == input.shape[1]:
        raise arguments.WrongValue(
            "input: expected more than 1 value per channel when training, got input size "
            f"{tuple(input.shape)}."
        )
    if eps < 0 or (training and eps == 0):
        raise arguments.WrongValue(f"eps: expected a positive number, got {eps}.")
    return _torch_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )


def _torch_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`torch.batch_norm`, which takes one value a channel, and any eps."""
    arguments.real("input", input)
    given = {
        "weight": weight,
        "bias": bias,
        "running_mean": running_mean,
        "running_var": running_var,
    }
    running.per_channel(input, **given)
    running.check(input, running_mean, running_var, needed=not training)
    same_dtype(input, **given)
    inner = wide(input.dtype)
    x = input.to(inner)
    weight, bias = (widened(value, inner) for value in (weight, bias))
    if not training:
        assert running_mean is not None
        assert running_var is not None
        return running.evaluated(x, running_mean, running_var, weight, bias, eps).to(input.dtype)
    dims = (0, *range(2, x.dim()))
    running.update(x, dims, running_mean, running_var, momentum)
    return _of_the_batch(x, dims, weight, bias, eps).to(input.dtype)


def _of_the_batch(
    x: Tensor, dims: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if can_fuse(x, eps) and x.is_contiguous():  # others, channels last above all, keep their layout
        across = x.transpose(0, 1)
        rows = across.reshape(1, x.shape[1], -1)
        weight, bias = (None if p is None else p.reshape(-1) for p in (weight, bias))
        y = fused(rows, weight, bias, eps)
        return y.reshape(across.shape).transpose(0, 1).contiguous()
    weight, bias = (None if p is None else running.along_channels(p, x) for p in (weight, bias))
    if not x.numel():  # there is no mean, and NaN times nothing would reach the weight
        return affine(x, weight, bias)
    y = scaled(*moments(x, dims), weight, eps, flat_value(eps))
    return y if bias is None else y + bias


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: _torch_batch_norm,
}
