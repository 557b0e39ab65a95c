"""The reductions of torch's losses, with the words that they had before."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from hoglib._core import torch_internals, validation
from hoglib._core.mixed_precision import full_precision, is_half, upcast_half
from hoglib._core.torch_errors import Refused
from hoglib._core.torch_modes import reverse_only

NONE, MEAN, SUM = 0, 1, 2


def number(reduction: str, size_average: bool | None = None, reduce: bool | None = None) -> int:
    """NONE, MEAN or SUM; the older words come before the newer one. Raises torch's ValueError."""
    if size_average is not None or reduce is not None:
        return _reduction.legacy_get_enum(size_average, reduce)
    return _reduction.get_enum(reduction)


def reduced(loss: Tensor, number: int) -> Tensor:
    if number == NONE:
        return loss
    return loss.mean() if number == MEAN else loss.sum()


# === Losses of regression whose gradients torch does not differentiate in forward mode.

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
    validation.real("input", input)
    if _torch_is_right(input):
        return _TORCH_MSE(input, target, size_average, reduce, reduction)
    kind = number(reduction, size_average, reduce)
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
    validation.real("input", input)
    if _torch_is_right(input):
        return _TORCH_HUBER(input, target, reduction, delta, weight)
    if delta <= 0:
        raise RuntimeError("huber_loss does not support non-positive values for delta.")
    kind = number(reduction)
    if weight is None:
        return _huber(*_broadcast(input, target), kind, delta)
    if weight.size() != input.size():
        raise ValueError("Weights and input must have the same size.")
    weighted = _huber(*_broadcast(input, target), NONE, delta) * weight
    return reduced(weighted, kind)


def _torch_is_right(input: Tensor) -> bool:
    """In reverse mode, but for vmap, where torch takes shapes wrongly, and for narrow dtypes, whose
    second derivatives torch rounds on the way."""
    plain = input.numel() > 0 and not is_half(input)
    return plain and reverse_only() and not torch_internals.transforms_active()


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
    return reduced(d * d, kind).to(dtype)


@full_precision(widen=True)
def _huber(input: Tensor, target: Tensor, kind: int, delta: float) -> Tensor:
    d = upcast_half(input) - upcast_half(target)
    h = torch.where(d.abs() < delta, d, d.detach().clamp(-delta, delta))
    # torch's gives the dtype of input, not the wider one
    return reduced(h * (d - h / 2), kind).to(input.dtype)


REGRESSION: dict[Callable[..., Any], Callable[..., Any]] = {
    F.mse_loss: mse_loss,
    F.huber_loss: huber_loss,
}


# === Hinge losses over classes, which torch differentiates once.


