"""The catalogue entry of ctc_loss."""

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import groupby, product
from math import prod

import torch
from torch import Tensor

from hoglib import ops
from hoglib.ops._entry import Op, sample


def _of_scores(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function after a log softmax: the gradient by log_probs alone is torch's convention."""

    @wraps(function)
    def normalised(scores: Tensor, *others: object, **options: object) -> Tensor:
        return function(scores - scores.exp().sum(-1, True).log(), *others, **options)

    return normalised


def _sum_over_paths(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Every sequence of classes that collapses to the target, one by one."""
    p = log_probs.exp() if log_probs.dim() == 3 else log_probs.exp().unsqueeze(1)
    rows, start = [], 0
    for n, (steps, size) in enumerate(zip(input_lengths, target_lengths, strict=True)):
        row = targets[n][:size] if targets.dim() == 2 else targets[start : start + size]
        unit = torch.ones_like(p[0, n, 0])
        label, start, terms = row.tolist(), start + size, []
        for path in product(range(p.shape[2]), repeat=steps):
            if [c for c, _ in groupby(path) if c != blank] == label:
                terms.append(prod([p[t, n, c] for t, c in enumerate(path)], start=unit))
        nothing = 0.0 * unit + (0.0 if zero_infinity else torch.inf)
        rows.append(-torch.stack(terms).sum().log() if terms else nothing)
    losses = torch.stack(rows)
    if reduction == "mean":
        return (losses / torch.tensor(target_lengths).clamp(min=1).to(losses.dtype)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


_PAIRS = torch.tensor([[1, 2], [2, 2]])

CTC = (
    Op(
        "ctc_loss",
        "missing",
        "-log P(target | log_softmax(x))",
        _of_scores(ops.ctc_loss),
        _of_scores(_sum_over_paths),
        (
            sample("padded targets", lambda n: (n(3, 2, 3), _PAIRS, (3, 3), (2, 2))),
            sample(
                "concatenated targets of several lengths",
                lambda n: (n(3, 2, 3), torch.tensor([1, 2, 1]), (3, 2), (2, 1)),
                reduction="none",
            ),
            sample(
                "last class blank",
                lambda n: (n(3, 1, 3), torch.tensor([[0, 1]]), (3,), (2,)),
                blank=2,
                reduction="sum",
            ),
            sample(
                "impossible and empty",
                lambda n: (n(2, 3, 3), _PAIRS[[1, 0, 1]], (2, 1, 0), (2, 0, 0)),
                reduction="none",
                zero_infinity=True,
            ),
            sample("no batch", lambda n: (n(3, 3), torch.tensor([1, 1]), (3,), (2,))),
        ),
        corners={
            "zero size": sample("no labels", lambda n: (n(2, 2, 3), _PAIRS[:, :0], (2, 1), (0, 0)))
        },
        skips={
            "no dimensions": "needs dimensions of time and classes",
            "broadcasting": "one differentiable tensor, nothing to broadcast with",
            "bfloat16": "torch's own refuses it too, outside of autocast",
        },
    ),
)
