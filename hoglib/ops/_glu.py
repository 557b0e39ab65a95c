"""The gated linear unit, differentiable over forward mode too."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops._halves import widened


def glu(input: Tensor, dim: int = -1) -> Tensor:
    r"""Gated linear unit, as `torch.nn.functional.glu`.

        y = a * sigmoid(b), with a and b the halves of the input along dim

    Shapes: input [..., 2 n, ...]; y [..., n, ...]. Half precision is computed in float32. torch has no
    derivative of the tangent of its own.
    Raises ValueError for an odd size; TypeError for an integer or complex input.
    Dauphin et al., Language Modeling with Gated Convolutional Networks, 2017.
    """
    arguments.real("input", input)
    if input.dim() == 0 or input.shape[dim] % 2:
        raise arguments.WrongValue(
            f"input: expected an even size along dim {dim}, got {arguments.describe(input)}."
        )
    a, b = widened(input).chunk(2, dim)
    return (a * torch.sigmoid(b)).to(input.dtype)


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {F.glu: glu}
