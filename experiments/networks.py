"""The networks of the experiments."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

import hoglib as hog


def mlp(widths: Sequence[int], act: str) -> nn.Sequential:
    """Fused layers of hoglib's own Functions: one call for product, bias and activation."""
    *hidden, (last_in, last_out) = pairwise(widths)
    layers: list[nn.Module] = [hog.nn.LinearAct(i, o, act=act) for i, o in hidden]
    return nn.Sequential(*layers, hog.nn.Linear(last_in, last_out))


class Conv2d(nn.Conv2d):
    """torch's module on hoglib's own Function."""

    def forward(self, x: Tensor) -> Tensor:
        return hog.ops.conv2d(
            x, self.weight, self.bias, stride=self.stride, padding=self.padding,
        )  # fmt: skip


class ReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return hog.ops.relu(x)


def conv4(
    outputs: int | None, channels: int, inputs: int, size: int, statistics: bool
) -> nn.Sequential:
    """Four blocks of convolution with stride 2, batch norm and ReLU, and a linear layer to outputs.

    outputs: None leaves the linear layer out. statistics: whether batch norm keeps running ones, to
    evaluate by; without, it normalises by the batch at hand, as MAML's inner loops do.
    Source: Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017, section 5.2.
    """
    layers: list[nn.Module] = []
    for number in range(4):
        conv = Conv2d(channels if number else inputs, channels, 3, stride=2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(channels, track_running_stats=statistics), ReLU()]
        size = (size + 1) // 2
    layers.append(nn.Flatten())
    if outputs is not None:
        layers.append(hog.nn.Linear(channels * size**2, outputs))
    return nn.Sequential(*layers)
