"""Losses of regression and hinge losses that torch does not differentiate twice, or in forward mode."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from hoglib._core import torch_internals, validation
from hoglib._core.mixed_precision import full_precision, is_half, upcast_half
from hoglib._core.torch_modes import reverse_only
from hoglib.ops._stand_in import NO_DOUBLE_BACKWARD, NO_FORWARD, TorchValueError, stands_in_for

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reductions

# torch's annotations lack the weight
_TORCH_MSE: Callable[..., Tensor] = F.mse_loss
_TORCH_HUBER: Callable[..., Tensor] = F.huber_loss


@stands_in_for(
    F.mse_loss,
    name="mse_loss, huber_loss",
    lacks="forward mode over a backward raises",
    modes=("fr",),
    issue="123996",
)
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    r"""Squared error, as `torch.nn.functional.mse_loss`.

        y = w d^2, its sum, or its sum over that of w        dy/dinput = 2 w d,  d = input - target

    torch does not differentiate its gradient in forward mode. Differentiable to any order, in every
    mode, under vmap.

    Args:
        input: A real floating-point tensor.
        target: A real floating-point tensor.
        size_average: Deprecated by torch in favour of reduction. Default: None.
        reduce: Deprecated by torch in favour of reduction. Default: None.
        reduction: "mean", "sum" or "none". Default: "mean".
        weight: w, of the shape of input. Default: 1.
    Returns:
        The loss, of the promoted dtype.
    Raises:
        TypeError: for complex numbers.
        ValueError: for a wrong weight or reduction.
    Shape:
        - input, target: any that broadcast together, with torch's warning where they do
        - y: [], or with reduction "none" the shape they broadcast to
    Example:
        >>> x, t = torch.tensor([1.0, 3.0]), torch.zeros(2)
        >>> hog.ops.mse_loss(x, t), hog.hessian(lambda x: hog.ops.mse_loss(x, t), x)
        (tensor(5.), tensor([[1., 0.],
                [0., 1.]]))
    """
    if weight is not None:  # torch's composite, right in every mode
        return _TORCH_MSE(input, target, size_average, reduce, reduction, weight)
    validation.real("input", input)
    if _torch_is_right(input):
        return _TORCH_MSE(input, target, size_average, reduce, reduction)
    kind = reduction_number(reduction, size_average, reduce)
    return _mse(*_broadcast(input, target), kind)


@stands_in_for(F.huber_loss, name="mse_loss, huber_loss")
def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    r"""Huber's loss, as `torch.nn.functional.huber_loss`.

        y = w d^2 / 2 where |d| < delta, else w delta (|d| - delta / 2),        d = input - target

    torch does not differentiate its gradient in forward mode. As in torch, the second derivative where
    the pieces meet, at |d| = delta, is 0. Differentiable to any order, in every mode, under vmap.

    Args:
        input: A real floating-point tensor.
        target: A real floating-point tensor.
        reduction: "mean" (over the elements, also with a weight), "sum" or "none". Default: "mean".
        delta: Where the quadratic piece ends, greater than 0. Default: 1.
        weight: w, of the shape of input. Default: 1.
    Returns:
        The loss, of the dtype of input.
    Raises:
        TypeError: for complex numbers.
        ValueError: for a wrong weight or reduction.
        RuntimeError: for a delta that is not positive.
    Shape:
        - input, target: any that broadcast together, with torch's warning where they do
        - y: [], or with reduction "none" the shape they broadcast to
    References:
        Huber, Robust Estimation of a Location Parameter, 1964.
    Example:
        >>> x, t = torch.tensor([0.5, 3.0]), torch.zeros(2)
        >>> f = lambda x: hog.ops.huber_loss(x, t, reduction="sum")
        >>> f(x), hog.hessian(f, x)
        (tensor(2.6250), tensor([[1., 0.],
                [0., 0.]]))
    """
    validation.real("input", input)
    wrong = delta <= 0 or (weight is not None and weight.size() != input.size())
    if wrong or _torch_is_right(input):
        return _TORCH_HUBER(input, target, reduction, delta, weight)
    kind = reduction_number(reduction)
    if weight is None:
        return _huber(*_broadcast(input, target), kind, delta)
    weighted = _huber(*_broadcast(input, target), NONE, delta) * weight
    return reduce_loss(weighted, kind)


@stands_in_for(F.multi_margin_loss, lacks=NO_DOUBLE_BACKWARD)
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
    r"""Hinge loss of one class, as `torch.nn.functional.multi_margin_loss`.

        y = sum over j != t of w_t max(0, margin - x_t + x_j)^p / C

    torch differentiates its own once. Where a margin is met exactly, all derivatives are those of the
    side that meets it: 0. Half precision, which torch refuses on a CPU, is computed in float32. The
    mean over no rows is 0. Differentiable to any order, in every mode, under vmap.

    Args:
        input: x, a real floating-point tensor.
        target: t, the class of each row, of dtype long.
        p: The power, 1 or 2. Default: 1.
        margin: The margin. Default: 1.
        weight: w, one for each class; the loss is differentiable by it too. Default: 1.
        size_average: Deprecated by torch in favour of reduction. Default: None.
        reduce: Deprecated by torch in favour of reduction. Default: None.
        reduction: "mean", "sum" or "none". Default: "mean".
    Returns:
        The loss, of the dtype of input.
    Raises:
        TypeError: for a complex or integer input.
        ValueError: for p, weight and reduction.
        RuntimeError: for shapes and classes out of range.
    Shape:
        - input: (N, C) or (C)
        - target: (N), or () or (1) for one row
        - weight: (C)
        - y: (), or with reduction "none" the shape of target
    Example:
        >>> x, t = torch.tensor([[1.0, 0.5]]), torch.tensor([0])
        >>> f = lambda x: hog.ops.multi_margin_loss(x, t, p=2)
        >>> f(x), hog.hvp(f, x, torch.tensor([[1.0, 0.0]]))[1]
        (tensor(0.1250), tensor([[ 1., -1.]]))
    """
    kind = reduction_number(reduction, size_average, reduce)
    validation.real("input", input)
    classes = _classes(input)
    rows = input.numel() // max(classes, 1)
    if not (
        p in (1, 2)
        and _are_rows(input, target)
        and target.dim() < 2
        and target.numel() == rows
        and (weight is None or weight.shape == (classes,))
    ):  # torch's error
        return F.multi_margin_loss(
            input, target, p, margin, weight, size_average, reduce, reduction
        )
    x = upcast_half(input.reshape(rows, classes))
    index = target.reshape(rows, 1)
    hinge = torch.relu(x + (margin - x.gather(1, index))).scatter(1, index, 0.0)
    loss = (hinge if p == 1 else hinge * hinge).sum(1) / classes
    if weight is not None:
        loss = loss * weight.gather(0, index.squeeze(1))
    return _reduce_rows(loss, kind, target.shape if input.dim() < 2 else (rows,)).to(input.dtype)


@stands_in_for(F.multilabel_margin_loss, name="multi_margin_loss")
@full_precision(widen=True)
def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Hinge loss of several classes, as `torch.nn.functional.multilabel_margin_loss`.

        y = sum over i in t, j not in t of max(0, 1 - x_i + x_j) / C

    torch differentiates its own once. It takes memory for N C^2 numbers. Where a margin is met exactly,
    the derivatives are 0. Half precision, which torch refuses on a CPU, is computed in float32. The
    mean over no rows is 0. In every mode, under vmap.

    Args:
        input: x, a real floating-point tensor.
        target: t, the classes of each row, of dtype long: they end at its first -1, and one that stands
            there twice counts twice. A class out of range behind the first -1 is not noticed.
        size_average: Deprecated by torch in favour of reduction. Default: None.
        reduce: Deprecated by torch in favour of reduction. Default: None.
        reduction: "mean", "sum" or "none". Default: "mean".
    Returns:
        The loss, of the dtype of input.
    Raises:
        TypeError: for a complex or integer input.
        ValueError: for reduction.
        RuntimeError: for shapes and classes out of range.
    Shape:
        - input, target: (N, C) or (C)
        - y: (), or with reduction "none" (N) or ()
    Example:
        >>> x, t = torch.tensor([[1.0, 0.5, 2.0]]), torch.tensor([[0, -1, -1]])
        >>> f = lambda x: hog.ops.multilabel_margin_loss(x, t)
        >>> f(x), torch.func.grad(f)(x)
        (tensor(0.8333), tensor([[-0.6667,  0.3333,  0.3333]]))
    """
    kind = reduction_number(reduction, size_average, reduce)
    validation.real("input", input)
    one = not input.dim() and target.numel() == 1
    if not (_are_rows(input, target) and (one or target.shape == input.shape)):  # torch's error
        return F.multilabel_margin_loss(input, target, size_average, reduce, reduction)
    classes = _classes(input)
    x, t = upcast_half(input.reshape(-1, classes)), target.reshape(-1, classes)
    # what is behind the first -1 goes to a class that is cut off
    listed = (t != -1).cumprod(1) == 1
    counts = x.new_zeros(x.shape[0], classes + 1)
    counts = counts.scatter_add(1, torch.where(listed, t, classes), torch.ones_like(x))[:, :classes]
    hinge = torch.relu((1 - x).unsqueeze(2) + x.unsqueeze(1))
    others = (counts == 0).to(x.dtype).unsqueeze(2)
    loss = (counts.unsqueeze(1) @ (hinge @ others)).reshape(-1) / classes
    return _reduce_rows(loss, kind, input.shape[:-1]).to(input.dtype)


