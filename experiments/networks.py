"""The networks of the experiments."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

import hoglib as hog


def mlp(widths: Sequence[int], act: str) -> nn.Sequential:
    """Fused layers of hoglib's own Functions: one call for product, bias and activation."""
    *hidden, (last_in, last_out) = pairwise(widths)
    layers: list[nn.Module] = [hog.nn.LinearAct(i, o, act=act) for i, o in hidden]
    return nn.Sequential(*layers, hog.nn.Linear(last_in, last_out))
