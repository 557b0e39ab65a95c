"""Connectionist temporal classification: the forward algorithm as a composite."""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.mixed_precision import is_autocast
from hoglib.errors import UnsupportedError
from hoglib.ops._losses import MEAN, SUM, reduction_number
from hoglib.ops._stand_in import NO_DOUBLE_BACKWARD, stands_in_for

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
    given the target. p_t(c) in the gradient is torch's own convention: the loss as a function of
    probabilities that sum to 1. Through log_softmax it makes no difference, to any order; a derivative
    along log_probs that do not stay normalised is torch's, not that of the value.

    Computed in logarithms. A log probability of -inf, and what comes after an input's length, have
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
        RuntimeError: as torch, for shapes, lengths and the blank. Of lengths in tensors that cannot be
            read (under torch.compile or vmap) only those that index outside of the tensors raise; so do
            labels out of range, which torch does not check.
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
    p = _cast(log_probs)
    p = p.unsqueeze(1) if p.dim() == 2 else p
    lengths = (input_lengths, target_lengths)
    if not _are_lengths(*lengths) or not _fits(p, targets, *map(_read_lengths, lengths), blank):
        return F.ctc_loss(  # torch's error
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    losses, U = _losses(p, targets, input_lengths, target_lengths, blank, zero_infinity)
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
    """With the signature of `torch.ctc_loss`, where any other number than 1 and 2 means "none"."""
    word = {1: "mean", 2: "sum"}.get(reduction, "none")
    return ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, word, zero_infinity
    )  # fmt: skip


def _are_lengths(*lengths: Any) -> bool:
    """Whether both are tensors of whole numbers, or both tuples."""
    if all(isinstance(given, tuple | list) for given in lengths):
        return True
    return all(
        isinstance(x, Tensor) and x.dtype != torch.bool and not pytree.is_float(x) for x in lengths
    )


def _fits(
    p: Tensor, targets: Tensor, steps: list[int] | int, U: list[int] | int, blank: int
) -> bool:
    """Whether torch takes these; of lengths that cannot be read, their number is known."""
    if p.dim() != 3 or not p.numel() or not 0 <= blank < p.shape[2]:
        return False
    for lengths, most in ((steps, p.shape[0]), (U, inf)):
        known = [0] * lengths if isinstance(lengths, int) else lengths
        if len(known) != p.shape[1] or not all(0 <= length <= most for length in known):
            return False
    longest, total = (0, None) if isinstance(U, int) else (max(U), sum(U))
    if targets.dim() == 2:
        return targets.shape[0] == p.shape[1] and targets.shape[1] >= longest
    return targets.dim() == 1 and total in (None, targets.shape[0])


def _losses(
    p: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the target lengths."""
    T, N, _ = p.shape
    known, known_U = (
        None if isinstance(found := _read_lengths(given), int) else found
        for given in (input_lengths, target_lengths)
    )
    steps, U = (
        torch.as_tensor(given, dtype=torch.long, device=p.device).reshape(-1)
        for given in (input_lengths, target_lengths)
    )
    labels = _pad_labels(targets.to(device=p.device, dtype=torch.long), U, known_U, blank)
    if known != [T] * N:  # torch does not read what comes after an end, be it infinite or NaN
        p = torch.where(_length_mask(steps, T).t().unsqueeze(2), p, 0)
    a = _log_probability(p, labels, steps, known, U, blank)
    # a correction of value 0 that brings torch's gradient by log_probs; see the docstring
    total = p.exp().sum((0, 2))
    possible = a > LOG_ZERO / 100
    value = (total - total.detach()).nan_to_num() - a  # NaN: totals of unnormalised exp(100)
    return torch.where(possible, value, 0.0 if zero_infinity else torch.inf), U.to(p.dtype)


def _log_probability(
    p: Tensor, labels: Tensor, steps: Tensor, known: list[int] | None, U: Tensor, blank: int
) -> Tensor:
    """log(a_T(2U) + a_T(2U-1)) of each row; near LOG_ZERO where no path reaches it."""
    T, N, _ = p.shape
    states = F.pad(F.pad(labels.unsqueeze(2), (1, 0), value=blank).flatten(1), (0, 1), value=blank)
    L = states.shape[1]
    s = torch.arange(L, device=p.device)
    new = F.pad(states[:, 2:] != states[:, :-2], (min(2, L), 0))  # no skip of a label's repetition
    free = torch.zeros_like(states, dtype=p.dtype)
    arrows = torch.stack(
        (free, torch.where(s > 0, free, LOG_ZERO), torch.where(new, free, LOG_ZERO)), 1
    )
    sources = torch.stack((s, s - 1, s - 2)).clamp(min=0).reshape(-1).expand(N, 3 * L)
    full = known == [T] * N
    emitted = p.gather(2, states.expand(T, N, L)).clamp(min=LOG_ZERO)
    a = torch.where(s == 0, free, LOG_ZERO)
    history = [a]
    for e in emitted.unbind(0)[: T if known is None else max(known)]:
        a = _logsumexp(a.gather(1, sources).unflatten(1, (3, L)) + arrows, e)
        history = [a] if full else [*history, a]
    if not full:
        at_end = steps.reshape(1, N, 1).expand(1, N, L)
        a = torch.stack(history).gather(0, at_end).squeeze(0)
    ends = torch.stack((2 * U, 2 * U - 1), 1)
    last = a.gather(1, ends.clamp(min=0))
    # a target without labels has one last state, not two
    return _logsumexp(last.masked_fill(ends < 0, LOG_ZERO), torch.zeros_like(last[:, 0]))


def _logsumexp(x: Tensor, more: Tensor) -> Tensor:
    """log sum_i exp(x[:, i]) + more; torch.logsumexp raises in reverse over forward mode."""
    top = x.detach().amax(1)
    return (x - top.unsqueeze(1)).exp().sum(1).log() + (top + more)


def _length_mask(ends: Tensor, size: int) -> Tensor:
    """[N, size]: the places of each row that come before its end."""
    return torch.arange(size, device=ends.device) < ends.unsqueeze(1)


def _pad_labels(labels: Tensor, U: Tensor, known: list[int] | None, blank: int) -> Tensor:
    """The labels [N, S], with blanks after the end of each."""
    if labels.dim() == 2:
        return torch.where(_length_mask(U, labels.shape[1]), labels, blank)
    total = labels.shape[0]
    S = total if known is None else max(known)
    starts = (U.cumsum(0) - U).unsqueeze(1)
    # the place after the last label holds a blank for all that comes after an end
    places = torch.where(_length_mask(U, S), starts + torch.arange(S, device=labels.device), total)
    return F.pad(labels, (0, 1), value=blank)[places]


def _read_lengths(lengths: Lengths) -> list[int] | int:
    """The lengths, or how many there are where they cannot be read."""
    if not isinstance(lengths, Tensor):
        return [int(length) for length in lengths]
    if torch.compiler.is_compiling():
        return lengths.numel()
    try:
        return lengths.reshape(-1).tolist()
    except RuntimeError:  # vmap and fake tensors have no numbers to read
        return lengths.numel()


def _cast(log_probs: Tensor) -> Tensor:
    """float32 or float64, the former for any but the latter under autocast, as torch's."""
    validation.real("log_probs", log_probs)
    if is_autocast(log_probs):
        return log_probs.float()
    if log_probs.dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(
            f"ctc_loss: expected float32 or float64 log_probs, got "
            f"{validation.describe(log_probs)}; convert them with `log_probs.float()`."
        )
    return log_probs
