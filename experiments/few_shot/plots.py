"""Pictures of few-shot learners."""

from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from experiments.few_shot.sinusoid import Waves
from experiments.logs import Points
from experiments.shared.style import SERIES, hide_frame, new_figure, picture
from hoglib.meta import Learner
from hoglib.plotting import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILLION

# steps of gradient descent: how the prediction after them is drawn
AFTER = {
    0: {"color": GREEN, "linestyle": ":"},
    1: {"color": ORANGE, "linestyle": "--"},
    10: {"color": BLUE, "linestyle": "-"},
}
GAP = 6  # pixels between images of an episode


@picture
def plot_adaptation(maml: Learner, waves: Waves, label: str, tasks: int = 3) -> Figure:
    """Held-out sine waves: truth, support points, and predictions before and after gradient steps."""
    grid = torch.linspace(-5, 5, 200, device=next(maml.parameters()).device).unsqueeze(-1)
    figure = new_figure(4 * tasks, 3.6)
    axes = figure.subplots(1, tasks, sharey=True, squeeze=False)[0]
    for i, axis in enumerate(axes):
        x, y = (part[i].to(grid) for part in waves.support)
        truth = waves.amplitude[i] * torch.sin(grid.cpu() - waves.phase[i])
        axis.plot(grid.cpu(), truth, color=GREY, lw=5, ls="-", alpha=0.5, label="truth")
        with torch.no_grad():
            for steps, look in AFTER.items():
                prediction = maml(grid, params=maml.adapt((x, y), steps=steps)).cpu()
                name = f"after {steps} step{'s' * (steps > 1)}" if steps else "before adaptation"
                axis.plot(grid.cpu(), prediction, label=name, **look)
        axis.plot(x.cpu(), y.cpu(), "o", color=BLACK, ls="", label="support points")
        axis.set(xlabel="x", xlim=(-5, 5), title=f"held-out task {i + 1}")
    axes[0].set_ylabel("y")
    figure.suptitle(f"{label}: a new sine wave from {len(waves.support[0][0])} points")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    return figure


@picture
def plot_curves(curves: dict[str, Points], ylabel: str, **scale: str) -> Figure:
    """Values of training and validation against the meta-step."""
    figure = new_figure(6.5, 4)
    axis = figure.subplots()
    series = iter(SERIES)
    for key, points in curves.items():
        look = {"color": GREY, "lw": 1, "ls": "-", "alpha": 0.7}
        look = look if key.startswith("train/") else next(series).marked(markersize=3.5)
        axis.plot(*zip(*points, strict=True), label=key, **look)
    axis.set(xlabel="meta-step", ylabel=ylabel, **scale)
    if axis.lines:
        axis.legend()
    return figure


@picture
def plot_episode(
    support: Tensor, query: Tensor, label: Tensor, predicted: Tensor, title: str, most: int = 10
) -> Figure:
    """One task: the support images of each class, and to their right query images of it.

    Classes have a letter each. A misclassified query is framed, with the letter of the predicted class.

    Args:
        support: Images [n, channels, size, size] from 0 to 1, class by class.
        query: Query images [m, channels, size, size].
        label: Their classes [m].
        predicted: Their predicted classes [m].
        title: Title of the picture.
        most: Query images of each class that are shown.
    Returns:
        The figure.
    """
    ways, size = int(label.max()) + 1, query.shape[-1]
    shots, queries = len(support) // ways, min(most, int((label == 0).sum()))
    figure = new_figure(0.62 * (shots + queries) + 1.4, 0.62 * ways + 1)
    axis = figure.subplots()
    pitch = size + GAP
    rows = []
    for way in range(ways):
        shown = [*support[way * shots : (way + 1) * shots], *query[label == way][:queries]]
        rows.append(torch.cat([torch.nn.functional.pad(x, (GAP // 2,) * 4) for x in shown], -1))
        for i, guess in enumerate(predicted[label == way][:queries].tolist()):
            if guess != way:
                _frame(axis, (shots + i) * pitch, way * pitch, pitch, _letter(guess))
    image = torch.cat(rows, -2).movedim(0, -1).squeeze(-1).numpy()
    # ink on paper: the images are white on black
    axis.imshow(1 - image, cmap="gray", vmin=0, vmax=1)
    axis.axvline(shots * pitch - 0.5, color=BLUE, lw=2, ls="-")
    axis.set_yticks([pitch * (i + 0.5) for i in range(ways)], [_letter(i) for i in range(ways)])
    axis.set_xticks(
        [shots * pitch / 2, (shots + queries / 2) * pitch],
        ["support", "query (framed: misclassified as)"],
    )
    hide_frame(axis)
    figure.suptitle(title)
    return figure


def _frame(axis: Any, left: float, top: float, pitch: int, text: str) -> None:
    """A frame around an image, with a letter in its corner."""
    side = pitch - 2
    axis.add_patch(Rectangle((left + 0.5, top + 0.5), side, side, fill=False, ec=VERMILLION, lw=2))
    axis.text(
        left + 2.5, top + 2.5, text, color=VERMILLION, va="top", fontsize=10, fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )  # fmt: skip


def _letter(number: int) -> str:
    return chr(ord("A") + number % 26)
