"""Inner-loop update rules as pure, differentiable functions.

A rule is two functions: `init(params) -> state` and `update(params, grads, state) -> (params,
state)`. Nothing is changed in place, so a gradient flows through every update.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree

Params = dict[str, Tensor]


class Rule(NamedTuple):
    """An update rule: `init(params) -> state`, `update(params, grads, state) -> (params, "
    "state)`."""

    init: Callable[[Params], Any]
    update: Callable[[Params, Params, Any], tuple[Params, Any]]


def sgd(lr: float) -> Rule:
    """Gradient descent.

        theta' = theta - lr g

    Raises TypeError and ValueError for an lr that is not a positive finite number.
    """
    if not isinstance(lr, Tensor | dict):
        lr = arguments.positive("lr", lr)

    def init(params: Params) -> tuple[()]:
        return ()

    def update(params: Params, grads: Params, state: Any) -> tuple[Params, Any]:
        if isinstance(lr, dict):
            return {n: p - lr[n] * grads[n] for n, p in params.items()}, state
        updated: Params = _tree.add(params, grads, alpha=-lr)
        return updated, state

    return Rule(init, update)


RULES = {"sgd": sgd}
