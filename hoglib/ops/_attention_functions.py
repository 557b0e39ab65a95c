"""Attention by blocks as a differentiable function: each map of `_attention_blocks` is a Function,
whose backward and jvp are the other maps.

    values: backward gradients, jvp tangents        gradients: backward curvature, jvp curvature
    tangents: backward curvature, no jvp            curvature: by the derivatives of its formula

The batch of vmap becomes a part of the heads. Tracers record the maps as operators.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hoglib._core import torch_internals
from hoglib._core.mixed_precision import without_autocast
from hoglib.errors import UnsupportedError
from hoglib.ops._attention_blocks import (
    KINDS,
    NAMES,
    Inputs,
    Parts,
    Plan,
    compute_curvature,
    compute_gradients,
    compute_tangents,
    compute_values,
    curvature_jvp,
    curvature_vjp,
    is_recorded,
)
from hoglib.ops._function import (
    Batch,
    Saved,
    apply_function,
    by_name,
    make_function,
    sum_terms,
)


def attention(inputs: Inputs, plan: Plan) -> Tensor:
    """Y, [N, H, L, Ev]."""
    y: Tensor = apply_function(_VALUES, _reference, *inputs, plan)[0]
    return y


_MAPS: dict[str, Callable[..., Any]] = {
    "values": compute_values,
    "gradients": compute_gradients,
    "tangents": compute_tangents,
    "curvature": compute_curvature,
}

# Tracers record one operator, instead of the operations of each block.
torch.library.define(
    "hoglib::attention",
    "(str which, Tensor?[] tensors, bool causal, int[]? places, float dropout_p, bool fused, str needs)"
    " -> Tensor[]",
)


def _operator(which: str, tensors: list[Tensor | None], *plan: Any) -> list[Tensor]:
    found = _MAPS[which](*tensors, _plan(*plan))
    parts = [found] if isinstance(found, Tensor) else found
    return [x.contiguous() for x in parts if x is not None]


def _fake(which: str, tensors: list[Any], *given: Any) -> list[Tensor]:
    (q, k, v, mask, *_), plan = tensors, _plan(*given)
    y = q.new_empty(*q.shape[:3], v.shape[-1])
    if which in ("values", "tangents"):
        sums = q.new_empty(q.shape[:3] if plan.fused else (len(q), 0))
        return [y, sums] if which == "values" else [y]
    pairs = zip(NAMES, (q, k, v, mask), strict=True)
    parts = [q.new_empty(x.shape) for name, x in pairs if name in plan.needs]
    return [*parts, y] if which == "curvature" else parts


def _plan(causal: bool, places: Any, dropout_p: float, fused: bool, needs: str) -> Plan:
    return Plan(causal, None if places is None else tuple(places), dropout_p, fused, needs)


torch.library.impl("hoglib::attention", "CompositeExplicitAutograd", _operator)
torch.library.register_fake("hoglib::attention", _fake)


def _run(which: str, *given: Any) -> Any:
    """The parts of the map; of a tracer one operator, if what it computes is not differentiated."""
    *tensors, plan = given
    with without_autocast(given[0]):
        if not torch_internals.tracing() or torch.compiler.is_compiling() or is_recorded(given):
            found = _MAPS[which](*given)
        else:
            found = torch.ops.hoglib.attention(which, tensors, *plan)
            found = found[0] if which == "tangents" else found
    return found if isinstance(found, Tensor) else tuple(x for x in found if x is not None)


def _reference(*given: Any) -> tuple[Tensor, Tensor]:
    """The value by torch operations."""
    *tensors, plan = given
    found: tuple[Tensor, Tensor] = compute_values(*tensors, plan._replace(fused=False))
    return found


def _gradients_by(needs: str, *given: Any) -> Parts:
    """The gradients that are wanted, by their Function; None for the others."""
    *tensors, plan = given
    if not needs:
        return (None,) * len(NAMES)
    found = apply_function(_GRADIENTS, None, *tensors, plan._replace(needs=needs))
    return by_name(NAMES, needs, found)


def _values_backward(saved: Saved, g: Tensor, _: Any) -> Parts:
    *tensors, plan = saved.inputs
    return *_gradients_by(saved.needed(NAMES), *tensors, g, *saved.outputs, plan), None, None


def _values_jvp(saved: Saved, *tangents: Any) -> tuple[Tensor, Tensor]:
    *tensors, plan = saved.inputs
    logsumexp = saved.outputs[1]
    assert logsumexp is not None
    y = apply_function(_TANGENTS, None, *tensors, *tangents[:4], plan)
    return y, torch.zeros_like(logsumexp)


def _curvature_by(needs: str, *given: Any) -> Parts:
    """The curvature by its Function: what is wanted of q, k, v and m, and Y'."""
    *tensors, plan = given
    found = apply_function(_CURVATURE, None, *tensors, plan._replace(needs=needs))
    return by_name(KINDS, (*needs, "y"), found)


