"""Cross-entropy: of the softmax of logits as one Function, and of a linear layer."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import full_precision, is_autocast, upcast_half
from hoglib._core.torch_errors import TorchValueError
from hoglib._core.torch_modes import reverse_only
from hoglib.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from hoglib.ops._define import promote_dtypes
from hoglib.ops._function import Saved, apply_function, make_function
from hoglib.ops._losses import MEAN, reduction_number
from hoglib.ops._products import mul
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
    validation.one_of("reduction", reduction, ("mean", "sum", "none"))
    smoothing = validation.number("label_smoothing", label_smoothing, minimum=0)
    if smoothing > 1:
        raise ArgumentValueError(
            f"label_smoothing: expected a number from 0 to 1, got {smoothing}."
        )
    axis = min(logits.dim() - 1, 1)
    _check_target(logits, target, axis)
    if is_autocast(logits):
        logits = logits.float()
    if target.is_floating_point():
        rows = _from_probabilities(logits, target, axis, smoothing)
        return _reduce_rows(rows, reduction, None)
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
    return _reduce_rows(torch.where(counts, rows.squeeze(axis), 0), reduction, counts)


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
    r"""Cross-entropy of a linear layer, as torch.nn.functional.linear_cross_entropy of torch 2.13.

        z = input W^T + b        y = sum_c w_c q_c (log sum_d e^z_d - z_c)

    torch's chunked one is differentiable once. Differentiable to any order, in every mode, under vmap.

    Args:
        input: A real floating-point tensor.
        linear_weight: W.
        target: The classes, of dtype long, or probabilities q.
        linear_bias: b. Default: none.
        weight: w, one for each class. Default: 1.
        reduction: "mean", which over classes is weighted and without those that are ignore_index; "sum"
            or "none". Default: "mean".
        ignore_index: The class of rows that do not count. Default: -100.
        label_smoothing: From 0 to 1. Default: 0.
        options: torch's choice of a way to save memory. It does not change the result, and is not read:
            that way is differentiable once.
    Returns:
        The loss, of the dtype of input.
    Raises:
        RuntimeError: for shapes that do not fit, as in torch.
        ValueError: for a wrong reduction, as in torch.
    Shape:
        - input: (N, F) or (F)
        - linear_weight: (C, \*, F)
        - linear_bias: (C, \*)
        - target: (N, \*), or probabilities (N, C, \*)
        - weight: (C)
        - y: (), or with reduction "none" (N, \*)
    Example:
        >>> x, W, t = torch.ones(1, 2), torch.zeros(2, 2), torch.tensor([0])
        >>> f = lambda W: hog.ops.linear_cross_entropy(x, W, t)
        >>> f(W), hog.hvp(f, W, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))[1]
        (tensor(0.6931), tensor([[ 0.2500,  0.2500],
                [-0.2500, -0.2500]]))
    """
    validation.real("input", input)
    _check_linear(input, linear_weight, linear_bias)
    classes, positions = linear_weight.shape[0], linear_weight.shape[1:-1]
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    flat = linear_weight.reshape(-1, linear_weight.shape[-1])
    z = F.linear(input, flat, bias).reshape(*input.shape[:-1], classes, *positions)
    probabilities = target.shape == z.shape
    if probabilities and ignore_index is not None:
        raise TorchValueError("ignore_index cannot be specified when target contains probabilities")
    ignored = -100 if ignore_index is None else ignore_index
    fits = target.is_floating_point() if probabilities else _is_class_target(z, target)
    if reverse_only() or not fits:  # torch's own is right, or raises its error
        return F.cross_entropy(
            z, target, weight, None, ignored, None, reduction, label_smoothing
        )  # fmt: skip
    if probabilities:
        return _linear_by_probabilities(z, target, weight, reduction, label_smoothing)
    return _linear_by_classes(z, target, weight, ignored, reduction, label_smoothing)


def _reduce_rows(rows: Tensor, reduction: str, counts: Tensor | None) -> Tensor:
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.mean() if counts is None else rows.sum() / counts.sum()


def _from_probabilities(logits: Tensor, target: Tensor, axis: int, smoothing: float) -> Tensor:
    logits, target = promote_dtypes(logits, target)
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
    "SoftmaxCrossEntropy",
    len(_Rows._fields),
    forward=_forward,
    backward=_backward,
    jvp=_jvp,
    keep_outputs=(),
)


def _check_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The errors of torch 2.13, which older ones lack."""
    if not 1 <= input.dim() <= 2:
        raise TorchValueError(f"expected input with dimensionality 1 or 2, got {input.dim()}")
    if weight.dim() < 2:
        raise TorchValueError(
            f"expected linear_weight with dimensionality at least 2, got {weight.dim()}"
        )
    if input.shape[-1] != weight.shape[-1]:
        raise TorchValueError(
            "expected equal input and linear_weight last dimensions (in_features), "
            f"got {input.shape[-1]} and {weight.shape[-1]}, respectively"
        )
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise TorchValueError(
            f"expected linear_bias shape {tuple(weight.shape[:-1])}, got {tuple(bias.shape)}"
        )
    if weight.dim() > 2 and input.dim() == 1:
        raise TorchValueError(
            f"K-dimensional loss defined by linear_weight shape {tuple(weight.shape)} requires "
            f"batched input, (N, {input.shape[0]}), got unbatched input with shape "
            f"{tuple(input.shape)}"
        )


def _is_class_target(z: Tensor, target: Tensor) -> bool:
    return target.dtype == torch.long and target.shape == z.shape[: z.dim() > 1] + z.shape[2:]


def _shifted(z: Tensor) -> tuple[Tensor, Tensor, int]:
    """z less its maximum, the logarithm of the sum of exponentials of that, the dimension of classes.

    The maximum is a constant: what it adds to the derivatives cancels."""
    dim = min(z.dim() - 1, 1)
    x = upcast_half(z)
    s = x - x.detach().amax(dim, True)
    return s, s.exp().sum(dim).log(), dim


@full_precision(widen=True)
def _linear_by_classes(
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
        loss = (1 - smoothing) * loss + smoothing / s.shape[dim] * _sum_over_classes(
            s, logsumexp, weight, dim
        )
    loss = torch.where(counts, loss, 0)
    if reduction_number(reduction) == MEAN:
        return (loss.sum() / share.sum()).to(z.dtype)
    return (loss if reduction == "none" else loss.sum()).to(z.dtype)


@full_precision(widen=True)
def _linear_by_probabilities(
    z: Tensor, q: Tensor, weight: Tensor | None, reduction: str, smoothing: float
) -> Tensor:
    s, logsumexp, dim = _shifted(z)
    q = (1 - smoothing) * q + smoothing / s.shape[dim] if smoothing else q
    q = q if weight is None else q * _along_classes(weight, s, dim)
    loss = logsumexp * q.sum(dim) - (q * s).sum(dim)
    if reduction_number(reduction) == MEAN:
        return (loss.sum() / loss.numel() if loss.numel() else loss.sum() / 0.0).to(z.dtype)
    return (loss if reduction == "none" else loss.sum()).to(z.dtype)


def _sum_over_classes(s: Tensor, logsumexp: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    if weight is None:
        return logsumexp * s.shape[dim] - s.sum(dim)
    return logsumexp * weight.sum() - (s * _along_classes(weight, s, dim)).sum(dim)


def _along_classes(weight: Tensor, s: Tensor, dim: int) -> Tensor:
    return weight.reshape([-1 if d == dim else 1 for d in range(s.dim())])
