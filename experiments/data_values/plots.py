"""The picture of values of training examples."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.data_values.table import Scored, precision_recall
from experiments.shared.digit_plots import labelled_digits
from experiments.shared.mnist import split as mnist_split
from experiments.shared.noisy_digits import Examples
from experiments.shared.style import SERIES, new_figure, picture
from hoglib.plotting import GREY

SHOWN = 18  # digits in each group


@picture
def plot_data_values(examples: Examples, scored: Scored, title: str) -> Figure:
    """The most harmful and most helpful digits; predicted and actual changes; precision and recall."""
    figure = new_figure(11.5, 7.2)
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.05))
    first, *_ = scored.harm.values()
    order = first.cpu().argsort(descending=True, stable=True)
    full = mnist_split()[0].x[examples.number.cpu()]  # in all their pixels
    shown = examples._replace(x=full, label=examples.label.cpu(), truth=examples.truth.cpu())
    left, right = above.subfigures(1, 2)
    labelled_digits(left, "most harmful by the gradient", shown, order[:SHOWN], 3)
    labelled_digits(right, "most helpful", shown, order.flip(0)[:SHOWN], 3)
    checked, found = below.subplots(1, 2)
    _draw_check(checked, scored)
    wrong = scored.wrong.cpu()
    for (name, harm), look in zip(scored.harm.items(), SERIES, strict=False):
        curve = precision_recall(harm.cpu(), wrong)
        label = f"{name}: {curve.average:.3f}" if wrong.any() else name
        found.plot(curve.recall, curve.precision, label=label, **look.line())
    found.axhline(float(wrong.double().mean()), color=GREY, lw=1, ls=":")
    found.set(xlabel="wrong labels found (recall)", ylabel="of those listed (precision)")
    found.set(xlim=(0, 1), ylim=(0, 1.03))
    for axis in (found.xaxis, found.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    found.legend(
        loc="lower center", title="average precision", frameon=True, facecolor="white",
        edgecolor="none", framealpha=1,
    )  # fmt: skip
    figure.suptitle(f'{title}; "0, is 9": the label says 0, the digit is 9')
    return figure


def _draw_check(axis: Any, scored: Scored) -> None:
    """Changes of the clean loss without random subsets, predicted and actual."""
    check = scored.check
    check.plot(axis)
    axis.set(
        xlabel="change of the clean loss that the gradient predicts",
        ylabel="change after training without them",
        title=f"{check.subsets.shape[1]} random digits left out, {len(check.predicted)} times: "
        f"rank correlation {check.correlation:.2f}",
    )
