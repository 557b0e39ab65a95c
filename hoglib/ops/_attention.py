"""Scaled dot-product attention by plain operations: the fused kernels have no double backward."""

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

    A composite of torch operations: torch's fused kernels have no double backward. A row that attends
    to nothing gives zero, and so do its derivatives. O(L S) memory, as torch's MATH backend. Half
    precision is computed in float32 and rounded once. Differentiable to any order, in every mode,
    under vmap.

    Args:
        query: Q, a real floating-point tensor.
        key: K, of the dtype of query.
        value: V, of the dtype of query.
        attn_mask: A boolean mask, True for what takes part; or B itself, by which it is differentiable
            too. Default: none.
        dropout_p: The probability of dropout, drawn from torch's generator as by `F.dropout`.
            Default: 0.
        is_causal: Whether position l attends to positions up to l only. Default: False.
        scale: The factor of the scores. Default: 1 / sqrt(E).
        enable_gqa: Whether key and value may have fewer heads (dimension -3) than query, each for
            several of its heads. Default: False.
    Returns:
        Y, of the dtype of query, or of autocast.
    Raises:
        TypeError: for tensors of different dtypes, or that are not real and floating-point.
        ValueError: for a mask together with is_causal, or numbers of heads that do not divide.
    Shape:
        - query: [..., L, E]
        - key: [..., S, E]
        - value: [..., S, Ev], all with leading dimensions that broadcast
        - attn_mask: broadcasts to [..., L, S]
        - Y: [..., L, Ev]
    References:
        Vaswani et al., Attention Is All You Need, 2017, equation 1.
    Example:
        >>> q = torch.tensor([[1.0]])
        >>> k, v = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]])
        >>> f = lambda q: hog.ops.scaled_dot_product_attention(q, k, v)
        >>> f(q), hog.hvp(lambda q: f(q).sum(), q, torch.ones(1, 1))[1]
        (tensor([[0.7311]]), tensor([[-0.0909]]))
    """
    validation.real("query", query)
    if attn_mask is not None and is_causal:
        raise ArgumentValueError(
            "attn_mask: expected None with is_causal=True, got a mask; combine both in one mask."
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
        key, value = (_repeat_heads(x, query) for x in (key, value))
    upcast = is_half(query) and not autocast_on(query.device.type)
    if upcast:
        query, key, value = query.float(), key.float(), value.float()
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.mT
    empty = None  # rows that attend to nothing, whose softmax is 0 / 0
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        empty = ~attn_mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~(attn_mask | empty), -math.inf)
    elif attn_mask is not None:
        empty = (attn_mask == -math.inf).all(-1, keepdim=True)
        scores = scores + attn_mask.to(scores.dtype).masked_fill(empty, 0.0)
    weights = torch.softmax(scores, -1)
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, train=True)
    result = weights.to(value.dtype) @ value
    if heads_inside:  # as torch lays it out: what follows may view heads and values as one
        result = result.transpose(-3, -2).contiguous().transpose(-3, -2)
    return result.to(dtype) if upcast else result


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    heads, own = query.shape[-3], x.shape[-3]
    if heads % own:
        raise ArgumentValueError(
            f"enable_gqa: expected a number of query heads that is a multiple of those of key and "
            f"value, got {heads} and {own}."
        )
    return x.repeat_interleave(heads // own, -3)
