"""The inner loop: a few gradient steps on one task, as a function that can be differentiated."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import _tree
from hoglib._graph import check_functions
from hoglib.meta.rules import Params, Rule

Loss = Callable[[Params, Any], Tensor]


def inner_step(
    loss: Loss,
    params: Params,
    batch: Any,
    rule: Rule,
    state: Any,
    *,
    first_order: bool = False,
) -> tuple[Params, Any]:
    """One step of the inner loop.

        g = grad loss(theta, batch)        (theta', state') = rule.update(theta, g, state)

    Returns (theta', state'), differentiable by theta and, unless first_order, through g. It is made of
    `torch.func.grad`, so it runs under vmap, inside other transforms and in inference mode.
    Raises RuntimeError for a custom Function that is `@once_differentiable`.
    """
    at = _tree.map_tensors(Tensor.detach, params) if first_order else params

    def checked(at: Params, batch: Any) -> Tensor:
        value = loss(at, batch)
        if not first_order:
            check_functions(value, "the inner step")
        return value

    grads = torch.func.grad(checked)(at, batch)
    return rule.update(params, grads, state)


def adapt(
    loss: Loss,
    params: Params,
    batch: Any,
    rule: Rule,
    *,
    steps: int,
    first_order: bool = False,
) -> Params:
    """The parameters after `steps` inner steps on one batch."""
    state = rule.init(params)
    for _ in range(steps):
        params, state = inner_step(loss, params, batch, rule, state, first_order=first_order)
    return params
