"""Instance norm, right in every mode and at every order."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops import _running as running
from hoglib.ops._standardise import fused


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Instance norm of each channel of each example, as `torch.nn.functional.instance_norm`.

        d = x - mean(x)        y = d / sqrt(mean(d^2) + eps) * weight + bias

    with mean over the dimensions after the second; without use_input_stats running_mean and
    running_var stand for mean(x) and mean(d^2). Shapes: input [N, C, ...]; all others [C] or None; y
    like input. With use_input_stats the running statistics, where given, move by momentum toward the
    mean over N of the input's, with unbiased variances; under a torch.func transform they stay. They
    have no derivative. Half precision is computed in float32, and may have float32 parameters. Where
    the variance is 0 and eps too, y = bias and the derivative is 0. To any order, in every mode,
    under vmap.
    Raises ValueError for one value a channel, for one running statistic alone; TypeError for an
    integer or complex input; RuntimeError for missing running statistics, for those that require
    grad, and for shapes and dtypes that do not fit.
    Ulyanov, Vedaldi & Lempitsky, Instance Normalization, 2016.
    """
    if use_input_stats and prod(arguments.real("input", input).shape[2:]) == 1:
        raise arguments.WrongValue(
            "input: expected more than 1 spatial element when training, got input size "
            f"{tuple(input.shape)}."
        )
    return _torch_instance_norm(
        input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps
    )


def _torch_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`torch.instance_norm`, which takes one value a channel."""
    rows = input[..., None] if input.dim() == 2 else input
    dims = tuple(range(2, rows.dim()))
    y = running.normalised(
        rows, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, dims, _in_one
    )
    return y.reshape(input.shape)


def _in_one(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: running.Statistics,
    eps: float,
) -> Tensor:
    running.update(x, tuple(range(2, x.dim())), statistics)
    return fused(x.flatten(2), weight, bias, eps).reshape(x.shape)


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.instance_norm: instance_norm,
    torch.instance_norm: _torch_instance_norm,
}
