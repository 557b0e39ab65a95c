"""torch's hardsigmoid, whose own derivative cannot be differentiated, not even to 0."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hoglib.ops import _refusals as refusals
from hoglib.ops._halves import widened


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    r"""A sigmoid of three straight lines.

        y = min(max(x + 3, 0), 6) / 6        dy/dx = 1/6 for -3 < x < 3, else 0

    Shapes: any. The derivative is 0 at the kinks, as in torch; the second is 0. Half precision is
    computed in float32. inplace puts the result in input too. Raises RuntimeError for an input that
    is not real.
    """
    refusals.real("input", input)
    x = widened(input.clone() if inplace else input)
    y = (F.hardtanh(x, -3.0, 3.0) / 6 + 0.5).to(input.dtype)
    return input.copy_(y) if inplace else y


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {F.hardsigmoid: hardsigmoid}
