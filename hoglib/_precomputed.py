"""A value whose gradients were computed before backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments


def with_gradients(
    value: Tensor,
    grads: Sequence[Tensor],
    tensors: Sequence[Tensor],
    twice: str = "",
    again: Callable[[], Sequence[Tensor]] | None = None,
) -> Tensor:
    """The value, whose backward hands each tensor the gradient that is known, scaled by what comes in.

    again: the gradients anew with a graph of their own, for a backward that is to be differentiated.
    twice: without it, what is said of a second derivative, which there is none of.
    """
    result: Tensor = _Precomputed.apply(value, twice, again, len(grads), *grads, *tensors)
    return result


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, twice: str, again: Any, count: int, *grads_and_tensors: Tensor
    ) -> Tensor:
        ctx.twice, ctx.again, ctx.grads = twice, again, grads_and_tensors[:count]
        # Reading them in backward raises if a step changed them since: the gradients would be stale.
        ctx.save_for_backward(*grads_and_tensors[count:])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _ = ctx.saved_tensors
        known = ctx.grads
        if torch.is_grad_enabled():
            if ctx.again is None:
                raise arguments.NoSecondDerivative(ctx.twice)
            known = ctx.again()
        handed_on = tuple(grad * part for part in known)
        return (None, None, None, None, *(None for _ in ctx.grads), *handed_on)
