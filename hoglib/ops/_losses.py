"""Losses without a double backward or forward mode in torch: regression, hinge losses, CTC."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.validation import TorchValueError
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.mixed_precision import full_precision, is_autocast, is_half, upcast_half
from hoglib._core.torch_api.torch_modes import reverse_only
from hoglib._core.torch_api.torch_private import private
from hoglib.errors import UnsupportedError
from hoglib.ops._stand_in import NO_DOUBLE_BACKWARD, NO_FORWARD, stands_in_for

__all__ = [
    "ctc_loss",
    "huber_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
]

_reduction_number = private("torch.nn._reduction.get_enum")
_legacy_reduction_number = private("torch.nn._reduction.legacy_get_enum")
NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reductions

# torch's annotations lack the argument weight
_TORCH_MSE: Callable[..., Tensor] = F.mse_loss
_TORCH_HUBER: Callable[..., Tensor] = F.huber_loss
_TORCH_CTC: Callable[..., Tensor] = F.ctc_loss  # annotations lack tuples of lengths


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

        y = w d^2, its sum, or its sum / sum(w)        dy/dinput = 2 w d,  d = input - target

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
    return _mse(*_broadcast(input, target), reduction_number(reduction, size_average, reduce))


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
        RuntimeError: for a delta of 0 or less.
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
    a, b = _broadcast(input, target)
    if weight is None:
        return _huber(a, b, kind, delta)
    return reduce_loss(_huber(a, b, NONE, delta) * weight, kind)


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

    torch's loss has first derivatives only. Where a margin is met exactly, all derivatives are 0. Half
    precision, which torch refuses on a CPU, is computed in float32. The mean over no rows is 0.
    Differentiable to any order, in every mode, under vmap.

    Args:
        input: x, a real floating-point tensor.
        target: t, the class of each row, of dtype long.
        p: The power, 1 or 2. Default: 1.
        margin: The margin. Default: 1.
        weight: w, one for each class; the loss has derivatives by w too. Default: 1.
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
    classes = _num_classes(input)
    rows = input.numel() // max(classes, 1)
    fits = p in (1, 2) and _are_rows(input, target) and target.dim() < 2 and target.numel() == rows
    if not fits or (weight is not None and weight.shape != (classes,)):  # torch's error
        given: Any = p, margin, weight, size_average, reduce, reduction
        return F.multi_margin_loss(input, target, *given)
    x = upcast_half(input.reshape(rows, classes))
    index = target.reshape(rows, 1)
    # j = t takes no part: set its margin to 0
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

    torch's loss has first derivatives only. This op needs memory for N C^2 numbers. Where a margin is
    met exactly, the derivatives are 0. Half precision, which torch refuses on a CPU, is computed in
    float32. The mean over no rows is 0. In every mode, under vmap.

    Args:
        input: x, a real floating-point tensor.
        target: t, the classes of each row, of dtype long: they end at the row's first -1; repeated
            classes count repeatedly. A class out of range behind the first -1 is not noticed.
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
    classes = _num_classes(input)
    x, t = upcast_half(input.reshape(-1, classes)), target.reshape(-1, classes)
    # entries behind the first -1 go to an extra class, which is cut off
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
    r"""Logistic loss for targets 1 and -1, as `torch.nn.functional.soft_margin_loss`.

        y = log(1 + exp(-target * input)), averaged, summed, or neither

    torch's loss has no forward mode. Differentiable by input to any order, in every mode, under vmap.

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
        return _legacy_reduction_number(size_average, reduce)
    return _reduction_number(reduction)


def reduce_loss(loss: Tensor, number: int, counts: Tensor | None = None) -> Tensor:
    """The reduced loss, by torch's number of the reduction; counts: weights in a mean, by default 1."""
    if number == NONE:
        return loss
    if number == SUM:
        return loss.sum()
    return loss.mean() if counts is None else loss.sum() / counts.sum()


def _torch_is_right(input: Tensor) -> bool:
    """Whether torch's loss is right: in reverse mode, without vmap (torch mistakes shapes) and half
    precision (torch rounds intermediate second derivatives)."""
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
    # h (d - h / 2) is both pieces: d^2 / 2 for h = d, and delta (|d| - delta / 2) for the constant
    # h = delta sign(d)
    h = torch.where(d.abs() < delta, d, d.detach().clamp(-delta, delta))
    # torch's gives the dtype of input, not the promoted one
    return reduce_loss(h * (d - h / 2), kind).to(input.dtype)


def _are_rows(input: Tensor, target: Tensor) -> bool:
    """Whether the hinge losses take the input, which may have no rows, and the dtype of the target."""
    empty = 0 in input.shape[1:] or (input.dim() == 1 and not input.numel())
    return input.dim() < 3 and not empty and target.dtype == torch.long


def _num_classes(input: Tensor) -> int:
    return input.shape[-1] if input.dim() else 1


def _reduce_rows(loss: Tensor, kind: int, shape: Any) -> Tensor:
    if kind == NONE:
        return loss.reshape(shape)
    return reduce_loss(loss, kind) if loss.numel() else loss.sum()


