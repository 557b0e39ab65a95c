"""A value whose gradients were computed before backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib._functorch import transforms_active


def with_gradients(
    value: Tensor,
    grads: Sequence[Tensor],
    tensors: Sequence[Tensor],
    twice: str = "",
    again: Callable[[], Sequence[Tensor]] | None = None,
    anew: Callable[[], Sequence[Tensor]] | None = None,
) -> Tensor:
    """The value, whose backward hands each tensor the gradient that is known, scaled by what comes in.

    again: the gradients anew with a graph of their own, for a backward that is to be differentiated.
    anew: the gradients once more. With it those that are known are given away by the first backward,
    and not copied: nobody else may hold them or their memory.
    twice: without it, what is said of a second derivative, which there is none of.
    """
    result: Tensor = _Precomputed.apply(value, twice, again, anew, list(grads), *tensors)
    return result


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        twice: str,
        again: Any,
        anew: Any,
        grads: list[Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.twice, ctx.again, ctx.anew, ctx.grads = twice, again, anew, grads
        # Reading them in backward raises if a step changed them since: the gradients would be stale.
        ctx.save_for_backward(*tensors)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            if ctx.again is None:
                raise arguments.NoSecondDerivative(ctx.twice)
            handed_on = [grad * part for part in ctx.again()]
        elif ctx.anew is None or transforms_active():
            handed_on = [grad * part for part in ctx.grads or ctx.anew()]
        else:
            handed_on, ctx.grads = ctx.grads or list(ctx.anew()), None
            if not (grad.device.type == "cpu" and grad == 1):
                handed_on = [part.mul_(grad) for part in handed_on]
        return (None,) * 5 + tuple(handed_on)
