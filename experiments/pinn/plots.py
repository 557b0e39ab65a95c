"""The picture of a network for an equation: solution, error, residual, and the error over the cost."""

from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from experiments.logs import Points
from experiments.shared.style import SERIES, hide_frame, new_figure, picture


@picture
def plot_pinn(
    title: str,
    coordinates: str,
    curves: dict[str, Points],
    labels: dict[str, str],
    fields: tuple[Tensor, ...],
    start: str,
) -> Figure:
    """The fields of the first network, and the errors of all.

    Args:
        title: The equation.
        coordinates: Their names, a letter each.
        curves: (step, value) of gradients and val, each with the name of an optimizer after a slash.
        labels: Labels of the optimizers, by name.
        fields: u, u - exact and the residual on the grid [m, m], by the coordinates.
        start: Where the networks start.
    Returns:
        The figure.
    """
    figure = new_figure(15.0, 3.7)
    axes = figure.subplots(1, 4, width_ratios=(1, 1, 1, 1.15))
    names = ("solution u", "u - exact", "residual")
    maps = ("viridis", "RdBu_r", "PuOr")
    for axis, field, name, colours in zip(axes, fields, names, maps, strict=False):
        _field(figure, axis, field, name, colours)
        axis.set(xlabel=coordinates[0], ylabel=coordinates[1])
    axes[0].set_title(f"{title}: {names[0]}")
    for (name, label), look in zip(labels.items(), SERIES, strict=False):
        cost = [value for _, value in curves.get(f"gradients/{name}", [])]
        error = [value for _, value in curves.get(f"val/{name}", [])]
        axes[3].plot(cost, error, label=label, **look.line())
    axes[3].set(yscale="log", xlabel="cost, in gradients of a batch", ylabel="relative error of u")
    axes[3].set_title(start)
    axes[3].legend()
    return figure


def _field(figure: Any, axis: Any, field: Tensor, name: str, colours: str) -> None:
    end = float(field.abs().max()) or 1.0
    low = -end if float(field.min()) < -0.05 * end or name != "solution u" else 0.0
    image = axis.imshow(
        field.T.numpy(), origin="lower", extent=(0, 1, 0, 1), cmap=colours, vmin=low, vmax=end
    )
    hide_frame(axis)
    axis.set_title(name)
    figure.colorbar(image, ax=axis, shrink=0.85)
