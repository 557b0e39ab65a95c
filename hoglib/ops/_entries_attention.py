"""Entries of the catalogue: attention."""

import math

import torch
from torch import Tensor

from hoglib.ops._attention import scaled_dot_product_attention
from hoglib.ops._entry import Op, sample


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
