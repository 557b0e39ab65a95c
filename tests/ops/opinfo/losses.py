"""Losses: cross-entropy, regression, margins and connectionist temporal classification."""

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import groupby, product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import ops
from tests.ops.opinfo.op_info import ONE_TENSOR, elementwise_info, normals, op_info, sample_input

WARNS = {
    "broadcasting": "torch warns of it, which is an error here; in tests/ops/test_regression.py"
}


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else getattr(torch, reduction)(loss)


def _mse(
    input: Tensor, target: Tensor, *args: Any, reduction: str = "mean", weight: Any = None
) -> Tensor:
    return _reduced((input - target) ** 2, reduction)


def _huber(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    d = input - target
    loss = torch.where(d.abs() < delta, d**2 / 2, delta * (d.abs() - delta / 2))
    return _reduced(loss if weight is None else loss * weight, reduction)


def _multi_margin(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
) -> Tensor:
    x, t = torch.atleast_2d(input), target.reshape(-1)
    rows = [x[:0, 0]]
    for n in range(len(t)):
        others = [j for j in range(x.shape[1]) if j != t[n]]
        loss = torch.relu(margin - x[n, t[n], None] + x[n, others]) ** p
        loss = loss.sum(0, True) / x.shape[1]
        rows.append(loss if weight is None else loss * weight[t[n]])
    return _reduced(torch.cat(rows).reshape(target.shape), reduction)


def _multilabel_margin(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    x, t = torch.atleast_2d(input), torch.atleast_2d(target)
    rows = [x[:0, 0]]
    for n in range(len(t)):
        listed = t[n].tolist()
        listed = listed[: listed.index(-1)] if -1 in listed else listed
        others = [j for j in range(x.shape[1]) if j not in listed]
        losses = [torch.relu(1 - x[n, i, None] + x[n, others]).sum() for i in listed]
        rows.append(torch.stack([0 * x[n].sum(), *losses]).sum(0, True) / x.shape[1])
    return _reduced(torch.cat(rows).reshape(input.shape[:-1]), reduction)


def _linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """By rows of probabilities; a position of several loses the dimensions that it has."""
    classes = linear_weight.shape[0]
    z = torch.tensordot(torch.atleast_2d(input), linear_weight, ([1], [-1]))  # (N, C, *)
    z = z.movedim(1, -1).reshape(-1, classes)
    if target.is_floating_point():
        q = target if target.dim() < 3 else target.movedim(1, -1)
        q, counts = q.reshape(-1, classes), torch.ones(len(z))
    else:
        t = target.reshape(-1)
        counts = (t != ignore_index).to(torch.float32)
        q = torch.eye(classes)[torch.where(t == ignore_index, 0, t)]
    q = (1 - label_smoothing) * q.to(z.dtype) + label_smoothing / classes
    loss = -(q * (z - z.exp().sum(1, True).log())).sum(1) * counts.to(z.dtype)
    if reduction == "none":
        return loss.reshape(target.shape[:-1] if target.is_floating_point() else target.shape)
    return loss.sum() / counts.sum().to(z.dtype) if reduction == "mean" else loss.sum()


def _logistic(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    loss = (1 + (-target * x).exp()).log()
    return _reduced(loss, reduction)


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
_SIGNS = torch.tensor([[1, -1, 1], [-1, -1, 1]])
_CLASSES = torch.tensor([1, 3, 0])
_NO_CLASSES = torch.zeros(0, dtype=torch.long)
_SAMPLES_OF_CLASSES = (
    sample_input("rows", lambda n: (n(3, 4), _CLASSES)),
    sample_input("one row", lambda n: (n(4), torch.tensor(2)), reduction="sum"),
    sample_input("pixels", lambda n: (n(2, 3, 2), torch.tensor([[0, 2], [1, 1]])), reduction="none"),
    sample_input("ignored row and smoothing", lambda n: (n(3, 4), torch.tensor([1, -100, 0])), label_smoothing=0.2),
    sample_input("ignored class", lambda n: (n(3, 4), torch.tensor([1, 2, 0])), ignore_index=2),
    sample_input("probabilities", lambda n: (n(2, 3), n(2, 3) ** 2), label_smoothing=0.1),
)  # fmt: skip

OPS = (
    op_info("softmax_cross_entropy", "reduce", F.cross_entropy).on(
        *_SAMPLES_OF_CLASSES,
        zero_size=sample_input("no rows", lambda n: (n(0, 3), _NO_CLASSES), reduction="sum"),
        skips={
            "no dimensions": "needs a dimension of classes",
            "broadcasting": "logits and target have one shape for the rows",
        },
    ),
    elementwise_info("mse_loss", _mse, theme="missing", tensors=2).on(
        sample_input("mean", normals((2, 3), (2, 3))),
        sample_input("sum", lambda n: (n(2, 3) / 4, n(2, 3) / 4), reduction="sum"),
        sample_input("none", normals((2, 3), (2, 3)), reduction="none"),
        skips=WARNS,
    ),
    elementwise_info("huber_loss", _huber, theme="missing", tensors=2).on(
        sample_input("mean", normals((2, 3), (2, 3))),
        sample_input("narrow", normals((2, 3), (2, 3)), delta=0.5, reduction="sum"),
        sample_input("weighted", lambda n: (n(2, 3), n(2, 3), "mean", 0.8, n(2, 3) ** 2 + 1)),
        smooth=False,
        skips=WARNS,
    ),
    op_info("multi_margin_loss", "missing", _multi_margin).on(
        sample_input("rows", lambda n: (n(3, 4), _CLASSES)),
        sample_input("squared", lambda n: (n(3, 4), _CLASSES), p=2, margin=0.7, reduction="none"),
        sample_input("weighted", lambda n: (n(3, 4), _CLASSES, 2, 1.0, n(4) ** 2), reduction="sum"),
        zero_size=sample_input("no rows", lambda n: (n(0, 3), _NO_CLASSES), reduction="none"),
        no_dimensions=lambda n: (n(), torch.tensor(0)),
        smooth=False,
        skips={"broadcasting": "input has a row for each class of target"},
    ),
    op_info("multilabel_margin_loss", "missing", _multilabel_margin).on(
        sample_input("rows", lambda n: (n(2, 3), torch.tensor([[1, -1, 0], [2, 0, -1]]))),
        sample_input("one row", lambda n: (n(4), torch.tensor([3, 0, -1, 2])), reduction="sum"),
        sample_input("twice the same", lambda n: (n(2, 3), torch.tensor([[1, 1, -1], [-1, 0, 1]])), reduction="none"),
        zero_size=sample_input("no rows", lambda n: (n(0, 3), _NO_CLASSES.reshape(0, 3)), reduction="none"),
        smooth=False,
        skips={**ONE_TENSOR, "no dimensions": "torch takes it, and its one class loses nothing"},
    ),
    op_info("linear_cross_entropy", "missing", _linear_cross_entropy).on(
        sample_input("rows", lambda n: (n(3, 2), n(4, 2), _CLASSES)),
        sample_input("positions", lambda n: (n(2, 3), n(4, 2, 3), torch.tensor([[0, 3], [1, -100]])), label_smoothing=0.1),
        sample_input("probabilities", lambda n: (n(2, 3), n(4, 3), n(2, 4) ** 2), reduction="sum", label_smoothing=0.2),
        sample_input("ignored", lambda n: (n(3, 2), n(4, 2), _CLASSES), reduction="none", ignore_index=3),
        zero_size=sample_input("no rows", lambda n: (n(0, 2), n(4, 2), _NO_CLASSES), reduction="sum"),
        skips={"no dimensions": "needs a dimension of features", "broadcasting": "input has a row for each target"},
    ),
    op_info("soft_margin_loss", "missing", _logistic).on(
        sample_input("mean", lambda n: (n(2, 3), _SIGNS)),
        sample_input("sum", lambda n: (n(2, 3), _SIGNS), reduction="sum"),
        sample_input("each", lambda n: (n(2, 3), _SIGNS), reduction="none"),
        zero_size=sample_input("zero size", lambda n: (n(2, 0), _SIGNS[:, :0]), reduction="sum"),
        skips={**ONE_TENSOR, "no dimensions": "the targets of the sample have two dimensions"},
    ),
    op_info("ctc_loss", "missing", _of_scores(_sum_over_paths), _of_scores(ops.ctc_loss)).on(
        sample_input("padded targets", lambda n: (n(3, 2, 3), _PAIRS, (3, 3), (2, 2))),
        sample_input("concatenated targets of several lengths", lambda n: (n(3, 2, 3), torch.tensor([1, 2, 1]), (3, 2), (2, 1)), reduction="none"),
        sample_input("last class blank", lambda n: (n(3, 1, 3), torch.tensor([[0, 1]]), (3,), (2,)), blank=2, reduction="sum"),
        sample_input("impossible and empty", lambda n: (n(2, 3, 3), _PAIRS[[1, 0, 1]], (2, 1, 0), (2, 0, 0)), reduction="none", zero_infinity=True),
        sample_input("no batch", lambda n: (n(3, 3), torch.tensor([1, 1]), (3,), (2,))),
        zero_size=lambda n: (n(2, 2, 3), _PAIRS[:, :0], (2, 1), (0, 0)),
        skips={
            "no dimensions": "needs dimensions of time and classes",
            "broadcasting": "one differentiable tensor, nothing to broadcast with",
            "bfloat16": "torch's own refuses it too, outside of autocast",
        },
    ),
)  # fmt: skip
