"""What all update rules share: the step around a rule's direction, and the arithmetic of options."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib.meta import _options as options
from hoglib.meta._leaves import Leaves
from hoglib.meta._options import Option
from hoglib.ops._modes import aside

Params = Any  # a pytree of tensors
State = Any  # a pytree of tensors and Python numbers

# (u, memory') of g and memory, all of one leaf
Direction = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


class Rule(NamedTuple):
    """An update rule: `init(params) -> state`, `update(params, grads, state) -> (params, state)`."""

    init: Callable[[Params], State]
    update: Callable[[Params, Params, State], tuple[Params, State]]


def rule(
    direction_at: Callable[[int], Direction],
    slots: Sequence[str],
    lr: Any,
    weight_decay: Any,
    *,
    decoupled: bool = False,
) -> Rule:
    """The rule whose direction in the t-th step, counted from 1, is direction_at(t).

        g <- g + lambda theta        u, memory' = direction(g, memory)        theta' = theta - lr u

    decoupled takes the decay from theta: theta' = (1 - lr lambda) theta - lr u. slots name what a
    direction keeps from step to step, a tree like params each; a rule without any has no state.
    """
    lr = options.rates("lr", lr)
    weight_decay = options.rates("weight_decay", weight_decay, zero=True)

    entries = {"step", *slots}

    def init(params: Params) -> State:
        if not slots:
            return {}
        zeros = {slot: _tree.map(torch.zeros_like, params) for slot in slots}
        return {"step": 0, **zeros}

    def update(params: Params, grads: Params, state: State) -> tuple[Params, State]:
        with aside():  # nothing here needs a stand-in, and each call that it sees costs
            if slots and (not isinstance(state, dict) or state.keys() != entries):
                raise arguments.WrongValue(
                    f"state: expected a dict of {', '.join(sorted(entries))}, got "
                    f"{arguments.describe(state)}; begin with what the rule's init(params) gives."
                )
            step = state["step"] + 1 if slots else 0
            direction = direction_at(step)
            leaves = Leaves(params)
            updated, kept = [], []
            for p, g, rate, decay, *memory in zip(
                leaves.real,
                leaves.real_beside("grads", grads),
                options.each("lr", lr, leaves),
                options.each("weight_decay", weight_decay, leaves),
                *[leaves.real_beside(f"state[{slot!r}]", state[slot]) for slot in slots],
                strict=False,  # options may repeat without end
            ):
                if isinstance(decay, Tensor) or decay != 0:
                    if decoupled:
                        p = p * (1 - rate * decay)
                    else:
                        g = plus(g, decay, p)
                u, remembered = direction(g, *memory)
                updated.append(minus(p, rate, u))
                kept.append(remembered)
            new = leaves.tree(updated)
            if not slots:
                return new, state
            trees = {slot: leaves.tree([row[i] for row in kept]) for i, slot in enumerate(slots)}
            return new, {"step": step, **trees}

    return Rule(init, update)


def plus(x: Tensor, a: Option, y: Tensor) -> Tensor:
    """x + a y."""
    return torch.addcmul(x, y, a) if isinstance(a, Tensor) else torch.add(x, y, alpha=a)


def minus(x: Tensor, a: Option, y: Tensor) -> Tensor:
    """x - a y."""
    return torch.addcmul(x, y, a, value=-1) if isinstance(a, Tensor) else torch.add(x, y, alpha=-a)


def root(v: Tensor) -> Tensor:
    """sqrt(v), with derivative 0 at 0 by convention; 0 for a v that rounding made negative.

    The derivative of torch.sqrt at 0 is infinite, and NaN once it meets a zero. Here v is no less than
    the smallest normal number, whose root, 1e-19 in float32 and 1e-154 in float64, is as nothing beside
    any eps; `clamp` has derivative 0 below it, and an exact zero from two `where` takes three more
    operations. float16, whose smallest number has a root of 2e-4, borrows the range of float32.
    """
    if v.dtype is torch.float16:
        return root(v.float()).half()
    return v.clamp_min(_SMALLEST[v.dtype]).sqrt()


_SMALLEST = {
    dtype: torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64, torch.bfloat16)
}