def _curvature_backward(saved: Saved, *grads: Tensor | None) -> Parts:
    *tensors, plan = saved.inputs
    cotangents = by_name(KINDS, (*plan.needs, "y"), grads)
    found = list(curvature_vjp(*tensors, *cotangents, plan))
    found.insert(4, None)  # the keys of dropout
    pairs = zip(found, saved.needs_input_grad, strict=False)
    return [*(x if need else None for x, need in pairs), None]


def _curvature_jvp(saved: Saved, *tangents: Any) -> tuple[Tensor, ...]:
    *tensors, plan = saved.inputs
    found = curvature_jvp(*tensors, *tangents[:4], *tangents[5:10], plan)
    return tuple(x for x in found if x is not None)


def _gradients_backward(saved: Saved, *grads: Tensor | None) -> Parts:
    *tensors, g, _, _, plan = saved.inputs
    along = by_name(NAMES, plan.needs, grads)
    found = _curvature_by(saved.needed(NAMES), *tensors, g, *along, plan)
    return *found[:4], None, found[4] if saved.needs_input_grad[5] else None, None, None, None


def _gradients_jvp(saved: Saved, *tangents: Any) -> Any:
    *tensors, g, y, logsumexp, plan = saved.inputs
    along, dg = tangents[:4], tangents[5]
    found: list[Parts] = []
    if any(x is not None for x in along):
        found.append(_curvature_by(plan.needs, *tensors, g, *along, plan)[:4])
    if dg is not None:
        found.append(_gradients_by(plan.needs, *tensors, dg, y, logsumexp, plan))
    if not found:
        return tuple(
            torch.zeros(shape, dtype=g.dtype, device=g.device) for shape in saved.output_shapes
        )
    parts = zip(*found, strict=True)
    return tuple(sum_terms([x for x in of if x is not None]) for of in parts if of[0] is not None)


def _tangents_backward(saved: Saved, g: Tensor) -> Parts:
    *tensors, dq, dk, dv, dm, plan = saved.inputs
    needs = saved.needed(NAMES)
    found: Parts = (None,) * 4
    if needs:
        found = _curvature_by(needs, *tensors, g, dq, dk, dv, dm, plan)[:4]
    by_tangents = _gradients_by(saved.needed(NAMES, 5), *tensors, g, None, None, plan)
    return *found, None, *by_tangents, None


def _tangents_jvp(saved: Saved, *tangents: Any) -> Tensor:
    raise UnsupportedError(
        "scaled_dot_product_attention: expected at most one level of forward-mode differentiation, "
        "got jvp inside jvp of forward_ad; use torch.func.jvp for both levels."
    )


def _fold(batch: Batch, *given: Any) -> tuple[tuple[Tensor, ...] | Tensor, Any]:
    """The vmap rule of all four: the batch becomes a part of N and, where a mask has it, of M."""
    *tensors, plan = given
    count = batch.to_front(0, tensors[0]).shape[1]
    masks = _MASKS[len(tensors)]
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
    found = batch.function.apply(*folded, plan)
    parts = found if isinstance(found, tuple) else (found,)
    outputs = tuple(x.unflatten(0, (batch.size, x.shape[0] // batch.size)) for x in parts)
    return (outputs, (0,) * len(outputs)) if isinstance(found, tuple) else (outputs[0], 0)


# by the number of tensors, which of them are masks
_MASKS = {5: (3,), 8: (3,), 9: (3, 8), 10: (3, 9)}


def _make_map(which: str, count: int, backward: Any, jvp: Any, **kept: Any) -> Any:
    name = "" if which == "values" else which.capitalize()
    forward, options = partial(_run, which), {"vmap": _fold, **kept}
    return make_function(
        f"ScaledDotProductAttention{name}",
        count,
        forward=forward,
        backward=backward,
        jvp=jvp,
        **options,
    )


_VALUES = _make_map("values", 6, _values_backward, _values_jvp, keep_outputs=(0, 1))
_GRADIENTS = _make_map("gradients", 9, _gradients_backward, _gradients_jvp)
_TANGENTS = _make_map("tangents", 10, _tangents_backward, _tangents_jvp)
_CURVATURE = _make_map("curvature", 11, _curvature_backward, _curvature_jvp)
