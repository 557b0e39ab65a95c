"""Batch norm, right in every mode and at every order."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops import _fused_batch_norm as fused_batch_norm
from hoglib.ops import _running as running
from hoglib.ops._modes import plain
from hoglib.ops._standardise import fused


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
    values = arguments.real("input", input).numel()
    if training and input.dim() > 1 and values and values == input.shape[1]:
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
    dims = (0, *range(2, input.dim()))
    return running.normalised(
        input, weight, bias, running_mean, running_var, training, momentum, eps, dims, _in_one
    )


def _in_one(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: running.Statistics,
    eps: float,
) -> Tensor | None:
    if plain():
        return fused_batch_norm.normalised(x, weight, bias, statistics, eps)
    if not x.is_contiguous():  # others, channels last above all, keep their layout
        return None
    running.update(x, (0, *range(2, x.dim())), statistics)
    across = x.transpose(0, 1)
    y = fused(across.reshape(1, x.shape[1], -1), weight, bias, eps)
    return y.reshape(across.shape).transpose(0, 1).contiguous()


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: _torch_batch_norm,
}
