"""The networks of the experiments."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn

import hoglib as hog
from experiments.checks import one_of

SIDE = 28  # pixels of the GAN's images; their generator begins with a quarter of it
QUARTER = SIDE // 4


def mlp(widths: Sequence[int], act: str) -> nn.Sequential:
    """A multilayer perceptron of hoglib's fused layers: product, bias and activation in one call.

    Args:
        widths: Units of each layer, inputs and outputs included.
        act: Activation of the hidden layers, as in :class:`hoglib.nn.LinearAct`.
    Returns:
        The network.
    """
    *hidden, (last_in, last_out) = pairwise(widths)
    layers: list[nn.Module] = [hog.nn.LinearAct(i, o, act=act) for i, o in hidden]
    return nn.Sequential(*layers, hog.nn.Linear(last_in, last_out))


class ReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return hog.ops.relu(x)


def activation(act: str) -> nn.Module:
    """A module for an activation of hoglib's ops, by its name in :class:`hoglib.nn.LinearAct`."""
    known: dict[str, Callable[[], nn.Module]] = {
        "relu": ReLU,
        "tanh": hog.nn.Tanh,
        "sigmoid": hog.nn.Sigmoid,
        "softplus": nn.Softplus,
        "swish": lambda: hog.nn.Swish(learnable=False),
    }
    return known[one_of("act", act, known)]()


class Conv(nn.Conv2d):
    """`torch.nn.Conv2d` whose convolution is `hoglib.ops.conv2d`, differentiable to any order."""

    def forward(self, input: Tensor) -> Tensor:
        return hog.ops.conv2d(
            input, self.weight, self.bias, stride=self.stride, padding=self.padding
        )


def conv4(
    outputs: int | None, channels: int, inputs: int, size: int, statistics: bool
) -> nn.Sequential:
    """Four blocks of convolution with stride 2, batch norm and ReLU, and a linear layer.

    Args:
        outputs: Outputs of the linear layer; None leaves it out.
        channels: Channels of each convolution.
        inputs: Channels of the images.
        size: Pixels of a side of the images.
        statistics: Whether batch norm keeps running statistics, and uses them in eval mode. Without
            them it normalises by the current batch, as inner loops of MAML do.
    Returns:
        The network.
    References:
        Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017, section 5.2.
    """
    layers: list[nn.Module] = []
    for number in range(4):
        # no bias, which batch norm would subtract again
        conv = Conv(channels if number else inputs, channels, 3, stride=2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(channels, track_running_stats=statistics), ReLU()]
        # a kernel of 3 with stride 2 and padding 1 halves, and rounds up
        size = (size + 1) // 2
    layers.append(nn.Flatten())
    if outputs is not None:
        layers.append(hog.nn.Linear(channels * size**2, outputs))
    return nn.Sequential(*layers)


def image_critic(channels: int, act: str) -> nn.Sequential:
    """A critic: a score [n, 1] of images [n, 1, 28, 28], by three convolutions of stride 2.

    It has no normalisation layers, which would make the samples of a batch depend on one another.

    Args:
        channels: Channels after the first convolution; twice and four times as many after the next.
        act: Activation.
    Returns:
        The network.
    """
    layers: list[nn.Module] = []
    sizes = ((1, channels, 4), (channels, 2 * channels, 4), (2 * channels, 4 * channels, 3))
    for inner, outer, kernel in sizes:
        layers += [Conv(inner, outer, kernel, 2, 1), activation(act)]
    return nn.Sequential(*layers, nn.Flatten(), hog.nn.Linear(4 * channels * 4 * 4, 1))


def image_generator(latent: int, channels: int, act: str) -> nn.Sequential:
    """A generator: images [n, 1, 28, 28] from -1 to 1 of points [n, latent].

    Images of 7 x 7 are doubled twice, by nearest-neighbour upsampling before a convolution: a
    transposed convolution would leave a checkerboard pattern.

    Args:
        latent: Entries of a point.
        channels: Channels before the last convolution; twice as many at 7 x 7.
        act: Activation.
    Returns:
        The network.
    References:
        Odena et al., Deconvolution and Checkerboard Artifacts, 2016.
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
