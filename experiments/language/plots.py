"""Pictures of language models: curvature by layer over training, and the loss along directions."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import Tensor

from experiments.language.table import Direction
from experiments.logs import Points
from experiments.shared.style import SERIES, decimal_ticks, new_figure, picture
from hoglib.lightning import Measurement
from hoglib.plotting import BLACK, GREY


@picture
def plot_directions(
    history: Sequence[Measurement], directions: Sequence[Direction], curve: Points
) -> Figure:
    """The largest eigenvalue of each layer over training, and the loss along the sharpest directions.

    Args:
        history: Measurements, one of each layer at each step; may be empty.
        directions: Directions, of which the last is a random one; may be empty.
        curve: Steps, and the perplexity of held-out text.
    Returns:
        The figure.
    """
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    layers: dict[str, list[tuple[int, float]]] = {}
    for one in history:
        layers.setdefault(one.name, []).append((one.batch, float(one.spectrum.largest[-1])))
    for (name, points), series in zip(layers.items(), SERIES, strict=False):
        left.plot(*zip(*points, strict=True), label=name, **series.marked(markersize=3.5))
    left.set(xlabel="step", ylabel="largest eigenvalue of the layer's block", yscale="log")
    decimal_ticks(left.yaxis)
    if layers:
        left.legend(title="layer", ncols=2)
    if curve:
        above = left.twinx()
        above.grid(visible=False)
        above.spines["right"].set_visible(True)
        above.plot(*zip(*curve, strict=True), color=GREY, lw=1, ls=":")
        above.set(ylabel="perplexity of held-out text (dots)", ylim=(1, None))
    for direction, series in zip(directions, SERIES, strict=False):
        label = f"{direction.name}, {direction.curvature:.3g}"
        right.plot(direction.steps, direction.losses, label=label, **series.line())
    if directions:
        first = directions[0]
        here = first.losses[len(first.losses) // 2]
        parabola = [here + first.curvature * t * t / 2 for t in first.steps]
        right.plot(first.steps, parabola, color=BLACK, lw=1, ls=":", label="quadratic of the first")
        highest = max(max(direction.losses) for direction in directions)
        right.set_ylim(0.9 * min(first.losses), 1.1 * highest)
    right.set(xlabel="distance from the trained parameters", ylabel="training loss")
    if directions:
        right.legend(title="direction, curvature")
    return figure


@picture
def plot_perplexity(columns: dict[str, Tensor], steps: Sequence[int], title: str) -> Figure:
    """Perplexity against the gradient steps, one line a method.

    Args:
        columns: Losses [len(steps), tasks] by method.
        steps: Numbers of gradient steps.
        title: Title of the picture.
    Returns:
        The figure.
    """
    figure = new_figure(6, 4)
    axis = figure.subplots()
    for (name, losses), series in zip(columns.items(), SERIES, strict=False):
        axis.plot(list(steps), losses.mean(1).exp().tolist(), label=name, **series.marked())
    axis.set(xlabel="gradient steps", ylabel="perplexity of a character", title=title)
    axis.legend()
    return figure
