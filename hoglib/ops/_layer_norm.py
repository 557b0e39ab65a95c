"""Layer norm, right in every mode and at every order."""

from collections.abc import Callable, Sequence
from math import nan, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops import _fused_layer_norm as fused_layer_norm
from hoglib.ops._halves import autocast_on
from hoglib.ops._modes import plain
from hoglib.ops._refusals import Refused
from hoglib.ops._standardise import (
    affine,
    can_fuse,
    fused,
    moments,
    same_dtype,
    scaled,
    wide,
    widened,
)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Layer norm over the last dimensions, as `torch.nn.functional.layer_norm`.

        d = x - mean(x)        y = d / sqrt(mean(d^2) + eps) * weight + bias

    Shapes: input [..., *normalized_shape]; weight and bias normalized_shape or None; y like input.
    Half precision is computed in float32, and may have float32 parameters. Where the variance is 0
    and eps too, y is NaN, as torch's is, and its derivative 0. To any order, in every mode, under vmap.
    Raises TypeError for an integer or complex input, or a normalized_shape that is no tuple or list;
    RuntimeError for shapes and dtypes that do not fit.
    Ba, Kiros & Hinton, Layer Normalization, 2016.
    """
    arguments.real("input", input)
    shape = _shape(input, normalized_shape)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and tuple(value.shape) != shape:
            raise Refused(
                f"{name}: expected normalized_shape {shape}, got {arguments.describe(value)}."
            )
    dtype = input.dtype
    # on a GPU autocast runs it in float32, and its result stays so; on a CPU it leaves it alone
    if input.device.type != "cpu" and autocast_on(input.device.type):
        dtype = wide(dtype)
    else:
        same_dtype(input, weight=weight, bias=bias)
    inner = wide(dtype)
    x = input.to(inner)
    if can_fuse(x, eps) and plain():
        scale, shift = widened(weight, inner), widened(bias, inner)
        y = fused_layer_norm.normalised(x, shape, scale, shift, eps)
        return y if y.dtype == dtype else y.to(dtype)
    if can_fuse(x, eps):
        y = fused(x.reshape(1, -1, prod(shape)), None, None, eps).reshape(x.shape)
    else:
        y = scaled(*moments(x, tuple(range(-len(shape), 0))), None, eps, nan)
    return affine(y, widened(weight, inner), widened(bias, inner)).to(dtype)


def _shape(input: Tensor, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list):
        raise arguments.WrongType(
            f"normalized_shape: expected a tuple of whole numbers, got {arguments.describe(shape)}; "
            "write `(n,)`."
        )
    result = tuple(shape)
    if not result or tuple(input.shape[-len(result) :]) != result:
        raise Refused(
            f"normalized_shape: expected the last dimensions of the input, at least one, got "
            f"{list(result)}; the input has shape {tuple(input.shape)}."
        )
    return result


def _torch_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return layer_norm(input, normalized_shape, weight, bias, eps)


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: _torch_layer_norm,
}
