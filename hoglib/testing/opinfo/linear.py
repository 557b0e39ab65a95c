"""The catalogue of the theme linear."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import ops
from hoglib.ops._attention import scaled_dot_product_attention
from hoglib.testing.opinfo import references
from hoglib.testing.opinfo.entry import (
    NEEDS_DIMENSIONS,
    WITH_COMPLEX,
    Op,
    Sample,
    broadcast,
    same_shapes,
    sample,
)


def _linear_act(name: str, acts: list[str], **others: Any) -> Op:
    return Op(
        name,
        "linear",
        "act(x W^T + b)",
        ops.linear_act,
        references.linear_act,
        tuple(sample(act, lambda n: (n(2, 3), n(4, 3), n(4)), act=act) for act in acts),
        corners={"zero size": sample("no rows", lambda n: (n(0, 3), n(4, 3), n(4)), act=acts[0])},
        skips={
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions as for linear; none stretch",
        },
        **others,
    )


LINEAR = (
    Op(
        "matmul",
        "linear",
        "A B",
        ops.matmul,
        torch.matmul,
        (
            sample("two matrices", lambda n: (n(2, 3), n(3, 4))),
            sample("batch of matrices", lambda n: (n(2, 2, 3), n(2, 3, 2))),
            sample("batch times matrix", lambda n: (n(2, 2, 3), n(3, 2))),
            sample("two vectors", lambda n: (n(3), n(3))),
            sample("matrix times vector", lambda n: (n(2, 2, 3), n(3))),
            sample("vector times batch", lambda n: (n(3), n(2, 3, 2))),
        ),
        corners={
            "zero size": sample("zero size", lambda n: (n(2, 2, 0), n(2, 0, 3))),
            "broadcasting": broadcast((2, 1, 2, 3), (3, 3, 2)),
        },
        dtypes=WITH_COMPLEX,
        skips=NEEDS_DIMENSIONS,
    ),
    Op(
        "linear",
        "linear",
        "x W^T + b",
        ops.linear,
        F.linear,
        (
            sample("rows", lambda n: (n(2, 3), n(4, 3), n(4))),
            sample("without bias", lambda n: (n(2, 3), n(4, 3), None)),
            sample("one row", lambda n: (n(3), n(2, 3), n(2))),
            sample("two leading dimensions", lambda n: (n(2, 2, 3), n(2, 3), n(2))),
        ),
        corners={"zero size": sample("no rows", lambda n: (n(0, 3), n(4, 3), n(4)))},
        dtypes=WITH_COMPLEX,
        skips={
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions have samples; none stretch",
        },
    ),
    _linear_act("linear_act", ["tanh", "sigmoid", "swish"], dtypes=WITH_COMPLEX),
    _linear_act("linear_act, real only", ["relu", "softplus"], smooth=False),
    Op(
        "bias_add",
        "linear",
        "x + b over channels",
        ops.bias_add,
        references.bias_add,
        (
            sample("channels second", lambda n: (n(2, 3, 2), n(3))),
            sample("channels last", lambda n: (n(2, 3), n(3)), dim=-1),
            sample("channels first", lambda n: (n(2, 3), n(2)), dim=0),
        ),
        corners={"zero size": sample("no rows", lambda n: (n(0, 3), n(3)))},
        dtypes=WITH_COMPLEX,
        skips={**NEEDS_DIMENSIONS, "broadcasting": "the bias has the size of its dimension"},
    ),
    Op(
        "mul",
        "linear",
        "x p",
        ops.mul,
        torch.mul,
        (
            sample("two matrices", lambda n: (n(2, 3), n(2, 3))),
            sample("by a number", lambda n: (n(2, 3), -1.5)),
        ),
        corners={**same_shapes(2), "broadcasting": broadcast((2, 1), (4, 1, 3))},
        dtypes=WITH_COMPLEX,
    ),
)


# === The catalogue of the theme conv.

_SKIPS = {**NEEDS_DIMENSIONS, "broadcasting": "channels and kernel sizes must fit; none stretch"}


def _conv(
    name: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    samples: tuple[Sample, ...],
    empty: Sample,
) -> Op:
    return Op(
        name,
        "conv",
        "b[o] + sum over c, k of w[o, c, k] x[c, t s + k d - p]",
        function,
        reference,
        samples,
        corners={"zero size": empty},
        dtypes=WITH_COMPLEX,
        skips=_SKIPS,
    )


CONV = (
    _conv(
        "conv1d",
        ops.conv1d,
        F.conv1d,
        (
            sample("plain", lambda n: (n(2, 2, 5), n(3, 2, 3), n(3))),
            sample(
                "no bias, stride that leaves a rest", lambda n: (n(1, 2, 6), n(2, 2, 3)), stride=2
            ),
            sample("unbatched, padded", lambda n: (n(2, 4), n(2, 2, 2), n(2)), padding=1),
            sample("same", lambda n: (n(1, 2, 4), n(2, 2, 3), n(2)), padding="same", dilation=2),
            sample("depthwise", lambda n: (n(1, 3, 4), n(6, 1, 2), n(6)), groups=3),
        ),
        sample("no samples", lambda n: (n(0, 2, 5), n(3, 2, 3), n(3))),
    ),
    _conv(
        "conv2d",
        ops.conv2d,
        F.conv2d,
        (
            sample("plain", lambda n: (n(2, 2, 3, 4), n(2, 2, 2, 3) / 4, n(2))),
            sample(
                "all options",
                lambda n: (n(1, 4, 4, 5), n(2, 2, 2, 3) / 4, n(2)),
                stride=(2, 1),
                padding=(1, 2),
                dilation=(2, 1),
                groups=2,
            ),
            sample("unbatched", lambda n: (n(2, 3, 3), n(2, 2, 2, 2))),
        ),
        sample("no samples", lambda n: (n(0, 2, 4, 4), n(3, 2, 2, 2), n(3))),
    ),
    _conv(
        "conv3d",
        ops.conv3d,
        F.conv3d,
        (
            sample("plain", lambda n: (n(1, 2, 2, 3, 2), n(2, 2, 2, 2, 1), n(2))),
            sample(
                "grouped, padded",
                lambda n: (n(1, 2, 2, 2, 2), n(2, 1, 2, 1, 2)),
                groups=2,
                padding=(0, 1, 0),
            ),
        ),
        sample("no samples", lambda n: (n(0, 1, 2, 2, 2), n(1, 1, 1, 2, 2), n(1))),
    ),
)


# === Entries of the catalogue: attention.


def _plain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        heads = query.shape[-3] // key.shape[-3]
        key, value = (
            torch.stack([x[..., i // heads, :, :] for i in range(query.shape[-3])], -3)
            for x in (key, value)
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.einsum("...le,...se->...ls", query, key) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:]).tril().bool()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = scores.exp() * attn_mask
    else:
        weights = (scores if attn_mask is None else scores + attn_mask).exp()
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-300), 0) @ value


SEEN = torch.tensor([[True, False, True], [True, True, False]])

ATTENTION = (
    Op(
        "scaled_dot_product_attention", "missing", "softmax(scale Q K^T + B) V",
        scaled_dot_product_attention, _plain,
        (
            sample("plain", lambda n: (n(2, 3), n(4, 3), n(4, 2))),
            sample("heads", lambda n: (n(2, 2, 2, 3), n(2, 2, 3, 3), n(2, 2, 3, 2)), scale=0.7),
            sample("causal", lambda n: (n(1, 3, 2), n(1, 3, 2), n(1, 3, 2)), is_causal=True),
            sample("boolean mask", lambda n: (n(2, 2), n(3, 2), n(3, 2), SEEN)),
            sample("learned bias", lambda n: (n(2, 2), n(3, 2), n(3, 2), n(2, 3))),
            sample(
                "grouped heads", lambda n: (n(1, 4, 2, 2), n(1, 2, 3, 2), n(1, 2, 3, 2)),
                enable_gqa=True,
            ),
        ),
        corners={
            "zero size": sample("zero size", lambda n: (n(0, 2, 3), n(0, 4, 3), n(0, 4, 2))),
        },
        skips={
            "no dimensions": "attention needs two dimensions to act on",
            "broadcasting": "leading dimensions have samples; none stretch",
        },
    ),
)  # fmt: skip
