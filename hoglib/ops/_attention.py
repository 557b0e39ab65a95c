"""Scaled dot-product attention: torch's fused kernels have no double backward and no forward mode."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.runtime.ambient import AMBIENT
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.mixed_precision import (
    autocast_on,
    cast_for_product,
    is_half,
    without_autocast,
)
from hoglib._core.torch_api.torch_modes import only_plain_operations
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from hoglib.ops import _attention_blocks as blocks
from hoglib.ops._function import Batch, Saved, apply_function, by_name, make_function, sum_terms
from hoglib.ops._stand_in import NO_DOUBLE_BACKWARD, stands_in_for

__all__ = ["attention_dropout_mask", "scaled_dot_product_attention"]


@stands_in_for(
    F.scaled_dot_product_attention, lacks=f"{NO_DOUBLE_BACKWARD}: its fused kernels", issue="116350"
)
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

    torch's fused kernels have no double backward and no forward mode. Differentiable to any order, in
    every mode, under vmap. Above a length of some hundreds all orders run by blocks of rows, which are
    computed anew from Q and K: no tensor of the size [L, S] is kept, except the gradient of a mask that
    requires grad, and under torch.compile or jvp inside jvp. On the CPU, in float32 and float64,
    without dropout, for E = Ev, torch's fused kernel computes value and gradient. A row that attends to
    nothing gives zero, and so do its derivatives. Half precision is computed in float32 and rounded
    once.

    Args:
        query: Q, a real floating-point tensor.
        key: K, of the dtype of query.
        value: V, of the dtype of query.
        attn_mask: A boolean mask, True for keys that take part; or B itself, in float32 or the dtype of
            query, with derivatives by B too. Default: none.
        dropout_p: The probability of dropout. The random numbers are seeded by torch's generator
            (:func:`attention_dropout_mask` returns them), but differ from torch's. Default: 0.
        is_causal: Whether position l attends to positions up to l only. Default: False.
        scale: The factor of the scores. Default: 1 / sqrt(E).
        enable_gqa: Whether key and value may have fewer heads (dimension -3) than query, each for
            several of its heads. Default: False.
    Returns:
        Y, of the dtype of query, or of autocast.
    Raises:
        TypeError: for tensors of different dtypes, or that are not dense, real and floating-point, and
            for a mask of another dtype.
        ValueError: for shapes or devices that do not fit, a mask together with is_causal, numbers of
            heads that do not divide, or a dropout_p that is no probability.
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
    _check_options(attn_mask, dropout_p, is_causal, scale)
    _check_shapes(query, key, value, attn_mask, enable_gqa)
    query, key, value = cast_for_product(query, key, value)
    if attn_mask is not None and autocast_on(query.device.type) and is_half(attn_mask):
        attn_mask = attn_mask.float()
    if not query.dtype == key.dtype == value.dtype:
        raise ArgumentTypeError(
            f"query, key, value: expected one dtype, got {query.dtype}, {key.dtype} and {value.dtype}."
        )
    _check_mask_dtype(attn_mask, query)
    dtype = query.dtype
    heads_inside = query.dim() > 3 and query.stride(-3) < query.stride(-2)
    short = _is_short(query, key, value)
    low_memory = AMBIENT.remat is not None and AMBIENT.remat.low_memory
    if low_memory and not (dropout_p or is_half(query) or only_plain_operations()):
        short = short and not _are_large(query, key, value)
    # compute in float32, and round the result once
    if is_half(query) and not (short and autocast_on(query.device.type)):
        query, key, value = query.float(), key.float(), value.float()
    # scale Q, which has fewer elements than the scores [L, S]
    query = query * (1.0 / math.sqrt(query.shape[-1] or 1) if scale is None else scale)
    if short:
        k, v = (_repeat_heads(x, query) if enable_gqa else x for x in (key, value))
        result = _by_formula(query, k, v, attn_mask, dropout_p, is_causal)
    else:
        with without_autocast(query):
            form = _Form.of(query, key, value, attn_mask, dropout_p, enable_gqa)
            result = form.attention(dropout_p, is_causal)
    if heads_inside:  # torch's memory layout, in which users may view heads and values as one
        result = result.transpose(-3, -2).contiguous().transpose(-3, -2)
    return result.to(dtype)


def attention_dropout_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    enable_gqa: bool = False,
) -> Tensor:
    r"""The weights that dropout in :func:`scaled_dot_product_attention` keeps.

        P_ls is kept and divided by 1 - p where the mask is True, and is 0 elsewhere.

    It draws from torch's generator exactly as the attention with these arguments would.
    It has no derivative of any order.

    Args:
        query: As for the attention.
        key: As for the attention.
        value: As for the attention.
        attn_mask: As for the attention; only its shape is read. Default: none.
        dropout_p: The probability of dropout. Default: 0.
        enable_gqa: As for the attention. Default: False.
    Returns:
        A boolean tensor.
    Raises:
        ValueError: for shapes that do not fit, or a dropout_p that is no probability.
    Shape:
        - query, key, value: as for the attention
        - mask: [..., L, S], with the heads of query
    References:
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011 (Philox4x32-10).
    Example:
        >>> q = torch.zeros(1000, 4)
        >>> mask = hog.ops.attention_dropout_mask(q, q, q, dropout_p=0.25)
        >>> mask.shape, abs(mask.float().mean().item() - 0.75) < 0.01
        (torch.Size([1000, 1000]), True)
    """
    _check_options(attn_mask, dropout_p)
    _check_shapes(query, key, value, attn_mask, enable_gqa)
    if _is_short(query, key, value):
        own = _repeat_heads(key, query) if enable_gqa else key
        # draw as the formula does: its weights have this shape and memory order
        ones = torch.ones_like((query @ own.mT).detach(), dtype=torch.float32)
        if attn_mask is not None:
            ones = ones.expand(torch.broadcast_shapes(ones.shape, attn_mask.shape)).contiguous()
        return torch.dropout(ones, dropout_p, train=True) != 0
    form = _Form.of(query, key, value, attn_mask, dropout_p, enable_gqa)
    count, heads, length, _ = form.inputs.q.shape
    if form.inputs.keys is None:
        shape = count, heads, length, key.shape[-2]
        return form.result(torch.ones(shape, dtype=torch.bool, device=key.device))
    rows = torch.arange(heads * length, device=key.device)
    kept = blocks.dropout_mask(form.inputs.keys, rows, key.shape[-2], dropout_p)
    return form.result(kept.unflatten(1, (heads, length)))


def _check_options(
    mask: Tensor | None, dropout_p: float, is_causal: bool = False, scale: float | None = None
) -> None:
    if mask is not None:
        validation.tensor("attn_mask", mask)
        if is_causal:
            raise ArgumentValueError(
                "attn_mask: expected None with is_causal=True, got a mask; combine both in one mask."
            )
    if not isinstance(is_causal, torch.SymBool):
        validation.boolean("is_causal", is_causal)
    validation.fraction("dropout_p", dropout_p)
    if not (scale is None or isinstance(scale, torch.SymFloat)):
        validation.tensor_or_number("scale", scale)


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> None:
    """Raise for shapes that do not fit: blocks and torch's kernels would compute without an error."""
    for name, x in ("query", query), ("key", key), ("value", value):
        validation.real(name, x)
    named = {"query": query, "key": key, "value": value, "attn_mask": mask}
    present = {name: x for name, x in named.items() if x is not None}
    fewest = 3 if enable_gqa else 2
    for name, x in present.items():
        if x.layout is not torch.strided or x.is_nested:
            raise ArgumentTypeError(
                f"{name}: expected a dense tensor, got one that is "
                f"{'nested' if x.is_nested else x.layout}; convert it, with a mask for what is added."
            )
        if x.device != query.device:
            raise ArgumentValueError(
                f"{name}: expected a tensor on {query.device}, where query is, got one on {x.device}; "
                f"move it with `.to({str(query.device)!r})`."
            )
        if x.dim() < fewest and name != "attn_mask":
            raise ArgumentValueError(
                f"{name}: expected at least {fewest} dimensions, [{'heads, ' * enable_gqa}length, "
                f"width], got {tuple(x.shape)}."
            )
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ArgumentValueError(
            "query, key, value: expected [..., L, E], [..., S, E] and [..., S, Ev], got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    lead, scores = query.shape[:-2], (query.shape[-2], key.shape[-2])
    own = () if mask is None else mask.shape
    fits = all(m in (1, n) for m, n in zip(own[::-1], scores[::-1], strict=False))
    if not lead == key.shape[:-2] == value.shape[:-2] or len(own) > 2:
        grouped = [(*x.shape[:-3], lead[-1]) if enable_gqa else x.shape[:-2] for x in (key, value)]
        try:
            torch.broadcast_shapes(lead, *grouped, own[:-2])
        except RuntimeError:
            fits = False
    if not fits:
        got = ", ".join(f"{name} {tuple(x.shape)}" for name, x in present.items())
        raise ArgumentValueError(
            "query, key, value, attn_mask: expected leading dimensions that broadcast, and a mask that "
            f"broadcasts to [..., {scores[0]}, {scores[1]}], got {got}."
        )


def _check_mask_dtype(mask: Tensor | None, query: Tensor) -> None:
    """Raise for a mask dtype that torch refuses: an integer mask would be added to the scores."""
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        advice = f".to({query.dtype})" if mask.is_floating_point() else ".bool()"
        raise ArgumentTypeError(
            "attn_mask: expected a boolean mask, True for what takes part, or numbers in torch.float32 "
            f"or the dtype of query, {query.dtype}, got {mask.dtype}; pass `attn_mask{advice}`."
        )


def _is_short(query: Tensor, key: Tensor, value: Tensor) -> bool:
    scores = query.shape[-2] * key.shape[-2]
    empty = not all(x.numel() for x in (query, key, value))
    return empty or only_plain_operations() or scores <= blocks.sizes(query).formula


def _are_large(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the scores [L, S], which the formula keeps, are larger than all tensors blocks keep."""
    rows, columns = query.shape[-2], key.shape[-2]
    kept = (rows + columns) * (query.shape[-1] + value.shape[-1])
    return rows * columns > kept and query.numel() > 0


def _by_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool
) -> Tensor:
    """dropout(softmax(Q K^T + B)) V, with a scaled Q."""
    scores = q @ k.mT
    future = None
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = blocks.softmax_of(scores, mask, future)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, train=True)
    return weights.to(v.dtype) @ v


class _Form(NamedTuple):
    """The arguments in the form of `hoglib.ops._attention_blocks`, and how to undo it."""

    inputs: blocks.Inputs
    places: tuple[int, ...] | None  # for each of N, the index of its mask; None: one mask
    lead: torch.Size  # the leading dimensions that N stands for
    grouped: bool  # grouped-query attention

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, grouped: bool
    ) -> "_Form":
        # groups of different sizes do not fit into one dimension H
        if grouped and k.shape[-3] != v.shape[-3]:
            k, v, grouped = _repeat_heads(k, q), _repeat_heads(v, q), False
        heads = (k.shape[-3], _group_size(k, q)) if grouped else ()
        q = q.unflatten(-3, heads) if grouped else q.unsqueeze(-3)
        if mask is not None:
            mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
            mask = mask[(None,) * (3 - mask.dim())]
            one_for_all = not grouped or mask.shape[-3] == 1
            mask = mask.unsqueeze(-3) if one_for_all else mask.unflatten(-3, heads)
        own = torch.Size() if mask is None else mask.shape[:-3]
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-2], v.shape[:-2], own)
        count = math.prod(lead)
        places = None
        if mask is not None:
            places = _mask_indices((1,) * (len(lead) - len(own)) + own, lead)
            mask = mask.reshape(-1, *mask.shape[-3:])
        q = q.expand(*lead, *q.shape[-3:]).reshape(count, *q.shape[-3:])
        k, v = (x.expand(*lead, *x.shape[-2:]).reshape(count, *x.shape[-2:]) for x in (k, v))
        keys = blocks.draw_keys(count, q.device) if dropout_p > 0.0 else None
        return cls(blocks.Inputs(q, k, v, mask, keys), places, lead, grouped)

    def attention(self, dropout_p: float, causal: bool) -> Tensor:
        q, _, v, _, keys = self.inputs
        fused = q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and keys is None
        plan = blocks.Plan(causal, self.places, dropout_p, fused)
        return self.result(apply_function(_VALUES, _reference_value, *self.inputs, plan)[0])

    def result(self, x: Tensor) -> Tensor:
        """[N, H, L, ...] -> [..., L, ...]"""
        x = x.reshape(*self.lead, *x.shape[1:])
        return x.flatten(-4, -3) if self.grouped else x.squeeze(-3)


def _mask_indices(own: tuple[int, ...], lead: torch.Size) -> tuple[int, ...] | None:
    """For each of N the index of its mask; None if there is one mask. own: the masks' leading dims."""
    if math.prod(own) == 1:
        return None
    places = [0]
    for size, full in zip(own, lead, strict=True):
        # row-major over the leading dimensions; a dimension of size 1 broadcasts
        places = [i * size + (j if size > 1 else 0) for i in places for j in range(full)]
    return tuple(places)


def _group_size(x: Tensor, query: Tensor) -> int:
    """The number of query heads for each head of x."""
    heads, own = query.shape[-3], x.shape[-3]
    if heads % own:
        raise ArgumentValueError(
            f"enable_gqa: expected a number of query heads that is a multiple of those of key and "
            f"value, got {heads} and {own}."
        )
    return heads // own


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(_group_size(x, query), -3)


# Attention by blocks as a differentiable function: each map of `_attention_blocks` is a Function, and
# further maps are its backward and jvp.
#
#     Function      backward                       jvp
#     values        gradients                      tangents
#     gradients     curvature                      curvature
#     tangents      curvature                      none
#     curvature     derivatives of its formula     derivatives of its formula
#
# Under vmap the batch joins the heads. Tracers record a map as one operator.


_MAPS: dict[str, Callable[..., Any]] = {
    "values": blocks.compute_values,
    "gradients": blocks.compute_gradients,
    "tangents": blocks.compute_tangents,
    "curvature": blocks.compute_curvature,
}

# The operator that tracers record, instead of the operations of each block.
torch.library.define(
    "hoglib::attention",
    "(str which, Tensor?[] tensors, bool causal, int[]? places, float dropout_p, bool fused, str needs)"
    " -> Tensor[]",
)


def _operator(which: str, tensors: list[Tensor | None], *plan: Any) -> list[Tensor]:
    result = _MAPS[which](*tensors, _make_plan(*plan))
    parts = [result] if isinstance(result, Tensor) else result
    return [x.contiguous() for x in parts if x is not None]


def _fake_outputs(which: str, tensors: list[Any], *given: Any) -> list[Tensor]:
    (q, k, v, mask, *_), plan = tensors, _make_plan(*given)
    y = q.new_empty(*q.shape[:3], v.shape[-1])
    if which in ("values", "tangents"):
        sums = q.new_empty(q.shape[:3] if plan.fused else (len(q), 0))
        return [y, sums] if which == "values" else [y]
    pairs = zip(blocks.NAMES, (q, k, v, mask), strict=True)
    parts = [q.new_empty(x.shape) for name, x in pairs if name in plan.needs]
    return [*parts, y] if which == "curvature" else parts


def _make_plan(causal: bool, places: Any, dropout_p: float, fused: bool, needs: str) -> blocks.Plan:
    return blocks.Plan(causal, None if places is None else tuple(places), dropout_p, fused, needs)


torch.library.impl("hoglib::attention", "CompositeExplicitAutograd", _operator)
torch.library.register_fake("hoglib::attention", _fake_outputs)


def _run(which: str, *given: Any) -> Any:
    """The outputs of a map; a tracer gets one operator, unless it differentiates through the map."""
    *tensors, plan = given
    with without_autocast(given[0]):
        traced = torch_internals.tracing() and not torch.compiler.is_dynamo_compiling()
        # a tracer that differentiates must see the operations
        if not traced or blocks.is_recorded(given):
            result = _MAPS[which](*given)
        else:
            result = torch.ops.hoglib.attention(which, tensors, *plan)
            result = result[0] if which == "tangents" else result
    return result if isinstance(result, Tensor) else tuple(x for x in result if x is not None)


def _reference_value(*given: Any) -> tuple[Tensor, Tensor]:
    """The value by torch operations, for the compiler and jvp inside jvp."""
    *tensors, plan = given
    return blocks.compute_values(*tensors, plan._replace(fused=False))


def _gradients_by(needs: str, *given: Any) -> blocks.Parts:
    """The gradients by the inputs named in `needs`, as a Function; None for further inputs."""
    *tensors, plan = given
    if not needs:
        return (None,) * len(blocks.NAMES)
    grads = apply_function(_GRADIENTS, None, *tensors, plan._replace(needs=needs))
    return by_name(blocks.NAMES, needs, grads)


def _values_backward(saved: Saved, g: Tensor, _: object) -> blocks.Parts:
    *tensors, plan = saved.inputs
    return *_gradients_by(saved.needed(blocks.NAMES), *tensors, g, *saved.outputs, plan), None, None


def _values_jvp(saved: Saved, *tangents: Any) -> tuple[Tensor, Tensor]:
    *tensors, plan = saved.inputs
    y = apply_function(_TANGENTS, None, *tensors, *tangents[:4], plan)
    # only the fused kernel's gradient reads the sums; they have no derivative
    return y, torch.zeros_like(saved.outputs[1])


def _curvature_by(needs: str, *given: Any) -> blocks.Parts:
    """The curvature as a Function: the parts by the inputs named in `needs`, and Y'."""
    *tensors, plan = given
    parts = apply_function(_CURVATURE, None, *tensors, plan._replace(needs=needs))
    return by_name(blocks.KINDS, (*needs, "y"), parts)


def _curvature_backward(saved: Saved, *grads: Tensor | None) -> blocks.Parts:
    *tensors, plan = saved.inputs
    cotangents = by_name(blocks.KINDS, (*plan.needs, "y"), grads)
    results = list(blocks.derivative_of_curvature("vjp", *tensors, *cotangents, plan))
    results.insert(4, None)  # the keys of dropout
    pairs = zip(results, saved.needs_input_grad, strict=False)
    return [*(x if need else None for x, need in pairs), None]


def _curvature_jvp(saved: Saved, *tangents: Any) -> tuple[Tensor, ...]:
    *tensors, plan = saved.inputs
    along = *tangents[:4], *tangents[5:10]
    parts = blocks.derivative_of_curvature("jvp", *tensors, *along, plan)
    return tuple(x for x in parts if x is not None)


def _gradients_backward(saved: Saved, *grads: Tensor | None) -> blocks.Parts:
    *tensors, g, _, _, plan = saved.inputs
    along = by_name(blocks.NAMES, plan.needs, grads)
    results = _curvature_by(saved.needed(blocks.NAMES), *tensors, g, *along, plan)
    return *results[:4], None, results[4] if saved.needs_input_grad[5] else None, None, None, None


def _gradients_jvp(saved: Saved, *tangents: Any) -> Any:
    *tensors, g, y, logsumexp, plan = saved.inputs
    along, dg = tangents[:4], tangents[5]
    terms: list[blocks.Parts] = []
    if any(x is not None for x in along):
        terms.append(_curvature_by(plan.needs, *tensors, g, *along, plan)[:4])
    if dg is not None:
        terms.append(_gradients_by(plan.needs, *tensors, dg, y, logsumexp, plan))
    if not terms:
        return tuple(map(g.new_zeros, saved.output_shapes))
    parts = zip(*terms, strict=True)
    return tuple(sum_terms([x for x in of if x is not None]) for of in parts if of[0] is not None)


def _tangents_backward(saved: Saved, g: Tensor) -> blocks.Parts:
    *tensors, dq, dk, dv, dm, plan = saved.inputs
    needs = saved.needed(blocks.NAMES)
    grads: blocks.Parts = (None,) * 4
    if needs:
        grads = _curvature_by(needs, *tensors, g, dq, dk, dv, dm, plan)[:4]
    by_tangents = _gradients_by(saved.needed(blocks.NAMES, 5), *tensors, g, None, None, plan)
    return *grads, None, *by_tangents, None


def _tangents_jvp(saved: Saved, *tangents: Any) -> Tensor:
    raise UnsupportedError(
        "scaled_dot_product_attention: expected at most one level of forward-mode differentiation, "
        "got jvp inside jvp of forward_ad; use torch.func.jvp for both levels."
    )


# number of a map's tensors -> the positions of masks among them
_MASK_PLACES = {5: (3,), 8: (3,), 9: (3, 8), 10: (3, 9)}


def _fold_batch(batch: Batch, *given: Any) -> tuple[tuple[Tensor, ...] | Tensor, Any]:
    """The vmap rule of all four maps: the batch joins N and, if a mask is batched, M."""
    *tensors, plan = given
    count = batch.to_front(0, tensors[0]).shape[1]
    masks = _MASK_PLACES[len(tensors)]
    own_masks = "m" in plan.needs or any(batch.in_dims[i] is not None for i in masks)
    folded: list[Any] = []
    for i, x in enumerate(tensors):
        as_it_is = x is None or (i in masks and not own_masks)
        folded.append(x if as_it_is else batch.to_front(i, x).flatten(0, 1))
    if tensors[3] is not None:
        places = plan.places or (0,) * count
        size = folded[3].shape[0] // batch.size if own_masks else 0
        every = tuple(b * size + place for b in range(batch.size) for place in places)
        plan = plan._replace(places=every if own_masks or plan.places else None)
    result = batch.function.apply(*folded, plan)
    parts = result if isinstance(result, tuple) else (result,)
    outputs = tuple(x.unflatten(0, (batch.size, x.shape[0] // batch.size)) for x in parts)
    return (outputs, (0,) * len(outputs)) if isinstance(result, tuple) else (outputs[0], 0)


def _make_map(which: str, count: int, backward: Any, jvp: Any, **kept: Any) -> Any:
    name = "ScaledDotProductAttention" + ("" if which == "values" else which.capitalize())
    return make_function(name, count, partial(_run, which), backward, jvp, vmap=_fold_batch, **kept)


_VALUES = _make_map("values", 6, _values_backward, _values_jvp, keep_outputs=(0, 1))
_GRADIENTS = _make_map("gradients", 9, _gradients_backward, _gradients_jvp)
_TANGENTS = _make_map("tangents", 10, _tangents_backward, _tangents_jvp)
_CURVATURE = _make_map("curvature", 11, _curvature_backward, _curvature_jvp)
