"""Hinge losses over classes, which torch differentiates once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops import _reductions as reductions
from hoglib.ops._halves import full_precision, widened


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
    kind = reductions.number(reduction, size_average, reduce)
    if p not in (1, 2):
        raise ValueError("only p == 1 and p == 2 supported")
    if weight is not None and weight.dim() != 1:
        raise ValueError("weight must be one-dimensional")
    arguments.real("input", input)
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
    x = widened(input.reshape(rows, classes))
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
    kind = reductions.number(reduction, size_average, reduce)
    arguments.real("input", input)
    _check_input(input)
    if target.shape != input.shape and (input.dim() or target.numel() != 1):
        raise RuntimeError(
            f"inconsistent target size: {list(target.shape)} for input of size: {list(input.shape)}"
        )
    _check_dtype(target)
    classes = _classes(input)
    x, t = widened(input.reshape(-1, classes)), target.reshape(-1, classes)
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
    if kind == reductions.NONE:
        return loss.reshape(shape)
    return reductions.reduced(loss, kind) if loss.numel() else loss.sum()


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_margin_loss: multi_margin_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
}