@full_precision(widen=True)
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Hinge loss of one class, as torch.nn.functional.multi_margin_loss.

        y = sum over j != t of w_t max(0, margin - x_t + x_j)^p / C

    Shapes: input x (N, C) or (C); target t (N), or () or (1) for one row, of dtype long; weight (C), by
    which it is differentiable too. At the kinks, where a margin is kept exactly, all derivatives are
    those of the side that keeps it: 0. Narrow dtypes, which torch refuses on a CPU, are computed in
    float32. The mean over no rows is 0.
    Raises ValueError for p, weight and reduction, RuntimeError for shapes and classes out of range,
    TypeError for a complex or integer input.
    """
    kind = number(reduction, size_average, reduce)
    if p not in (1, 2):
        raise ValueError("only p == 1 and p == 2 supported")
    if weight is not None and weight.dim() != 1:
        raise ValueError("weight must be one-dimensional")
    validation.real("input", input)
    _check_input(input)
    rows, classes = input.numel() // max(_classes(input), 1), _classes(input)
    if target.dim() > 1 or target.numel() != rows:
        raise RuntimeError(
            f"multi_margin_loss: target tensor should be 1-D with size equal to the number of input "
            f"samples (batch size). Expected target size [{rows}], but got {list(target.shape)}. "
            f"Input has shape {list(input.shape)}."
        )
    _check_dtype(target)
    if weight is not None and weight.numel() != classes:
        raise RuntimeError(
            f"inconsistent weight size, expected {classes} but got {list(weight.shape)}"
        )
    x = upcast_half(input.reshape(rows, classes))
    index = target.reshape(rows, 1)
    hinge = torch.relu(x + (margin - x.gather(1, index))).scatter(1, index, 0.0)
    loss = (hinge if p == 1 else hinge * hinge).sum(1) / classes
    if weight is not None:
        loss = loss * weight.gather(0, index.squeeze(1))
    return _reduced(loss, kind, target.shape if input.dim() < 2 else (rows,)).to(input.dtype)


@full_precision(widen=True)
def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Hinge loss of several classes, as torch.nn.functional.multilabel_margin_loss.

        y = sum over i in t, j not in t of max(0, 1 - x_i + x_j) / C

    Shapes: input x and target t (N, C) or (C); the classes of a row of t end at its first -1, and one
    that stands there twice counts twice. Takes memory for N C^2 numbers. Kinks, narrow dtypes and
    errors as for `multi_margin_loss`; a class out of range is not noticed behind the first -1.
    """
    kind = number(reduction, size_average, reduce)
    validation.real("input", input)
    _check_input(input)
    if target.shape != input.shape and (input.dim() or target.numel() != 1):
        raise RuntimeError(
            f"inconsistent target size: {list(target.shape)} for input of size: {list(input.shape)}"
        )
    _check_dtype(target)
    classes = _classes(input)
    x, t = upcast_half(input.reshape(-1, classes)), target.reshape(-1, classes)
    # what stands behind the first -1 goes to a class that is cut off
    listed = (t != -1).cumprod(1) == 1
    times = x.new_zeros(x.shape[0], classes + 1)
    times = times.scatter_add(1, torch.where(listed, t, classes), torch.ones_like(x))[:, :classes]
    hinge = torch.relu((1 - x).unsqueeze(2) + x.unsqueeze(1))
    others = (times == 0).to(x.dtype).unsqueeze(2)
    loss = (times.unsqueeze(1) @ (hinge @ others)).reshape(-1) / classes
    return _reduced(loss, kind, input.shape[:-1]).to(input.dtype)


def _check_input(input: Tensor) -> None:
    if input.dim() > 2 or 0 in input.shape[1:] or (input.dim() == 1 and not input.numel()):
        raise RuntimeError(
            "Expected non-empty vector or matrix with optional 0-dim batch size, but got: "
            f"{list(input.shape)}"
        )


def _check_dtype(target: Tensor) -> None:
    if target.dtype != torch.long:
        raise RuntimeError(f"expected scalar type Long but found {target.dtype}")


def _classes(input: Tensor) -> int:
    return input.shape[-1] if input.dim() else 1


def _reduced(loss: Tensor, kind: int, shape: Any) -> Tensor:
    if kind == NONE:
        return loss.reshape(shape)
    return reduced(loss, kind) if loss.numel() else loss.sum()


MARGIN: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_margin_loss: multi_margin_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
}


# === The soft margin loss, in forward mode too.


@full_precision(widen=True)
def soft_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Logistic loss of targets that are 1 or -1, as `torch.nn.functional.soft_margin_loss`.

        loss = log(1 + exp(-target * input)), averaged, summed, or neither

    Shapes: input and target broadcast; the loss has the dtype of input. The target is a constant.
    Raises ValueError for another reduction, or a target that requires grad; TypeError for an integer
    or complex input.
    """
    validation.real("input", input)
    if target.requires_grad and torch.is_grad_enabled():
        raise Refused(
            "target: expected a constant, by which soft_margin_loss is not differentiable, got a "
            "tensor that requires grad; pass it detached."
        )
    kind = number(reduction, size_average, reduce)
    return reduced(-F.logsigmoid(target.to(input.dtype) * input), kind)


SOFT_MARGIN: dict[Callable[..., Any], Callable[..., Any]] = {F.soft_margin_loss: soft_margin_loss}
