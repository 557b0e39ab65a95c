"""The networks of the experiments."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn

import hoglib as hog
from hoglib._core import validation

SIDE = 28  # of the images below; a quarter of it is what they begin or end with
QUARTER = SIDE // 4


def mlp(widths: Sequence[int], act: str) -> nn.Sequential:
    """Fused layers of hoglib's own Functions: one call for product, bias and activation."""
    *hidden, (last_in, last_out) = pairwise(widths)
    layers: list[nn.Module] = [hog.nn.LinearAct(i, o, act=act) for i, o in hidden]
    return nn.Sequential(*layers, hog.nn.Linear(last_in, last_out))


class ReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return hog.ops.relu(x)


def activation(act: str) -> nn.Module:
    """An activation between convolutions, by the name that `hoglib.nn.LinearAct` knows it by."""
    known: dict[str, Callable[[], nn.Module]] = {
        "relu": ReLU,
        "tanh": hog.nn.Tanh,
        "sigmoid": hog.nn.Sigmoid,
        "softplus": nn.Softplus,
        "swish": lambda: hog.nn.Swish(learnable=False),
    }
    return known[validation.one_of("act", act, known)]()


class Conv(nn.Conv2d):
    """`torch.nn.Conv2d` whose convolution is `hoglib.ops.conv2d`, differentiable to any order."""

    def forward(self, input: Tensor) -> Tensor:
        return hog.ops.conv2d(
            input, self.weight, self.bias, stride=self.stride, padding=self.padding
        )


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
        conv = Conv(channels if number else inputs, channels, 3, stride=2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(channels, track_running_stats=statistics), ReLU()]
        size = (size + 1) // 2
    layers.append(nn.Flatten())
    if outputs is not None:
        layers.append(hog.nn.Linear(channels * size**2, outputs))
    return nn.Sequential(*layers)


def image_critic(channels: int, act: str) -> nn.Sequential:
    """A score [n, 1] of images [n, 1, 28, 28], by three convolutions of stride 2, without norms.

    channels: after the first convolution; twice and four times as many after the next ones.
    """
    layers: list[nn.Module] = []
    sizes = ((1, channels, 4), (channels, 2 * channels, 4), (2 * channels, 4 * channels, 3))
    for inner, outer, kernel in sizes:
        layers += [Conv(inner, outer, kernel, 2, 1), activation(act)]
    return nn.Sequential(*layers, nn.Flatten(), hog.nn.Linear(4 * channels * 4 * 4, 1))


def image_generator(latent: int, channels: int, act: str) -> nn.Sequential:
    """Images [n, 1, 28, 28] from -1 to 1 of points [n, latent]: 7 x 7, and twice doubled.

    What is doubled is each pixel, before a convolution: a transposed one would leave a pattern of
    squares (Odena et al., Deconvolution and Checkerboard Artifacts, 2016). channels: before the last
    convolution; twice as many at 7 x 7.
    """
    return nn.Sequential(
        hog.nn.LinearAct(latent, 2 * channels * QUARTER**2, act=act),
        nn.Unflatten(1, (2 * channels, QUARTER, QUARTER)),
        nn.Upsample(scale_factor=2),
        Conv(2 * channels, channels, 3, 1, 1),
        activation(act),
        nn.Upsample(scale_factor=2),
        Conv(channels, 1, 3, 1, 1),
        hog.nn.Tanh(),
    )