@stands_in_for(F.soft_margin_loss, lacks=NO_FORWARD, modes=("fr",))
@full_precision(widen=True)
def soft_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Logistic loss of targets that are 1 or -1, as `torch.nn.functional.soft_margin_loss`.

        y = log(1 + exp(-target * input)), averaged, summed, or neither

    torch's own has no forward mode. Differentiable by input to any order, in every mode, under vmap.

    Args:
        input: A real floating-point tensor.
        target: 1 or -1 for each element, a constant.
        size_average: Deprecated by torch in favour of reduction. Default: None.
        reduce: Deprecated by torch in favour of reduction. Default: None.
        reduction: "mean", "sum" or "none". Default: "mean".
    Returns:
        The loss, of the dtype of input.
    Raises:
        TypeError: for an integer or complex input.
        ValueError: for another reduction, or a target that requires grad.
    Shape:
        - input, target: any that broadcast together
        - y: [], or with reduction "none" the shape they broadcast to
    Example:
        >>> x, t = torch.tensor([0.0]), torch.tensor([1.0])
        >>> f = lambda x: hog.ops.soft_margin_loss(x, t)
        >>> f(x), hog.hessian(f, x)
        (tensor(0.6931), tensor([[0.2500]]))
    """
    validation.real("input", input)
    if target.requires_grad and torch.is_grad_enabled():
        raise TorchValueError(
            "target: expected a constant, by which soft_margin_loss is not differentiable, got a "
            "tensor that requires grad; pass it detached."
        )
    kind = reduction_number(reduction, size_average, reduce)
    return reduce_loss(-F.logsigmoid(target.to(input.dtype) * input), kind)


def reduction_number(
    reduction: str, size_average: bool | None = None, reduce: bool | None = None
) -> int:
    """NONE, MEAN or SUM; the deprecated arguments take precedence. Raises torch's ValueError."""
    if size_average is not None or reduce is not None:
        return _reduction.legacy_get_enum(size_average, reduce)
    return _reduction.get_enum(reduction)


