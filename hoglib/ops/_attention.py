"""Scaled dot-product attention of plain operations: the fused kernels have no double backward."""

import math

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import autocast_on, is_half
from hoglib.errors import ArgumentTypeError, ArgumentValueError


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention, as `torch.nn.functional.scaled_dot_product_attention`.

        P = softmax(scale Q K^T + B)        Y = dropout(P) V        scale = 1 / sqrt(E)

    Shapes: query [..., L, E], key [..., S, E], value [..., S, Ev], leading dimensions broadcast;
    Y [..., L, Ev]. attn_mask broadcasts to [..., L, S]: boolean, True for what takes part, or B itself,
    by which it is differentiable too. is_causal: position l sees positions up to l. enable_gqa: fewer
    heads in key and value (dimension -3), each for several of query. A row that sees nothing gives
    zero, and so do its derivatives. Dropout draws from torch's generator, as `F.dropout`.

    Right in every mode and at every order; O(L S) memory, as torch's MATH backend. Half precision is
    computed in float32 and rounded once.
    Raises ValueError for a mask together with is_causal, TypeError for tensors of different
    dtypes, or that are not real and floating-point.
    Source: Vaswani et al., Attention Is All You Need, 2017, equation 1.
    """
    validation.real("query", query)
    if attn_mask is not None and is_causal:
        raise ArgumentValueError(
            "attn_mask: expected None with is_causal=True, got a mask; put what it hides into one mask."
        )
    if autocast_on(query.device.type):  # which casts what is not double
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = (
            x if x.dtype == torch.float64 else x.to(lower) for x in (query, key, value)
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ArgumentTypeError(
            f"query, key, value: expected one dtype, got {query.dtype}, {key.dtype} and {value.dtype}."
        )
    dtype = query.dtype
    heads_inside = query.dim() > 3 and query.stride(-3) < query.stride(-2)
    if enable_gqa:
        key, value = (_for_each_head(x, query) for x in (key, value))
    narrow = is_half(query) and not autocast_on(query.device.type)
    if narrow:
        query, key, value = query.float(), key.float(), value.float()
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.mT
    hidden = None  # rows that see nothing, whose softmax is 0 / 0
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = ~attn_mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~(attn_mask | hidden), -math.inf)
    elif attn_mask is not None:
        hidden = (attn_mask == -math.inf).all(-1, keepdim=True)
        scores = scores + attn_mask.to(scores.dtype).masked_fill(hidden, 0.0)
    weights = torch.softmax(scores, -1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, train=True)
    result = weights.to(value.dtype) @ value
    if heads_inside:  # as torch lays it out: what follows may view heads and values as one
        result = result.transpose(-3, -2).contiguous().transpose(-3, -2)
    return result.to(dtype) if narrow else result


def _for_each_head(x: Tensor, query: Tensor) -> Tensor:
    heads, own = query.shape[-3], x.shape[-3]
    if heads % own:
        raise ArgumentValueError(
            f"enable_gqa: expected a number of query heads that is a multiple of those of key and "
            f"value, got {heads} and {own}."
        )
    return x.repeat_interleave(heads // own, -3)
