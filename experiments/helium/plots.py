"""The picture of helium: the energy in the training and after it, and the Coulomb hole."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.helium.table import EXACT, HARTREE_FOCK
from experiments.logs import Points
from experiments.shared.style import SERIES, hide_frame, new_figure, picture

SMOOTH = 25  # steps of the training in a mean


@picture
def plot_helium(
    curves: dict[str, Points], means: Tensor, result: tuple[float, float], hole: Tensor
) -> Figure:
    """Energy over the steps, the running mean afterwards, and the Coulomb hole in a plane.

    Args:
        curves: (step, value) of train/energy.
        means: Mean local energy of the walkers at each sample after the training [m].
        result: The energy and its standard error.
        hole: psi^2 by the place of one electron, over that of the mirrored place, with the other at
            (1/2, 0): [m, m], by x and y.
    Returns:
        The figure.
    """
    figure = new_figure(13.0, 3.9)
    axes = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    points = curves.get("train/energy", [])
    energies = torch.tensor([value for _, value in points])
    size = max(min(SMOOTH, len(energies) // 4), 1)
    smooth = energies.unfold(0, size, 1).mean(1)
    axes[0].plot(range(size, size + len(smooth)), smooth, **SERIES[0].line())
    axes[0].set(xlabel="step", ylabel="energy, hartree", title=f"training (means of {size} steps)")
    axes[0].set_ylim(EXACT - 0.01, HARTREE_FOCK + 0.05)
    running = means.cumsum(0) / torch.arange(1, len(means) + 1)
    axes[1].plot(range(1, len(means) + 1), running, label="mean so far", **SERIES[0].line())
    energy, error = result
    axes[1].axhspan(energy - error, energy + error, alpha=0.2, label="one standard error")
    axes[1].set(xlabel="samples of each walker", title=f"energy {energy:.5f} +- {error:.5f}")
    axes[1].set_ylim(EXACT - 0.003, EXACT + 0.003)
    for axis in axes[:2]:
        axis.axhline(EXACT, color="black", linewidth=1, label=f"exact, {EXACT:.5f}")
    axes[0].axhline(HARTREE_FOCK, color="gray", linestyle="--", linewidth=1, label="Hartree-Fock")
    axes[0].legend()
    axes[1].legend()
    image = axes[2].imshow(
        hole.T.log2().numpy(), origin="lower", extent=(-1.5, 1.5, -1.5, 1.5), cmap="RdBu_r",
        vmin=-2, vmax=2,
    )  # fmt: skip
    axes[2].plot([0.5], [0.0], "o", color="black", markersize=4)
    axes[2].plot([0.0], [0.0], "+", color="black", markersize=8)
    hide_frame(axes[2])
    bar = figure.colorbar(image, ax=axes[2], shrink=0.85, ticks=[-2, -1, 0, 1, 2])
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    axes[2].set(xlabel="x, bohr", ylabel="y, bohr", xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    axes[2].set_title("density here over the mirrored place,\none electron at the dot")
    return figure
