"""Maps between lists of real tensors, and their derivatives in reverse and in forward mode.

The gradient of a map is a map again, and so is its tangent: a second derivative is a derivative of
one of them, and is had by the same functions as a first one. Everything but `func_push` is built on
`torch.autograd`, because the transforms of torch.func are wrong through some of torch's own layers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

Map = Callable[..., list[Tensor]]


def gradient(function: Map, count: int, wanted: Sequence[int] | None = None) -> Map:
    """(x, u) -> J(x)^T u, the gradient by the wanted of the first `count` arguments.

    Backward gets copies of u, so that one that works in place spoils no other check.
    """
    wanted = range(count) if wanted is None else wanted

    def map_(*given: Tensor) -> list[Tensor]:
        inputs = [
            x.view_as(x).requires_grad_() if j in wanted and not x.requires_grad else x
            for j, x in enumerate(given[:count])
        ]
        by = [inputs[j] for j in wanted]
        pairs = zip(function(*inputs), given[count:], strict=True)
        outputs = [(y, u) for y, u in pairs if y.requires_grad]
        if not outputs:
            return [torch.zeros_like(x) for x in by]
        return list(
            torch.autograd.grad(
                [y for y, _ in outputs], by, [u.clone() for _, u in outputs], create_graph=True,
                materialize_grads=True,
            )
        )  # fmt: skip

    return map_


def tangent(function: Map, count: int) -> Map:
    """(x, t) -> J(x) t, in forward mode."""

    def map_(*given: Tensor) -> list[Tensor]:
        with forward_ad.dual_level():
            pairs = zip(given[:count], given[count:], strict=True)
            return [_tangent(y) for y in function(*[forward_ad.make_dual(x, t) for x, t in pairs])]

    return map_


def func_tangent(function: Map, count: int) -> Map:
    """The same by torch.func, which can do it twice."""

    def map_(*given: Tensor) -> list[Tensor]:
        return list(torch.func.jvp(function, given[:count], given[count:])[1])

    return map_


def pull(
    function: Map,
    x: Sequence[Tensor],
    covectors: Sequence[tuple[int, Tensor]],
    wanted: Sequence[int] | None = None,
    *,
    batched: bool = False,
) -> list[list[Tensor]]:
    """For each covector (i, w), J_i(x)^T w by every wanted input; by vmap if batched.

    Only the wanted inputs require grad. The graph is kept from one covector to the next, unless the
    function allows one backward pass only.
    """
    wanted = range(len(x)) if wanted is None else wanted

    def forward() -> tuple[list[Tensor], list[Tensor]]:
        leaves = [y.detach().clone().requires_grad_(j in wanted) for j, y in enumerate(x)]
        return function(*leaves), [leaves[j] for j in wanted]

    results: list[list[Tensor]] = []
    outputs, by = forward()
    for i, w in covectors:
        try:
            results.append(_pulled(outputs[i], by, w, batched=batched))
        except Exception:
            if not results:
                raise
            outputs, by = forward()
            results.append(_pulled(outputs[i], by, w, batched=batched))
    return results


def _pulled(y: Tensor, by: Sequence[Tensor], w: Tensor, *, batched: bool) -> list[Tensor]:
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in by]
    if not batched:
        grads = torch.autograd.grad(y, by, w.clone(), retain_graph=True, materialize_grads=True)
        return [g.detach() for g in grads]
    both = torch.stack([w, -w])
    grads = torch.autograd.grad(
        y, by, both, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    pairs = zip(grads, by, strict=True)
    return [torch.zeros_like(x) if g is None else g[0].detach() for g, x in pairs]


def push(function: Map, x: Sequence[Tensor], j: int, v: Tensor) -> list[Tensor]:
    """J(x) v, with v a direction of input j, in forward mode."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x[j].detach().clone(), v)
        return [_tangent(y).detach() for y in function(*x[:j], dual, *x[j + 1 :])]


def func_push(function: Map, x: Sequence[Tensor], j: int, v: Tensor) -> list[Tensor]:
    """The same by torch.func."""

    def moved(y: Tensor) -> list[Tensor]:
        return function(*x[:j], y, *x[j + 1 :])

    return [t.detach() for t in torch.func.jvp(moved, (x[j].detach(),), (v,))[1]]


def _tangent(y: Tensor) -> Tensor:
    found = forward_ad.unpack_dual(y).tangent
    return torch.zeros_like(y) if found is None else torch.zeros_like(y) + found