# Connectionist temporal classification: the forward algorithm as a composite.

# The logarithm of 0. A finite number leaves no infinity to subtract, at any order of differentiation;
# it is so low that a sum with it never counts beside a path that exists.
LOG_ZERO = -1e30
Lengths = Tensor | Sequence[int]


@stands_in_for(F.ctc_loss, lacks=NO_DOUBLE_BACKWARD, issue="70108")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    r"""Connectionist temporal classification, as `torch.nn.functional.ctc_loss`.

        a_0(s) = (s = 0)        a_t(s) = p_t(l_s) (a_{t-1}(s) + a_{t-1}(s-1) + k_s a_{t-1}(s-2))
        loss = -log(a_T(2U) + a_T(2U-1))        dloss/dlog p_t(c) = p_t(c) - q_t(c)

    The loss is the negative logarithm of the probability of a labelling: l is the target of U labels
    with blanks around each, k_s = 1 where l_s is not l_{s-2}; q_t(c) is the probability of c at time t
    given the target. The term p_t(c) in the gradient is torch's convention: the loss as a function of
    probabilities that sum to 1. Through log_softmax it makes no difference, to any order; along
    log_probs that do not stay normalised, the derivative is torch's, not the value's.

    Computed in logarithms. A log probability of -inf, and entries after an input's length, have
    derivatives 0. A target that no path reaches has the loss inf, or 0 under zero_infinity, and
    derivatives 0 (torch: NaN without zero_infinity). Differentiable to any order, in every mode, under
    vmap.

    Args:
        log_probs: Logarithms of probabilities, float32 or float64; under autocast float32.
        targets: The labels, padded, or concatenated without padding.
        input_lengths: The length of each sample, a tensor or a tuple.
        target_lengths: U of each sample, a tensor or a tuple, like input_lengths.
        blank: The class of the blank. Default: 0.
        reduction: "mean" (of the losses over their target lengths), "sum" or "none". Default: "mean".
        zero_infinity: Whether the loss of a target that no path reaches is 0. Default: False.
    Returns:
        The loss.
    Raises:
        RuntimeError: as torch, for shapes, lengths and the blank. If lengths in tensors cannot be read
            (under torch.compile or vmap), only lengths that index outside of the tensors raise. Labels
            out of range raise, too, which torch does not check.
        NotImplementedError: for half precision outside of autocast.
        TypeError: for lengths of two kinds.
        ValueError: for an unknown reduction.
    Shape:
        - log_probs: [T, N, C] or [T, C]
        - targets: [N, S], or [sum of target_lengths]
        - input_lengths, target_lengths: [N]
        - loss: [], or with reduction "none" [N]
    References:
        Graves et al., Connectionist Temporal Classification, 2006.
    Example:
        >>> x = torch.zeros(2, 2)  # two steps, a blank and one label
        >>> f = lambda x: hog.ops.ctc_loss(x.log_softmax(-1), torch.tensor([1]), (2,), (1,))
        >>> f(x), hog.hvp(f, x, torch.tensor([[0.0, 1.0], [0.0, 0.0]]))[1]
        (tensor(0.2877), tensor([[-0.0278,  0.0278],
                [-0.1111,  0.1111]]))
    """
    number = reduction_number(reduction)
    validation.real("log_probs", log_probs)
    # under autocast float32 for every dtype but float64, as in torch
    p = log_probs.float() if is_autocast(log_probs) else log_probs
    if p.dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(
            f"ctc_loss: expected float32 or float64 log_probs, got "
            f"{validation.describe(log_probs)}; convert them with `log_probs.float()`."
        )
    p = p.unsqueeze(1) if p.dim() == 2 else p
    lengths = (input_lengths, target_lengths)
    if not _is_supported(p, targets, lengths, blank):
        return _TORCH_CTC(  # torch's error
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    losses, U = _ctc_losses(p, targets, lengths, blank, zero_infinity)
    if number == MEAN:
        return (losses / U.clamp(min=1)).mean()
    if number == SUM:
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


@stands_in_for(torch.ctc_loss, name="ctc_loss")
def torch_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """With the signature of `torch.ctc_loss`: reductions other than 1 and 2 mean "none"."""
    word = {1: "mean", 2: "sum"}.get(reduction, "none")
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, word, zero_infinity)


def _is_supported(p: Tensor, targets: Tensor, lengths: tuple[Lengths, Lengths], blank: int) -> bool:
    """Whether torch accepts these arguments; lengths that cannot be read are checked by number only."""
    # both are integer tensors, or both tuples
    others: list[Any] = [x for x in lengths if not isinstance(x, tuple | list)]
    tensors = all(isinstance(x, Tensor) and not pytree.is_float(x) for x in others)
    if len(others) == 1 or not tensors or torch.bool in [x.dtype for x in others]:
        return False
    if p.dim() != 3 or not p.numel() or not 0 <= blank < p.shape[2]:
        return False
    steps, U = map(_read_lengths, lengths)
    for given, most in ((steps, p.shape[0]), (U, inf)):
        known = [0] * given if isinstance(given, int) else given
        if len(known) != p.shape[1] or not all(0 <= length <= most for length in known):
            return False
    longest, total = (0, None) if isinstance(U, int) else (max(U), sum(U))
    if targets.dim() == 2:
        return targets.shape[0] == p.shape[1] and targets.shape[1] >= longest
    return targets.dim() == 1 and total in (None, targets.shape[0])


