"""Softmax and cross-entropy as one Function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import full_precision, is_autocast, upcast_half
from hoglib._core.torch_modes import reverse_only
from hoglib.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from hoglib.ops import _losses
from hoglib.ops._define import Saved, call, make_function, promoted
from hoglib.ops._linear import mul
from hoglib.ops._reductions import logsumexp, sum


def softmax_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Cross-entropy of the softmax of logits, as `torch.nn.functional.cross_entropy`.

        L = log sum_c exp(z_c)        p_c = exp(z_c - L)        loss = sum_c q_c (L - z_c)
        dloss/dz_c = p_c - q_c        d2loss/dz_c dz_d = p_c (c = d) - p_c p_d

    z are the logits of one row, q = (1 - e) (c = target) + e / C with e the label_smoothing, or for
    class probabilities q = (1 - e) target + e / C. reduction "mean" divides the sum over rows by the
    number of targets that are not ignore_index, NaN if there is none; "sum"; "none" gives one loss
    for each row, 0 where ignored.

    Shapes: logits [C], [N, C] or [N, C, d1, ...]; target of whole numbers [], [N] or [N, d1, ...], or
    probabilities shaped like logits. The Function keeps its inputs only and recomputes p, so that
    beside the logits no second tensor of their size is held. Differentiable to any order in logits
    and probabilities, in reverse and forward mode, under vmap. Under autocast it runs in float32, as
    torch's own does.
    Raises TypeError for integer or complex logits, or a target of another dtype, ValueError for shapes
    that do not fit, classes out of range (on a CPU), and unknown options.
    """
    validation.real("logits", logits)
    validation.tensor("target", target)
    validation.one_of("reduction", reduction, ("mean", "sum", "none"))
    smoothing = validation.number("label_smoothing", label_smoothing, minimum=0)
    if smoothing > 1:
        raise ArgumentValueError(
            f"label_smoothing: expected a number from 0 to 1, got {smoothing}."
        )
    axis = min(logits.dim() - 1, 1)
    _check_shapes(logits, target, axis)
    if is_autocast(logits):
        logits = logits.float()
    if target.is_floating_point():
        rows = _from_probabilities(logits, target, axis, smoothing)
        return _reduced(rows, reduction, None)
    counted = target != ignore_index
    classes = torch.where(counted, target, 0).long()
    inputs = _Rows(logits, classes.unsqueeze(axis), axis, smoothing)
    try:
        rows = call(_CROSS_ENTROPY, _forward, *inputs)
    except RuntimeError as error:  # to look beforehand would wait for a GPU and stop a tracer
        if "out of bounds" not in str(error):
            raise
        raise ArgumentIndexError(
            f"target: expected classes from 0 to {logits.shape[axis] - 1} or ignore_index "
            f"{ignore_index}, got another; {error}."
        ) from None
    return _reduced(torch.where(counted, rows.squeeze(axis), 0), reduction, counted)


def _reduced(rows: Tensor, reduction: str, counted: Tensor | None) -> Tensor:
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.mean() if counted is None else rows.sum() / counted.sum()


def _from_probabilities(logits: Tensor, target: Tensor, axis: int, smoothing: float) -> Tensor:
    logits, target = promoted(logits, target)
    q = target * (1 - smoothing) + smoothing / logits.shape[axis] if smoothing else target
    shifted = logits - logits.detach().amax(axis, True)
    return sum(mul(q, logsumexp(shifted, axis, keepdim=True) - shifted), axis)


class _Rows(NamedTuple):
    """The arguments of the Function."""

    z: Tensor
    classes: Tensor
    axis: int
    smoothing: float


def _pick(inputs: _Rows, values: Tensor) -> Tensor:
    """sum_c q_c v_c for each row."""
    picked = values.gather(inputs.axis, inputs.classes)
    if not inputs.smoothing:
        return picked
    average = values.sum(inputs.axis, True) / values.shape[inputs.axis]
    return (1 - inputs.smoothing) * picked + inputs.smoothing * average


def _forward(*inputs: Any) -> Tensor:
    rows = _Rows(*inputs)
    return -_pick(rows, torch.log_softmax(rows.z, rows.axis))


def _backward(saved: Saved, g: Tensor) -> tuple[Tensor | None, ...]:
    rows = _Rows(*saved.inputs)
    # p comes from z again: an output of log_softmax that forward kept would have no graph
    grad = torch.softmax(rows.z, rows.axis) * g
    if rows.smoothing:
        grad = grad - g * (rows.smoothing / rows.z.shape[rows.axis])
    return grad.scatter_add(rows.axis, rows.classes, g * (rows.smoothing - 1)), None, None, None


def _jvp(saved: Saved, tangent: Tensor, *_: None) -> Tensor:
    rows = _Rows(*saved.inputs)
    mean = (torch.softmax(rows.z, rows.axis) * tangent).sum(rows.axis, True)
    return mean - _pick(rows, tangent)


def _check_shapes(logits: Tensor, target: Tensor, axis: int) -> None:
    if target.is_complex() or target.dtype == torch.bool:
        raise ArgumentTypeError(
            f"target: expected whole numbers or floating-point probabilities, "
            f"got {validation.describe(target)}; convert it with `target.long()`."
        )
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    expected = logits.shape if target.is_floating_point() else rows
    if logits.dim() == 0 or logits.shape[axis] == 0 or target.shape != expected:
        raise ArgumentValueError(
            f"softmax_cross_entropy: expected logits [C], [N, C] or [N, C, d1, ...] with target [], "
            f"[N] or [N, d1, ...] of whole numbers, or probabilities shaped like logits; "
            f"got logits {tuple(logits.shape)} and target {validation.describe(target)}."
        )


_CROSS_ENTROPY = make_function(
    "SoftmaxCrossEntropy",
    len(_Rows._fields),
    forward=_forward,
    backward=_backward,
    jvp=_jvp,
    keep_outputs=(),
)


# === Cross entropy of a linear layer, whose logarithms torch does not differentiate after forward
# mode.


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
    validation.real("input", input)
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
    wide = upcast_half(z)
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
    if _losses.number(reduction) == _losses.MEAN:
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
    if _losses.number(reduction) == _losses.MEAN:
        return (loss.sum() / loss.numel() if loss.numel() else loss.sum() / 0.0).to(z.dtype)
    return (loss if reduction == "none" else loss.sum()).to(z.dtype)


def _over_classes(s: Tensor, logsumexp: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    if weight is None:
        return logsumexp * s.shape[dim] - s.sum(dim)
    return logsumexp * weight.sum() - (s * _along(weight, s, dim)).sum(dim)


def _along(weight: Tensor, s: Tensor, dim: int) -> Tensor:
    return weight.reshape([-1 if d == dim else 1 for d in range(s.dim())])


LINEAR_CROSS_ENTROPY: dict[Callable[..., Any], Callable[..., Any]] = {}
if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and newer
    LINEAR_CROSS_ENTROPY[F.linear_cross_entropy] = linear_cross_entropy
