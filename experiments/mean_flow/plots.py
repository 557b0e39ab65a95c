"""The picture of MeanFlow and flow matching: real points, and what each makes of the same noise."""

from math import pi

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.shared.style import new_figure, picture
from hoglib.plotting import GREY


@picture
def plot_samples(
    real: Tensor, noise: Tensor, samples: dict[str, Tensor], distances: dict[str, float]
) -> Figure:
    """Real points, and samples side by side, coloured by the direction of their noise.

    Args:
        real: Real points [n, 2].
        noise: What the samples were made of [n, 2].
        samples: Generated points [n, 2] by label.
        distances: Wasserstein distances by label, that of other real points the last.
    Returns:
        The figure.
    """
    floor = [*distances.values()][-1]
    low, high = real.min().item(), real.max().item()
    margin = 0.1 * (high - low)
    figure = new_figure(3.1 * (1 + len(samples)), 3.7)
    axes = figure.subplots(1, 1 + len(samples), sharex=True, sharey=True)
    angle = (torch.atan2(noise[:, 1], noise[:, 0]) / (2 * pi)).cpu()
    axes[0].scatter(*real.cpu().T, s=3, color=GREY, linewidths=0)
    axes[0].set_title(f"{len(real)} real points\ndistance of others {floor:.3f}")
    for axis, (label, points) in zip(axes[1:], samples.items(), strict=True):
        axis.scatter(*points.cpu().T, s=3, c=angle, cmap="twilight_shifted", linewidths=0)
        axis.set_title(f"{label}\ndistance {distances[label]:.3f}")
    for axis in axes:
        axis.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
        axis.set_aspect("equal")
        axis.grid(visible=False)
    return figure