def _ctc_losses(
    p: Tensor, targets: Tensor, lengths: tuple[Lengths, Lengths], blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the target lengths."""
    T, N, _ = p.shape
    known, known_U = (None if isinstance(x, int) else x for x in map(_read_lengths, lengths))
    as_long = partial(torch.as_tensor, dtype=torch.long, device=p.device)
    steps, U = (as_long(x).reshape(-1) for x in lengths)
    labels = _pad_labels(targets.to(device=p.device, dtype=torch.long), U, known_U, blank)
    if known != [T] * N:  # torch does not read entries after a sample's end: they may be NaN
        p = torch.where(_length_mask(steps, T).t().unsqueeze(2), p, 0)
    a = _log_probability(p, labels, steps, known, U, blank)
    # a term of value 0 with the derivative p_t(c) of torch's convention; see the docstring
    total = p.exp().sum((0, 2))
    possible = a > LOG_ZERO / 100
    value = (total - total.detach()).nan_to_num() - a  # NaN: totals of unnormalised exp(100)
    return torch.where(possible, value, 0.0 if zero_infinity else torch.inf), U.to(p.dtype)


def _log_probability(
    p: Tensor, labels: Tensor, steps: Tensor, known: list[int] | None, U: Tensor, blank: int
) -> Tensor:
    """log(a_T(2U) + a_T(2U-1)) of each row; near LOG_ZERO if no path reaches the target."""
    T, N, _ = p.shape
    states = F.pad(F.pad(labels.unsqueeze(2), (1, 0), value=blank).flatten(1), (0, 1), value=blank)
    L = states.shape[1]
    s = torch.arange(L, device=p.device)
    new = F.pad(states[:, 2:] != states[:, :-2], (min(2, L), 0))  # no skip of a label's repetition
    free = torch.zeros_like(states, dtype=p.dtype)
    skips = torch.where(new, free, LOG_ZERO)
    arrows = torch.stack((free, torch.where(s > 0, free, LOG_ZERO), skips), 1)
    sources = torch.stack((s, s - 1, s - 2)).clamp(min=0).reshape(-1).expand(N, 3 * L)
    full = known == [T] * N
    # a log probability of -inf becomes LOG_ZERO, with derivative 0
    emitted = p.gather(2, states.expand(T, N, L)).clamp(min=LOG_ZERO)
    a = torch.where(s == 0, free, LOG_ZERO)
    history = [a]
    for e in emitted.unbind(0)[: T if known is None else max(known)]:
        a = _logsumexp(a.gather(1, sources).unflatten(1, (3, L)) + arrows, e)
        # inputs of different lengths end at different times: keep the states, to pick from below
        history = [a] if full else [*history, a]
    if not full:
        a = torch.stack(history).gather(0, steps.reshape(1, N, 1).expand(1, N, L)).squeeze(0)
    ends = torch.stack((2 * U, 2 * U - 1), 1)
    last = a.gather(1, ends.clamp(min=0))
    # a target without labels has one last state, not two
    return _logsumexp(last.masked_fill(ends < 0, LOG_ZERO), torch.zeros_like(last[:, 0]))


def _logsumexp(x: Tensor, more: Tensor) -> Tensor:
    """log sum_i exp(x[:, i]) + more; torch.logsumexp raises in reverse over forward mode."""
    # detached, because the maximum cancels in derivatives
    top = x.detach().amax(1)
    return (x - top.unsqueeze(1)).exp().sum(1).log() + (top + more)


def _length_mask(ends: Tensor, size: int) -> Tensor:
    """The mask [N, size] of places before each row's end."""
    return torch.arange(size, device=ends.device) < ends.unsqueeze(1)


def _pad_labels(labels: Tensor, U: Tensor, known: list[int] | None, blank: int) -> Tensor:
    """The labels as [N, S], with blanks after each row's end."""
    if labels.dim() == 2:
        return torch.where(_length_mask(U, labels.shape[1]), labels, blank)
    total = labels.shape[0]
    S = total if known is None else max(known)
    starts = (U.cumsum(0) - U).unsqueeze(1)
    # places after a row's end point to index `total`, where a blank is appended
    places = torch.where(_length_mask(U, S), starts + torch.arange(S, device=labels.device), total)
    return F.pad(labels, (0, 1), value=blank)[places]


def _read_lengths(lengths: Lengths) -> list[int] | int:
    """The lengths; if they cannot be read, their number."""
    if not isinstance(lengths, Tensor):
        return [int(length) for length in lengths]
    if torch.compiler.is_compiling():
        return lengths.numel()
    try:
        return lengths.reshape(-1).tolist()
    except RuntimeError:  # vmap and fake tensors have no numbers to read
        return lengths.numel()
