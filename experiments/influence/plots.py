"""The picture of errors and of the training digits behind them."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from experiments.influence.table import Errors
from experiments.shared.digit_plots import draw_digit, label_of
from experiments.shared.mnist import split as mnist_split
from experiments.shared.style import SERIES, new_figure, picture
from hoglib.plotting import GREY, VERMILLION

ROWS, EACH = 6, 6  # errors, and training digits of either kind beside each


@picture
def plot_influence(errors: Errors, title: str) -> Figure:
    """Errors beside their most harmful and most helpful training digits; trainings without these."""
    figure = new_figure(12, 6.8)
    digits, charts = figure.subfigures(1, 2, width_ratios=(1.9, 1))
    left, middle, right = digits.subfigures(1, 3, width_ratios=(1.25, EACH, EACH))
    (train_pixels, _), (test_pixels, _) = mnist_split()
    train, queries, predicted = errors.train, errors.queries, errors.predicted
    exact, *_ = errors.harm.values()
    count = min(ROWS, len(queries.x))
    numbers = queries.number[:count].cpu()
    names = [
        (f"{guess}, is {truth}", VERMILLION)
        for guess, truth in zip(predicted.tolist(), queries.truth.tolist(), strict=True)
    ]
    _tiles(left, "errors", [[test_pixels[n]] for n in numbers], [[name] for name in names])
    worst = exact.cpu().topk(min(EACH, len(exact)), dim=0).indices.T[:count]
    best = (-exact).cpu().topk(min(EACH, len(exact)), dim=0).indices.T[:count]
    for part, what, picks in (
        (middle, "training digits that raised their loss most", worst),
        (right, "that lowered it most", best),
    ):
        full = [[train_pixels[train.number[n]] for n in row] for row in picks.tolist()]
        _tiles(part, what, full, [[label_of(train, n) for n in row] for row in picks.tolist()])
    scatter, bars = charts.subplots(2, 1)
    _draw_changes(scatter, errors)
    _draw_right(bars, errors)
    figure.suptitle(f'{title}; "0, is 9": the network or the label says 0, the digit is 9')
    return figure


def _tiles(
    figure: Any, title: str, images: list[list[Tensor]], names: list[list[tuple[str, str]]]
) -> None:
    """Rows of square images with a coloured title each."""
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(len(images), len(images[0]), squeeze=False)
    for line, shown, titles in zip(axes, images, names, strict=False):
        for axis, image, (text, colour) in zip(line, shown, titles, strict=True):
            draw_digit(axis, image, text, colour)


def _draw_changes(axis: Any, errors: Errors) -> None:
    """Predicted against actual changes of the loss, of the scores that are in its units."""
    checks = [*errors.checks.items()][:2]
    every = [x for _, check in checks for x in (*check.predicted.tolist(), *check.actual.tolist())]
    ends = [min(every), max([0.0, *every])]
    axis.plot(ends, ends, color=GREY, lw=1)
    for (name, check), look in zip(checks, SERIES, strict=False):
        label = f"{name}: {check.correlation:.2f}"
        axis.plot(
            check.predicted.cpu(), check.actual.cpu(), look.marker, color=look.colour, ms=5,
            alpha=0.8, label=label,
        )  # fmt: skip
    axis.set(
        xlabel="change of the error's loss, predicted", ylabel="after training again",
        title=f"without the {errors.leave_out} most harmful digits",
    )  # fmt: skip
    axis.legend(loc="lower right", fontsize=8, title="correlation", title_fontsize=8)


def _draw_right(axis: Any, errors: Errors) -> None:
    """The share of errors that are classified correctly after training again."""
    names = [*errors.checks]
    shares = [float(errors.checks[name].right.float().mean()) for name in names]
    at = range(len(names))
    axis.barh(at, shares, color=[look.colour for look in SERIES[: len(names)]], height=0.6)
    for y, name, share in zip(at, names, shares, strict=True):
        axis.text(0.01, y - 0.33, name, va="bottom", fontsize=9)
        axis.text(share + 0.01, y, f"{share:.0%}", va="center", fontsize=9)
    axis.set(xlim=(0, 1), xlabel="errors that training again mends", yticks=[])
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter(PercentFormatter(1))
    axis.grid(visible=False, axis="y")
