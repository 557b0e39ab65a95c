"""The soft margin loss, in forward mode too."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops import _reductions as reductions
from hoglib.ops._halves import full_precision
from hoglib.ops._refusals import Refused


@full_precision(widen=True)
def soft_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Logistic loss of targets that are 1 or -1, as `torch.nn.functional.soft_margin_loss`.

        loss = log(1 + exp(-target * input)), averaged, summed, or neither

    Shapes: input and target broadcast; the loss has the dtype of input. The target is a constant.
    Raises ValueError for another reduction, or a target that requires grad; TypeError for an integer
    or complex input.
    """
    arguments.real("input", input)
    if target.requires_grad and torch.is_grad_enabled():
        raise Refused(
            "target: expected a constant, by which soft_margin_loss is not differentiable, got a "
            "tensor that requires grad; pass it detached."
        )
    kind = reductions.number(reduction, size_average, reduce)
    return reductions.reduced(-F.logsigmoid(target.to(input.dtype) * input), kind)


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {F.soft_margin_loss: soft_margin_loss}
