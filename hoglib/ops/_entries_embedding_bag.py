"""The catalogue of embedding_bag."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.ops._entry import Op, sample


def _reference(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """A bag at a time, a row at a time."""
    if offsets is None:
        bags = [
            list(range(r * input.shape[1], (r + 1) * input.shape[1])) for r in range(len(input))
        ]
    else:
        starts = offsets.tolist() + ([] if include_last_offset else [len(input)])
        bags = [list(range(a, b)) for a, b in pairwise(starts)]
    rows = input.reshape(-1).tolist()
    scale = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    results = []
    for bag in bags:
        taken = [
            weight[rows[i]] * (1 if scale is None else scale[i])
            for i in bag
            if rows[i] != padding_idx
        ]
        if not taken:
            results.append(torch.zeros_like(weight[:0].sum(0)))
            continue
        stack = torch.stack(taken)
        results.append(getattr(stack, {"max": "amax"}.get(mode, mode))(0))
    return torch.stack(results) if results else weight[:0] * 1


_INDICES = torch.tensor([2, 0, 1, 3, 0])
_OFFSETS = torch.tensor([0, 3, 3])


def _bags(name: str, **options: Any) -> Any:
    return sample(
        name, lambda n: (_INDICES, n(4, 2)), offsets=_OFFSETS, include_last_offset=False, **options
    )


def _sums(
    weight: Tensor,
    per_sample_weights: Tensor,
    input: Tensor,
    offsets: Tensor | None = None,
) -> Tensor:
    return ops.embedding_bag(
        input, weight, offsets, mode="sum", per_sample_weights=per_sample_weights
    )


def _sums_reference(
    weight: Tensor, per_sample_weights: Tensor, input: Tensor, offsets: Tensor | None = None
) -> Tensor:
    return _reference(input, weight, offsets, "sum", per_sample_weights)


_CORNERS = {
    "no dimensions": "needs a table of rows",
    "broadcasting": "one table, nothing to broadcast with",
    "complex": "torch refuses complex tables and so does this, with a RuntimeError that is a TypeError",
}
_NO_BAGS = {
    "zero size": sample("no bags", lambda n: (torch.zeros(0, 3, dtype=torch.long), n(4, 2)))
}

EMBEDDING_BAG = (
    Op(
        "embedding_bag",
        "missing",
        "sum or mean over i in bag b of W[i]",
        ops.embedding_bag,
        _reference,
        (
            _bags("mean"),
            _bags("sum", mode="sum"),
            _bags("padding", padding_idx=0),
            sample("bags of one length", lambda n: (_INDICES[:4].reshape(2, 2), n(4, 2))),
        ),
        corners=_NO_BAGS,
        skips=_CORNERS,
    ),
    Op(
        "embedding_bag, maxima",
        "missing",
        "max over i in bag b of W[i]",
        ops.embedding_bag,
        _reference,
        (
            _bags("maxima", mode="max"),
            sample(
                "bags of one length", lambda n: (_INDICES[:4].reshape(2, 2), n(4, 2)), mode="max"
            ),
        ),
        corners=_NO_BAGS,
        skips={
            **_CORNERS,
            "stride 0": "its rows are equal: of equal maxima torch takes the first, amax shares",
        },
        smooth=False,
    ),
    Op(
        "embedding_bag, weighted",
        "missing",
        "sum over i in bag b of s_i W[i]",
        _sums,
        _sums_reference,
        (
            sample("bags", lambda n: (n(4, 2), n(5), _INDICES, _OFFSETS)),
            sample("one length", lambda n: (n(4, 2), n(2, 2), _INDICES[:4].reshape(2, 2))),
        ),
        corners={
            "zero size": sample(
                "no bags", lambda n: (n(4, 2), n(0, 3), torch.zeros(0, 3, dtype=torch.long))
            )
        },
        skips=_CORNERS,
    ),
)
