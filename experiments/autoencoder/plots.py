"""The picture of optimizers of an autoencoder."""

from matplotlib.figure import Figure
from torch import Tensor

from experiments.logs import Points
from experiments.shared.digit_plots import tiles
from experiments.shared.style import SERIES, decimal_ticks, new_figure, picture


@picture
def plot_race(
    curves: dict[str, Points], labels: dict[str, str], images: dict[str, Tensor]
) -> Figure:
    """Errors of optimizers by seconds and by gradients; below, images and their reconstructions.

    Args:
        curves: (step, value) of train, val, gradients and seconds, each with the name of an optimizer
            after a slash.
        labels: Label of each optimizer.
        images: Rows of images [n, 64], by label.
    Returns:
        The figure.
    """
    figure = new_figure(10, 7)
    above, below = figure.subfigures(2, 1, height_ratios=(2, 1))
    axes = above.subplots(1, 2, sharey=True)
    costs = {"seconds": "seconds", "gradients": "gradients of the whole training set"}
    for axis, (cost, xlabel) in zip(axes, costs.items(), strict=True):
        for (name, label), look in zip(labels.items(), SERIES, strict=False):
            spent = [value for _, value in curves.get(f"{cost}/{name}", [])]
            for part, what, dashes in (("val", "held out", "-"), ("train", "training", ":")):
                errors = [value for _, value in curves.get(f"{part}/{name}", [])]
                axis.plot(spent, errors, dashes, color=look.colour, label=f"{label}, {what}")
        axis.set(xlabel=xlabel, yscale="log")
        axis.set_xlim(left=0)
        decimal_ticks(axis.yaxis)
    axes[0].set_ylabel("squared error of an image")
    axes[1].legend()
    above.suptitle("An autoencoder of digits")
    tiles(below, {name: some[:16].detach() for name, some in images.items()}, {})
    return figure
