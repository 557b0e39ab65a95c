"""Pictures of generators: points in the plane, and digits."""

from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from experiments.logs import Points
from experiments.runs import is_rank_zero
from experiments.shared.mixture import PARTS
from experiments.shared.style import SERIES, SMALL, decimal_ticks, hide_frame, new_figure, picture
from hoglib.plotting import BLACK, BLUE

GAP = 8  # pixels between rows of digits of different steps


@picture
def plot_gan_curves(curves: dict[str, Points]) -> Figure:
    """Losses and penalty above, quality of held-out points below, against the step."""
    figure = new_figure(8, 6)
    above, below = figure.subplots(2, 1, sharex=True)
    series = {above: iter(SERIES), below: iter(SERIES)}
    for key, points in curves.items():
        if key == "val/covered":
            points = [(step, value / PARTS) for step, value in points]
            key = "val/covered (share)"
        training = key.startswith("train/")
        axis = above if training or key == "val/penalty" else below
        look = next(series[axis])
        drawn = look.line(lw=1, alpha=0.7) if training else look.marked(markersize=3.5)
        axis.plot(*zip(*points, strict=True), label=key, **drawn)
    above.set(ylabel="loss")
    below.set(xlabel="step", ylabel="quality")
    below.set_ylim(bottom=0)
    for axis in (above, below):
        if axis.lines:
            axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@picture
def plot_points(
    critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, title: str
) -> Figure:
    """Real and generated points [n, 2] over contours of the critic."""
    margin = 0.12 * (real.max() - real.min())
    low, high = (real.min() - margin).item(), (real.max() + margin).item()
    line = torch.linspace(low, high, 200, device=real.device, dtype=real.dtype)
    with torch.no_grad():
        scores = critic(torch.cartesian_prod(line, line)).reshape(200, 200).T.cpu()
    figure = new_figure(11, 5.2)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, name, sample in ((axes[0], "real", real), (axes[1], "generated", fake)):
        contours = axis.contourf(
            line.cpu(), line.cpu(), scores, levels=20, cmap="PuOr_r", alpha=0.6
        )
        axis.plot(*sample.cpu().T, ".", ls="", color=BLACK, ms=2.5, alpha=0.6, mew=0)
        axis.set(title=f"{len(sample)} {name} points", xlim=(low, high), ylim=(low, high))
        axis.set_aspect("equal")
        axis.grid(visible=False)
    figure.suptitle(title)
    figure.colorbar(contours, ax=axes, label="score of the critic: higher is more real", shrink=0.8)
    return figure


def save_grid(file: Path, images: Tensor, across: int) -> Path:
    """Images [n, 1, h, w] from -1 to 1, `across` in a row, without a gap; black on white."""
    if not is_rank_zero():
        return file
    shades = (127.5 - 127.5 * images.detach().cpu()).round().clamp(0, 255).to(torch.uint8)
    count, _, height, width = images.shape
    rows = shades.reshape(count // across, across, height, width).transpose(1, 2)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rows.reshape(-1, across * width).numpy()).save(file)
    return file


@picture
def plot_generated_digits(
    grids: dict[int, Path],
    across: int,
    frechet: Points,
    floor: float,
    shares: Tensor,
    title: str,
) -> Figure:
    """Generated digits over time, all of the last step, their Frechet distance and their classes.

    Args:
        grids: Files of `save_grid` by step.
        across: Images in a row of them.
        frechet: (step, distance to held-out digits).
        floor: The distance of real training digits.
        shares: Frequencies of the classes at the end [10].
        title: Title of the picture.
    Returns:
        The figure.
    """
    figure = new_figure(11.5, 6.6)
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    early, below = left.subfigures(2, 1, height_ratios=(1.15, 1))
    steps = spaced_evenly([*grids], 6)
    _first_rows(early.subplots(), {step: grids[step] for step in steps}, across)
    distance, classes = below.subplots(1, 2, width_ratios=(1.3, 1))
    _distances(distance, frechet, floor)
    classes.bar(range(len(shares)), (100 * shares).tolist(), color=BLUE)
    classes.axhline(100 / len(shares), color=BLACK, ls="--", lw=1.2)
    classes.set(xlabel="class, by the classifier", ylabel="generated digits, %")
    classes.set_xticks(range(len(shares)))
    classes.grid(visible=False, axis="x")
    axis = right.subplots()
    with Image.open(grids[steps[-1]]) as image:
        axis.imshow(np.asarray(image), cmap="gray", vmin=0, vmax=255)
    axis.set_axis_off()
    axis.set_title(f"after {steps[-1]:,} steps, not selected")
    figure.suptitle(title)
    return figure


def _first_rows(axis: Any, grids: dict[int, Path], across: int) -> None:
    """The first row of each grid, one below the other."""
    strips = []
    for file in grids.values():
        with Image.open(file) as image:
            pixels = torch.tensor(np.asarray(image))
        first = pixels[: len(pixels) // across]
        strips.append(torch.nn.functional.pad(first, (0, 0, 0, GAP), value=255))
    axis.imshow(torch.cat(strips).numpy(), cmap="gray", vmin=0, vmax=255)
    height = len(strips[0])
    ticks = [height * i + (height - GAP) / 2 for i in range(len(grids))]
    axis.set_yticks(ticks, [f"{step:,}" for step in grids])
    axis.set(xticks=[], ylabel="step", title=f"the same {across} points over time")
    hide_frame(axis)


def _distances(axis: Any, frechet: Points, floor: float) -> None:
    look = SERIES[0].marked(markersize=3)
    axis.plot(*zip(*frechet, strict=True) if frechet else ([], []), **look)
    axis.axhline(floor, color=BLACK, ls="--", lw=1.2)
    axis.annotate(
        "real training digits", (1, floor), (-4, 3), ("axes fraction", "data"),
        textcoords="offset points", ha="right", fontsize=SMALL,
    )  # fmt: skip
    axis.set_xlim(left=0)
    axis.set(xlabel="step", ylabel="Frechet distance to held-out digits", yscale="log")
    axis.xaxis.get_major_locator().set_params(integer=True)
    decimal_ticks(axis.yaxis)


def spaced_evenly(steps: list[int], count: int) -> list[int]:
    """At most `count` of increasing steps, first and last included, even in their logarithm."""
    if len(steps) <= count:
        return steps
    low, high = log(steps[0]), log(steps[-1])
    positions = [low + (high - low) * i / (count - 1) for i in range(count)]
    return sorted({min(steps, key=lambda step: abs(log(step) - at)) for at in positions})
