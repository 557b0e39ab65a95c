"""Tables of language models: spectra by layer, sharp directions, and perplexity after adaptation."""

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

from torch import Tensor

from experiments.shared.layout import align, mean_and_interval
from hoglib.lightning import Measurement


class Direction(NamedTuple):
    """A direction of length 1 in the space of the parameters, and the loss along it.

    Attributes:
        name: What it is.
        curvature: Of the loss along it, the eigenvalue of an eigenvector.
        shares: What each layer has of the square of its length.
        steps: Distances from the parameters.
        losses: The loss at each of them.
    """

    name: str
    curvature: float
    shares: dict[str, float]
    steps: list[float]
    losses: list[float]


def layers_table(history: Sequence[Measurement]) -> str:
    """The largest eigenvalue and the trace of each layer's block of the Hessian, first and last."""
    ends = history[0].batch, history[-1].batch
    rows = [["layer", "parameters"]]
    rows[0] += [f"{what} at {step:,}" for step in ends for what in ("largest", "trace")]
    layers: dict[str, list[Measurement]] = {}
    for one in history:
        if one.batch in ends:
            layers.setdefault(one.name, []).append(one)
    for name, found in layers.items():
        first, last = found[0].spectrum, found[-1].spectrum
        row = [name, f"{last.size:,}"]
        for spectrum in (first, last):
            trace, error = spectrum.trace
            row += [f"{float(spectrum.largest[-1]):.3g}", f"{trace:.3g} ± {error:.2g}"]
        rows.append(row)
    title = "Blocks of the Hessian by layer: largest eigenvalue, and trace ± one standard error"
    return "\n".join([title, "", *align(rows, left=1)])


def directions_table(directions: Sequence[Direction]) -> str:
    """The curvature along each direction, and where in the network it lies."""
    rows = [["direction", "curvature", *directions[0].shares]]
    for one in directions:
        rows.append(
            [one.name, f"{one.curvature:.3g}", *(f"{share:.0%}" for share in one.shares.values())]
        )
    title = (
        "Sharpest directions: curvature of the loss, and each layer's share of the squared length"
    )
    return "\n".join([title, "", *align(rows, left=1)])


def perplexity_table(columns: dict[str, Tensor], steps: Sequence[int], title: str) -> str:
    """Perplexity after each number of gradient steps, one column a method.

    Args:
        columns: Losses [len(steps), tasks] by method, of which the last is that of the language model
            itself: changes are relative to its perplexity before its first step.
        steps: Numbers of gradient steps.
        title: Title of the table.
    Returns:
        The table.
    """
    before = [*columns.values()][-1][0]
    rows = [["gradient steps", *(cell for name in columns for cell in (name, "change"))]]
    for i, count in enumerate(steps):
        row = [str(count)]
        for losses in columns.values():
            mean, half = mean_and_interval((losses[i] - before).double())
            row += [
                f"{exp(losses[i].mean()):.2f}",
                f"{exp(mean) - 1:+.1%} ± {exp(mean) * half:.1%}",
            ]
        rows.append(row)
    note = (
        f"change: of the perplexity, from that of the language model after {steps[0]} steps; mean over "
        "tasks ± 95% interval."
    )
    return "\n".join([title, "", *align(rows), "", note])
