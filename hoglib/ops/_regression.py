"""Losses of regression whose gradients torch does not differentiate in forward mode."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _functorch as functorch
from hoglib.ops import _reductions as reductions
from hoglib.ops._halves import full_precision, is_half, widened
from hoglib.ops._modes import reverse_only

# torch's annotations lack the weight
_TORCH_MSE: Callable[..., Tensor] = F.mse_loss
_TORCH_HUBER: Callable[..., Tensor] = F.huber_loss


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    r"""Squared error, as torch.nn.functional.mse_loss.

        y = w d^2, its sum, or its sum over that of w        dy/dinput = 2 w d,  d = input - target

    Shapes: input and target broadcast, with torch's warning; weight has the shape of input.
    Raises ValueError for a wrong weight or reduction, TypeError for complex numbers.
    """
    if weight is not None:  # torch's composite, right in every mode
        return _TORCH_MSE(input, target, size_average, reduce, reduction, weight)
    arguments.real("input", input)
    if _torch_is_right(input):
        return _TORCH_MSE(input, target, size_average, reduce, reduction)
    kind = reductions.number(reduction, size_average, reduce)
    return _mse(*_broadcast(input, target), kind)


def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    r"""Huber's loss, as torch.nn.functional.huber_loss.

        y = w d^2 / 2 where |d| < delta, else w delta (|d| - delta / 2),        d = input - target

    At the kinks of its slope, |d| = delta, the second derivative is 0, as torch's.
    Shapes, reduction and weight as for `mse_loss`, but the weighted mean is that of the elements.
    Raises ValueError for a wrong weight or reduction, RuntimeError for a delta that is not positive,
    TypeError for complex numbers.
    """
    arguments.real("input", input)
    if _torch_is_right(input):
        return _TORCH_HUBER(input, target, reduction, delta, weight)
    if delta <= 0:
        raise RuntimeError("huber_loss does not support non-positive values for delta.")
    kind = reductions.number(reduction)
    if weight is None:
        return _huber(*_broadcast(input, target), kind, delta)
    if weight.size() != input.size():
        raise ValueError("Weights and input must have the same size.")
    weighted = _huber(*_broadcast(input, target), reductions.NONE, delta) * weight
    return reductions.reduced(weighted, kind)


def _torch_is_right(input: Tensor) -> bool:
    """In reverse mode, but for vmap, where torch takes shapes wrongly, and for narrow dtypes, whose
    second derivatives torch rounds on the way."""
    plain = input.numel() > 0 and not is_half(input)
    return plain and reverse_only() and not functorch.transforms_active()


def _broadcast(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if target.size() != input.size():
        warnings.warn(
            f"Using a target size ({target.size()}) that is different to the input size "
            f"({input.size()}). This will likely lead to incorrect results due to broadcasting. "
            "Please ensure they have the same size.",
            stacklevel=3,
        )
    a, b = torch.broadcast_tensors(input, target)
    return a, b


@full_precision(widen=True)
def _mse(input: Tensor, target: Tensor, kind: int) -> Tensor:
    dtype = torch.promote_types(input.dtype, target.dtype)
    d = input.float() - target if is_half(input) or is_half(target) else input - target
    return reductions.reduced(d * d, kind).to(dtype)


@full_precision(widen=True)
def _huber(input: Tensor, target: Tensor, kind: int, delta: float) -> Tensor:
    d = widened(input) - widened(target)
    h = torch.where(d.abs() < delta, d, d.detach().clamp(-delta, delta))
    # torch's gives the dtype of input, not the wider one
    return reductions.reduced(h * (d - h / 2), kind).to(input.dtype)


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.mse_loss: mse_loss,
    F.huber_loss: huber_loss,
}
