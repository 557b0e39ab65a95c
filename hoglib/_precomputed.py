"""A value whose gradients were computed before backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments


def with_gradients(
    value: Tensor, grads: Sequence[Tensor], tensors: Sequence[Tensor], twice: str
) -> Tensor:
    """The value, whose backward hands each tensor the gradient that is known, scaled by what comes in.

    twice: what is said of a second derivative, which there is none of.
    """
    result: Tensor = _Precomputed.apply(value, twice, len(grads), *grads, *tensors)
    return result


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, twice: str, count: int, *grads_and_tensors: Tensor
    ) -> Tensor:
        ctx.twice, ctx.grads = twice, grads_and_tensors[:count]
        # Reading them in backward raises if a step changed them since: the gradients would be stale.
        ctx.save_for_backward(*grads_and_tensors[count:])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise arguments.NoSecondDerivative(ctx.twice)
        _ = ctx.saved_tensors
        handed_on = tuple(grad * known for known in ctx.grads)
        return (None, None, None, *(None for _ in handed_on), *handed_on)
