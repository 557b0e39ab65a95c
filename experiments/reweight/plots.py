"""The picture of weights of digits."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.logs import Points
from experiments.shared.digit_plots import labelled_digits
from experiments.shared.noisy_digits import Examples
from experiments.shared.style import SERIES, new_figure, picture
from hoglib.plotting import BLUE, VERMILLION

SHOWN = 14  # digits in each group


@picture
def plot_reweighting(
    examples: Examples, weights: Tensor, curves: dict[str, Points], title: str
) -> Figure:
    """Digits of lowest and highest weight [n]; weights of right and wrong labels; accuracy by step."""
    figure = new_figure(11, 6.4)
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.2))
    order = weights.argsort(stable=True)
    lowest, highest = above.subfigures(1, 2)
    labelled_digits(lowest, "lowest average weights", examples, order[:SHOWN])
    labelled_digits(highest, "highest average weights", examples, order.flip(0)[:SHOWN])
    left, right = below.subplots(1, 2)
    wrong = examples.label != examples.truth
    # the same bins for both histograms, or heights would not compare
    bins = torch.linspace(0, weights.max().item() if len(weights) else 1, 41).numpy()
    left.hist(weights[~wrong].numpy(), bins, color=BLUE, alpha=0.45, label="right labels")
    left.hist(
        weights[wrong].numpy(), bins, histtype="step", color=VERMILLION, lw=2, hatch="////",
        label="wrong labels",
    )  # fmt: skip
    left.set(xlabel="average weight (1: as in plain training)", ylabel="training examples")
    left.set_yscale("symlog", linthresh=10)  # a few have weights of ten, hundreds have none
    left.set_yticks([0, 10, 100, 1000], ["0", "10", "100", "1000"])
    for (name, points), look in zip(curves.items(), SERIES, strict=False):
        right.plot(
            *zip(*points, strict=True) if points else ([], []), label=name,
            **look.marked(markersize=3.5),
        )  # fmt: skip
    right.set(xlabel="step", ylabel="accuracy on held-out digits")
    for axis in (left, right):
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    figure.suptitle(f'{title}; "0, is 9": the label says 0, the digit is 9')
    return figure
