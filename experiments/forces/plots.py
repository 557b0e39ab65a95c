"""The picture of potentials: predicted forces, and a cut through the energy."""

from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.shared.style import SERIES, new_figure, picture
from hoglib.plotting import BLACK, GREY, LIGHT

# the first is not drawn like the truth of other pictures: both are networks
LOOKS = (SERIES[1], SERIES[0])


class Cut(NamedTuple):
    """Energies where one atom of a cluster is moved.

    Attributes:
        distances: Distances of the atom from the centre of the others [m].
        truth: True energies there [m].
        energies: Energies of each potential there [m], by label.
        start: Distance of the atom in the cluster.
        training: Distances of the outermost atoms of training clusters [n].
    """

    distances: Tensor
    truth: Tensor
    energies: dict[str, Tensor]
    start: float
    training: Tensor


@picture
def plot_forces(truth: Tensor, predicted: dict[str, Tensor], cut: Cut) -> Figure:
    """Predicted components of forces against true ones, for each potential; and a cut through E.

    Args:
        truth: True forces.
        predicted: Forces of each potential, by label.
        cut: The cut.
    Returns:
        The figure.
    """
    count = len(predicted)
    figure = new_figure(4.1 * (count + 1), 4.3)
    axes = figure.subplots(1, count + 1)
    end = 1.05 * float(truth.abs().max())
    for axis, (label, forces), look in zip(axes, predicted.items(), LOOKS, strict=False):
        axis.plot([-end, end], [-end, end], color=GREY, lw=1, ls="-", zorder=0)
        axis.plot(
            truth.flatten(), forces.flatten(), ".", ls="", color=look.colour, ms=3, alpha=0.35, mew=0
        )  # fmt: skip
        error = float((forces - truth).square().mean().sqrt() / truth.square().mean().sqrt())
        text = f"RMS error: {error:.1%} of the RMS force"
        beyond = int((forces.abs() > end).sum())
        if beyond:
            text += f"\n{beyond} of {forces.numel()} lie outside"
        axis.text(0.04, 0.98, text, transform=axis.transAxes, va="top")
        axis.set(title=f"trained on {label}", xlim=(-end, end), ylim=(-end, end))
        axis.set(xlabel="true force component, epsilon / sigma", aspect="equal")
    axes[0].set_ylabel("predicted force component, epsilon / sigma")
    _cut(axes[-1], cut)
    return figure


def _cut(axis: Any, cut: Cut) -> None:
    axis.plot(cut.distances, cut.truth, color=GREY, lw=5, ls="-", alpha=0.5, label="truth")
    for (label, energies), look in zip(cut.energies.items(), LOOKS, strict=False):
        axis.plot(cut.distances, energies, label=label, **look.line())
    low, at_end = float(cut.truth.min()), float(cut.truth[-1])
    axis.set_ylim(low - 0.25 * (at_end - low), at_end + 0.6 * (at_end - low))
    inside = cut.training[cut.training <= cut.distances[-1]]
    axis.plot(
        inside, torch.full_like(inside, 0.02), "|", ls="", color=BLACK, ms=7, alpha=0.4,
        transform=axis.get_xaxis_transform(), label="training clusters",
    )  # fmt: skip
    axis.axvline(cut.start, color=LIGHT, lw=1.2, ls="-", zorder=0, label="its own position")
    axis.set(xlabel="distance of the outermost atom, sigma")
    axis.set_ylabel("energy of a held-out cluster, epsilon")
    axis.set_title("one atom is pulled out")
    axis.legend()
