"""The soft margin loss, in forward mode too."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from hoglib import _arguments as arguments


def soft_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Logistic loss of targets that are 1 or -1, as `torch.nn.functional.soft_margin_loss`.

        loss = log(1 + exp(-target * input)), averaged, summed, or neither

    Shapes: input and target broadcast. The target is a constant.
    Raises ValueError for another reduction; TypeError for an integer or complex input.
    """
    arguments.real("input", input)
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    arguments.one_of("reduction", reduction, ["none", "mean", "sum"])
    loss = -F.logsigmoid(target.detach() * input)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {F.soft_margin_loss: soft_margin_loss}
