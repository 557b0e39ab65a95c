"""The picture of classifiers under attack."""

from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from experiments.shared.digit_plots import above_tile, tiles
from experiments.shared.style import SERIES, new_figure, picture
from hoglib.plotting import BLUE, VERMILLION


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
    axis = tiles(left, {label: row.x for label, row in rows.items()}, {})
    for i, row in enumerate(rows.values()):
        pairs = zip(row.predicted.tolist(), row.label.tolist(), strict=True)
        for j, (guess, label) in enumerate(pairs):
            weight, colour = ("normal", BLUE) if guess == label else ("bold", VERMILLION)
            axis.text(
                *above_tile(i, j), guess, color=colour, weight=weight, ha="center", va="bottom"
            )
    tiles(right, {"digit": rows["digit"].x}, examined.gradients)
    return figure
