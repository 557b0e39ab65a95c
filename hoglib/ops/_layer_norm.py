"""Layer norm, right in every mode and at every order."""

from collections.abc import Sequence
from math import nan, prod
from typing import Any

from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import autocast_on, upcast_dtype
from hoglib._core.torch_errors import TorchValueError
from hoglib._core.torch_modes import plain_reverse_mode
from hoglib.errors import ArgumentTypeError
from hoglib.ops._fused_norms import fused_layer_norm
from hoglib.ops._normalization import (
    can_fuse,
    cast,
    check_dtypes,
    moments,
    normalize_rows,
    scale_and_shift,
    standardize,
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

    Half precision is computed in float32, and may have float32 parameters. Where the variance and eps
    are 0, y is NaN, as torch's is, and its derivative 0. Differentiable to any order, in every mode,
    under vmap.

    Args:
        input: x, a real floating-point tensor.
        normalized_shape: The sizes of the last dimensions, which the mean is over.
        weight: Scale of each element. Default: none.
        bias: Shift of each element. Default: none.
        eps: Added to the variance. Default: 1e-5.
    Returns:
        y, like input.
    Raises:
        TypeError: for an integer or complex input, or a normalized_shape that is no tuple or list.
        RuntimeError: for shapes and dtypes that do not fit.
    Shape:
        - input, y: [..., \*normalized_shape]
        - weight, bias: normalized_shape
    References:
        Ba, Kiros and Hinton, Layer Normalization, 2016.
    Example:
        >>> x = torch.tensor([[0.0, 1.0, 5.0]])
        >>> hog.ops.layer_norm(x, (3,))
        tensor([[-0.9258, -0.4629,  1.3887]])
        >>> w = torch.ones(3)
        >>> hog.hvp(lambda w: hog.ops.layer_norm(x, (3,), w).square().sum(), w, w)[1]
        tensor([1.7143, 0.4286, 3.8571])
    """
    validation.real("input", input)
    shape = _check_shape(input, normalized_shape)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and tuple(value.shape) != shape:
            raise TorchValueError(
                f"{name}: expected normalized_shape {shape}, got {validation.describe(value)}."
            )
    dtype = input.dtype
    # on a GPU autocast runs it in float32, and its result stays so; on a CPU it leaves it alone
    if input.device.type != "cpu" and autocast_on(input.device.type):
        dtype = upcast_dtype(dtype)
    else:
        check_dtypes(input, weight=weight, bias=bias)
    inner = upcast_dtype(dtype)
    x = input.to(inner)
    if can_fuse(x, eps) and plain_reverse_mode():
        y = fused_layer_norm(x, shape, cast(weight, inner), cast(bias, inner), eps)
        return y if y.dtype == dtype else y.to(dtype)
    if can_fuse(x, eps):
        y = normalize_rows(x.reshape(1, -1, prod(shape)), None, None, eps).reshape(x.shape)
    else:
        y = standardize(*moments(x, tuple(range(-len(shape), 0))), None, eps, nan)
    return scale_and_shift(y, cast(weight, inner), cast(bias, inner)).to(dtype)


def torch_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """With the signature of `torch.layer_norm`."""
    return layer_norm(input, normalized_shape, weight, bias, eps)


def _check_shape(input: Tensor, shape: Any) -> tuple[int, ...]:
    """normalized_shape as a tuple."""
    if not isinstance(shape, tuple | list):
        raise ArgumentTypeError(
            f"normalized_shape: expected a tuple of whole numbers, got {validation.describe(shape)}; "
            "write `(n,)`."
        )
    result = tuple(shape)
    if not result or tuple(input.shape[-len(result) :]) != result:
        raise TorchValueError(
            f"normalized_shape: expected the last dimensions of the input, at least one, got "
            f"{list(result)}; the input has shape {tuple(input.shape)}."
        )
    return result