def reduce_loss(loss: Tensor, number: int, counts: Tensor | None = None) -> Tensor:
    """counts: what each element counts in a mean. Default: 1."""
    if number == NONE:
        return loss
    if number == SUM:
        return loss.sum()
    return loss.mean() if counts is None else loss.sum() / counts.sum()


def _torch_is_right(input: Tensor) -> bool:
    """In reverse mode, but for vmap, where torch takes shapes wrongly, and for half precision, whose
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
    return reduce_loss(d * d, kind).to(dtype)


@full_precision(widen=True)
def _huber(input: Tensor, target: Tensor, kind: int, delta: float) -> Tensor:
    d = upcast_half(input) - upcast_half(target)
    h = torch.where(d.abs() < delta, d, d.detach().clamp(-delta, delta))
    # torch's gives the dtype of input, not the promoted one
    return reduce_loss(h * (d - h / 2), kind).to(input.dtype)


def _are_rows(input: Tensor, target: Tensor) -> bool:
    """Whether the hinge losses take the input, which may have no rows, and the dtype of the target."""
    empty = 0 in input.shape[1:] or (input.dim() == 1 and not input.numel())
    return input.dim() < 3 and not empty and target.dtype == torch.long


def _classes(input: Tensor) -> int:
    return input.shape[-1] if input.dim() else 1


def _reduce_rows(loss: Tensor, kind: int, shape: Any) -> Tensor:
    if kind == NONE:
        return loss.reshape(shape)
    return reduce_loss(loss, kind) if loss.numel() else loss.sum()
