"""Cross entropy of a linear layer, whose logarithms torch does not differentiate after forward mode."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops import _reductions as reductions
from hoglib.ops._halves import full_precision, widened
from hoglib.ops._modes import reverse_only


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    r"""Cross entropy of linear(input), as torch.nn.functional.linear_cross_entropy of torch 2.13.

        z = input W^T + b        y = sum_c w_c q_c (log sum_d e^z_d - z_c)

    Shapes: input (N, F) or (F); W = linear_weight (C, *, F) and b without its F; target the classes
    (N, *), of dtype long, or probabilities q (N, C, *); weight w (C). The mean over
    classes is weighted, without those that are ignore_index, -100 by default. options, which choose a
    way to save memory, do not change the result and are not read: that way is differentiable once.
    Raises what torch raises: RuntimeError for shapes, ValueError for a wrong reduction.
    """
    arguments.real("input", input)
    _check(input, linear_weight, linear_bias)
    classes, positions = linear_weight.shape[0], linear_weight.shape[1:-1]
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    flat = linear_weight.reshape(-1, linear_weight.shape[-1])
    z = F.linear(input, flat, bias).reshape(*input.shape[:-1], classes, *positions)
    chances = target.shape == z.shape
    if chances and ignore_index is not None:
        raise RuntimeError("ignore_index cannot be specified when target contains probabilities")
    ignored = -100 if ignore_index is None else ignore_index
    fits = target.is_floating_point() if chances else _one_class_each(z, target)
    if reverse_only() or not fits:  # torch's own is right, or raises its error
        return F.cross_entropy(
            z, target, weight, None, ignored, None, reduction, label_smoothing
        )  # fmt: skip
    if chances:
        return _of_chances(z, target, weight, reduction, label_smoothing)
    return _of_classes(z, target, weight, ignored, reduction, label_smoothing)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The errors of torch 2.13, which older ones lack."""
    if not 1 <= input.dim() <= 2:
        raise RuntimeError(f"expected input with dimensionality 1 or 2, got {input.dim()}")
    if weight.dim() < 2:
        raise RuntimeError(
            f"expected linear_weight with dimensionality at least 2, got {weight.dim()}"
        )
    if input.shape[-1] != weight.shape[-1]:
        raise RuntimeError(
            "expected equal input and linear_weight last dimensions (in_features), "
            f"got {input.shape[-1]} and {weight.shape[-1]}, respectively"
        )
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise RuntimeError(
            f"expected linear_bias shape {tuple(weight.shape[:-1])}, got {tuple(bias.shape)}"
        )
    if weight.dim() > 2 and input.dim() == 1:
        raise RuntimeError(
            f"K-dimensional loss defined by linear_weight shape {tuple(weight.shape)} requires "
            f"batched input, (N, {input.shape[0]}), got unbatched input with shape "
            f"{tuple(input.shape)}"
        )


def _one_class_each(z: Tensor, target: Tensor) -> bool:
    return target.dtype == torch.long and target.shape == z.shape[: z.dim() > 1] + z.shape[2:]


def _shifted(z: Tensor) -> tuple[Tensor, Tensor, int]:
    """z less its maximum, the logarithm of the sum of exponentials of that, the dimension of classes.

    The maximum is a constant: what it adds to the derivatives cancels."""
    dim = min(z.dim() - 1, 1)
    wide = widened(z)
    s = wide - wide.detach().amax(dim, True)
    return s, s.exp().sum(dim).log(), dim


@full_precision(widen=True)
def _of_classes(
    z: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignored: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    s, logsumexp, dim = _shifted(z)
    counts = target != ignored
    own = torch.where(counts, target, 0)
    loss = logsumexp - s.gather(dim, own.unsqueeze(dim)).squeeze(dim)
    share = counts.to(s.dtype)
    if weight is not None:
        share = weight.to(s.dtype)[own] * share
        loss = loss * share
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing / s.shape[dim] * _over_classes(
            s, logsumexp, weight, dim
        )
    loss = torch.where(counts, loss, 0)
    if reductions.number(reduction) == reductions.MEAN:
        return (loss.sum() / share.sum()).to(z.dtype)
    return (loss if reduction == "none" else loss.sum()).to(z.dtype)


@full_precision(widen=True)
def _of_chances(
    z: Tensor, q: Tensor, weight: Tensor | None, reduction: str, smoothing: float
) -> Tensor:
    s, logsumexp, dim = _shifted(z)
    q = (1 - smoothing) * q + smoothing / s.shape[dim] if smoothing else q
    q = q if weight is None else q * _along(weight, s, dim)
    loss = logsumexp * q.sum(dim) - (q * s).sum(dim)
    if reductions.number(reduction) == reductions.MEAN:
        return (loss.sum() / loss.numel() if loss.numel() else loss.sum() / 0.0).to(z.dtype)
    return (loss if reduction == "none" else loss.sum()).to(z.dtype)


def _over_classes(s: Tensor, logsumexp: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    if weight is None:
        return logsumexp * s.shape[dim] - s.sum(dim)
    return logsumexp * weight.sum() - (s * _along(weight, s, dim)).sum(dim)


def _along(weight: Tensor, s: Tensor, dim: int) -> Tensor:
    return weight.reshape([-1 if d == dim else 1 for d in range(s.dim())])


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {}
if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and newer
    REPLACES[F.linear_cross_entropy] = linear_cross_entropy
