"""Pictures of experiments on digits of 8 x 8 pixels: reweighting, robustness, autoencoders."""

from math import isqrt
from typing import Any, NamedTuple

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from experiments.logs import Points
from experiments.shared.noisy_digits import Examples
from experiments.shared.style import SERIES, decimal_ticks, hide_frame, new_figure, picture
from hoglib.plotting import BLUE, VERMILLION

SHOWN = 14  # digits in each group of the picture of weights


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


def labelled_digits(
    figure: Any, title: str, examples: Examples, picks: Tensor, rows: int = 2
) -> None:
    """Square images in rows, each with the given label and, if that is wrong, the true one."""
    figure.suptitle(title)
    axes = figure.subplots(rows, -(-len(picks) // rows) or 1, squeeze=False).flatten()
    for axis in axes:
        axis.set_axis_off()
    for axis, pick in zip(axes, picks.tolist(), strict=False):
        given, truth = int(examples.label[pick]), int(examples.truth[pick])
        side = isqrt(examples.x[pick].numel())
        axis.imshow(examples.x[pick].reshape(side, side).numpy(), cmap="gray_r")
        axis.set_title(
            f"{given}" if given == truth else f"{given}, is {truth}",
            fontsize=9,
            color=BLUE if given == truth else VERMILLION,
        )


class Predicted(NamedTuple):
    """Images [n, 64], the classes that a network predicts [n], and the true ones [n]."""

    x: Tensor
    predicted: Tensor
    label: Tensor


class Examined(NamedTuple):
    """Digits under attack.

    Attributes:
        epsilon: Bound of the attack.
        rows: The digits, and what the attack makes of them for each network, by label.
        gradients: Gradients of the loss of each network at the digits [n, 64].
    """

    epsilon: float
    rows: dict[str, Predicted]
    gradients: dict[str, Tensor]


@picture
def plot_robustness(
    epsilons: list[float], correct: dict[str, dict[str, Tensor]], examined: Examined
) -> Figure:
    """Accuracy by the bound of each attack with 95% intervals; below, attacked digits and gradients.

    Args:
        epsilons: Bounds of the attacks.
        correct: By network and attack, which images are classified correctly [epsilons, n].
        examined: Digits under attack.
    Returns:
        The figure.
    """
    figure = new_figure(11, 6.6)
    above, below = figure.subfigures(2, 1, height_ratios=(1, 0.85))
    attacks = [*next(iter(correct.values()))]
    axes = above.subplots(1, len(attacks), sharey=True, squeeze=False)[0]
    for axis, attack in zip(axes, attacks, strict=True):
        for (label, by_attack), look in zip(correct.items(), SERIES, strict=False):
            flags = by_attack[attack].double()
            mean, half = flags.mean(1), 1.96 * flags.std(1, correction=0) / flags.shape[1] ** 0.5
            axis.fill_between(
                epsilons, mean - half, mean + half, color=look.colour, alpha=0.15, lw=0
            )
            axis.plot(epsilons, mean, label=label, **look.marked())
        axis.set(title=attack, xlabel="bound of the attack (white to black is 1)", ylim=(0, 1.02))
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    axes[0].set_ylabel("accuracy on held-out digits")
    axes[0].legend(loc="lower left", title="trained with penalty, weight")
    left, right = below.subfigures(1, 2)
    left.suptitle(f"attacked by PGD within {examined.epsilon:g}; above each, the predicted class")
    right.suptitle("gradient of the loss (red: more ink raises it, blue: lowers it)")
    rows = examined.rows
    axis = _tiles(left, {label: row.x for label, row in rows.items()}, {})
    for i, row in enumerate(rows.values()):
        for j, (guess, label) in enumerate(
            zip(row.predicted.tolist(), row.label.tolist(), strict=True)
        ):
            weight, colour = ("normal", BLUE) if guess == label else ("bold", VERMILLION)
            axis.text(*_above(i, j), guess, color=colour, weight=weight, ha="center", va="bottom")
    _tiles(right, {"digit": rows["digit"].x}, examined.gradients)
    return figure


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
    _tiles(below, {name: some[:16].detach() for name, some in images.items()}, {})
    return figure


def _tiles(figure: Any, images: dict[str, Tensor], gradients: dict[str, Tensor]) -> Any:
    """A row [n, 64] for each name: images from -1 to 1, then gradients, each scaled to its largest."""
    scaled = {name: some / some.abs().amax(1, keepdim=True) for name, some in gradients.items()}
    lines = []
    for colours, rows in (("gray_r", images), ("RdBu_r", scaled)):
        for some in rows.values():
            tones = torch.from_numpy(mpl.colormaps[colours](((some + 1) / 2).cpu().numpy()))
            tiles = tones.reshape(-1, 8, 8, 4).permute(0, 3, 1, 2)
            spaced = torch.nn.functional.pad(tiles, (1, 1, 4, 0), value=1.0)
            lines.append(torch.cat([*spaced], 2))
    axis = figure.subplots()
    axis.imshow(torch.cat(lines, 1).permute(1, 2, 0).numpy())
    names = [name.replace(", ", "\n") for name in (*images, *gradients)]
    axis.set_yticks([12 * i + 7.5 for i in range(len(names))], names)
    axis.set_anchor("N")
    axis.set_xticks([])
    hide_frame(axis)
    return axis


def _above(row: int, column: int) -> tuple[float, float]:
    """The position above a tile of `_tiles`."""
    return 10 * column + 4.5, 12 * row + 3.5
