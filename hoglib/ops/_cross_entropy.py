"""Cross-entropy of the softmax of logits, as one Function."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import is_autocast
from hoglib.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from hoglib.ops._define import promote_dtypes
from hoglib.ops._function import Saved, apply_function, make_function
from hoglib.ops._losses import reduce_loss, reduction_number
from hoglib.ops._pointwise import mul
from hoglib.ops._products import logsumexp, sum


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
    class probabilities q = (1 - e) target + e / C. The Function keeps its inputs only and recomputes p,
    so that beside the logits no second tensor of their size is held. Differentiable to any order in
    logits and probabilities, in reverse and forward mode, under vmap. Under autocast it runs in
    float32, as torch's own does.

    Args:
        logits: z, a real floating-point tensor.
        target: Whole numbers, the class of each row, or floating-point class probabilities.
        reduction: "mean" divides the sum over rows by the number of targets that are not ignore_index,
            NaN if there is none; "sum"; "none" gives one loss for each row. Default: "mean".
        ignore_index: The class of rows that do not count; their loss is 0. Default: -100.
        label_smoothing: e, from 0 to 1. Default: 0.
    Returns:
        The loss.
    Raises:
        TypeError: for integer or complex logits, or a target of another dtype.
        ValueError: for shapes that do not fit, classes out of range (on a CPU), and unknown options.
    Shape:
        - logits: [C], [N, C] or [N, C, d1, ...]
        - target: whole numbers [], [N] or [N, d1, ...], or probabilities shaped like logits
        - loss: [], or with reduction "none" the shape of a target of whole numbers
    Example:
        >>> z, t = torch.zeros(1, 2), torch.tensor([0])
        >>> f = lambda z: hog.ops.softmax_cross_entropy(z, t)
        >>> f(z), hog.hvp(f, z, torch.tensor([[1.0, 0.0]]))[1]
        (tensor(0.6931), tensor([[ 0.2500, -0.2500]]))
    """
    validation.real("logits", logits)
    validation.tensor("target", target)
    number = reduction_number(validation.one_of("reduction", reduction, ("mean", "sum", "none")))
    smoothing = validation.fraction("label_smoothing", label_smoothing)
    axis = min(logits.dim() - 1, 1)
    _check_target(logits, target, axis)
    if is_autocast(logits):
        logits = logits.float()
    if target.is_floating_point():
        logits, target = promote_dtypes(logits, target)
        q = target * (1 - smoothing) + smoothing / logits.shape[axis] if smoothing else target
        shifted = logits - logits.detach().amax(axis, True)
        rows = sum(mul(q, logsumexp(shifted, axis, keepdim=True) - shifted), axis)
        return reduce_loss(rows, number)
    counts = target != ignore_index
    classes = torch.where(counts, target, 0).long()
    inputs = _Rows(logits, classes.unsqueeze(axis), axis, smoothing)
    try:
        rows = apply_function(_CROSS_ENTROPY, _forward, *inputs)
    except RuntimeError as error:  # to look beforehand would wait for a GPU and stop a tracer
        if "out of bounds" not in str(error):
            raise
        raise ArgumentIndexError(
            f"target: expected classes from 0 to {logits.shape[axis] - 1} or ignore_index "
            f"{ignore_index}, got another; {error}."
        ) from None
    return reduce_loss(torch.where(counts, rows.squeeze(axis), 0), number, counts)


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


def _check_target(logits: Tensor, target: Tensor, axis: int) -> None:
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
    "SoftmaxCrossEntropy", len(_Rows._fields), forward=_forward, backward=_backward, jvp=_jvp
)
