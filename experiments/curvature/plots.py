"""The picture of gradient descent and the spectrum of its Hessian."""

from collections.abc import Sequence
from itertools import pairwise
from math import asinh, ceil, floor, log, log10
from typing import Any

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from experiments.shared.style import decimal_ticks, new_figure, picture
from hoglib.curvature import Spectrum
from hoglib.lightning import Measurement
from hoglib.plotting import BLACK, BLUE, ORANGE

WIDTH = 0.15  # of an eigenvalue in the density over training, on the axis of asinh
ROWS = 240


@picture
def plot_spectrum_over_training(
    history: Sequence[Measurement], losses: dict[int, float], lr: float, title: str
) -> Figure:
    """Loss and largest eigenvalue by step; below, the density of all eigenvalues.

    A dashed line is 2 / lr, where eigenvalues come near it.
    """
    figure = new_figure(8, 7)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.3))
    steps = [one.batch for one in history]
    spectra = [one.spectrum for one in history]
    largest = [float(spectrum.largest[-1]) for spectrum in spectra]
    near = 2 / lr < 4 * max(largest)  # a line far above would compress everything else
    edge = 2 / lr if near else None
    _loss_and_largest(above, steps, losses, largest, edge)
    above.set_title(title)
    colours = _densities(below, steps, spectra)
    if edge is not None:
        below.axhline(edge, color="white", ls="--", lw=1.3)
    below.set(xlabel="step", ylabel="all eigenvalues of the Hessian", facecolor="black")
    below.grid(visible=False)
    figure.colorbar(colours, ax=below, label="eigenvalues per decade", pad=0.02)
    return figure


def _loss_and_largest(
    axis: Any, steps: list[int], losses: dict[int, float], largest: list[float], edge: float | None
) -> None:
    """The training loss, and the largest eigenvalue on an axis of its own."""
    axis.plot([*losses], [*losses.values()], color=BLUE, lw=1.3, ls="-")
    axis.set(yscale="log")
    axis.set_ylabel("training loss (solid)", color=BLUE)
    decimal_ticks(axis.yaxis)
    right = axis.twinx()
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    right.plot(steps, largest, color=ORANGE, lw=2.2, ls=(0, (3, 1)))
    right.set_ylabel("largest eigenvalue (dashes)", color="#8A5F00")  # orange, dark enough for text
    if edge is not None:
        right.axhline(edge, color=BLACK, ls="--", lw=1.1)
        right.annotate(
            f"2 / lr = {edge:.3g}", (1, edge), (-4, -5), ("axes fraction", "data"),
            textcoords="offset points", ha="right", va="top",
        )  # fmt: skip
    right.set_ylim(min(0, *largest), 1.05 * max(edge or 0, *largest))


def _densities(axis: Any, steps: list[int], spectra: Sequence[Spectrum]) -> Any:
    """The densities of all eigenvalues as columns of colours."""
    edges, counts, linear = eigenvalues_per_decade(spectra)
    colours = axis.pcolormesh(
        _edges_between(steps),
        edges,
        counts,
        norm=LogNorm(1, max(10, counts.max())),
        cmap="magma",
        rasterized=True,
    )
    axis.set_yscale("asinh", linear_width=linear)
    highest = floor(log10(abs(edges).max()))
    sizes = [10.0**e for e in range(ceil(log10(linear)), highest + 1)]
    ticks = [*(-size for size in reversed(sizes)), 0, *sizes]
    ticks = [tick for tick in ticks if edges[0] < tick < edges[-1]]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.yaxis.set_minor_locator(NullLocator())
    return colours


def eigenvalues_per_decade(spectra: Sequence[Spectrum]) -> tuple[Any, Any, float]:
    """Smoothed counts of eigenvalues on an axis that is linear near zero and logarithmic beyond.

    Each node of a density becomes a Gaussian of one width on an axis of asinh(eigenvalue / linear).
    Nearer to zero than a hundredth of the largest eigenvalue, a few dozen Lanczos steps do not separate
    eigenvalues.

    Args:
        spectra: Spectra of one Hessian.
    Returns:
        Edges of rows [n + 1], eigenvalues in a decade there [n, spectra], and the linear width.
    """
    ends = torch.stack([torch.stack([s.smallest[0], s.largest[-1]]).double() for s in spectra])
    # 1 for a Hessian of zeros, which has no scale
    linear = 1e-2 * float(ends.abs().max()) or 1.0
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    rows = torch.linspace(
        asinh(low / linear) - 4 * WIDTH, asinh(high / linear) + 4 * WIDTH, ROWS + 1
    )
    edges, centres = rows.double(), ((rows[1:] + rows[:-1]) / 2).double()
    counts = []
    for s in spectra:
        z = (centres[:, None] - torch.asinh(s.density.nodes / linear).reshape(-1)) / WIDTH
        gaussians = torch.exp(-z.square() / 2) / (WIDTH * (2 * torch.pi) ** 0.5)
        weights = s.density.weights.reshape(-1) / len(s.density.nodes)
        # beyond the linear part asinh grows as the natural logarithm: ln 10 of it is a decade
        counts.append(s.size * log(10) * gaussians @ weights)
    return (torch.sinh(edges) * linear).numpy(), torch.stack(counts, 1).numpy(), linear


def _edges_between(steps: list[int]) -> list[float]:
    """Edges of columns around steps, half-way between them."""
    inner = [(a + b) / 2 for a, b in pairwise(steps)]
    # a single column gets a width of one step
    return [steps[0], *inner, steps[-1] + (not inner)]
