"""Tables of language models: spectra by layer, sharp directions, and perplexity after adaptation."""

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

from torch import Tensor

from experiments.shared.layout import mean_and_interval, table
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
    rows = [["layer", "parameters", "step", "largest", "trace"]]
    for one in sorted(history, key=lambda one: [x.name for x in history].index(one.name)):
        if one.batch in (history[0].batch, history[-1].batch):
            spectrum, (trace, error) = one.spectrum, one.spectrum.trace
            row = [one.name, f"{spectrum.size:,}", f"{one.batch:,}"]
            rows.append([*row, f"{float(spectrum.largest[-1]):.3g}", f"{trace:.3g} ± {error:.2g}"])
    title = "Blocks of the Hessian by layer: largest eigenvalue, and trace ± one standard error"
    return table(title, rows)


def directions_table(directions: Sequence[Direction]) -> str:
    """The curvature along each direction, and where in the network it lies."""
    rows = [["direction", "curvature", *directions[0].shares]]
    for one in directions:
        shares = [f"{share:.0%}" for share in one.shares.values()]
        rows.append([one.name, f"{one.curvature:.3g}", *shares])
    title = (
        "Sharpest directions: curvature of the loss, and each layer's share of the squared length"
    )
    return table(title, rows)


def perplexity_table(columns: dict[str, Tensor], steps: Sequence[int], title: str) -> str:
    """Perplexity by method and number of gradient steps.

    Args:
        columns: Losses [len(steps), tasks] by method, of which the last is that of the language model
            itself: changes are relative to its perplexity before its first step.
        steps: Numbers of gradient steps.
        title: Title of the table.
    Returns:
        The table.
    """
    before = [*columns.values()][-1][0]
    rows = [["method", "steps", "perplexity", "change"]]
    for name, losses in columns.items():
        for count, row in zip(steps, losses, strict=True):
            mean, half = mean_and_interval((row - before).double())
            change = f"{exp(mean) - 1:+.1%} ± {exp(mean) * half:.1%}"
            rows.append([name, str(count), f"{exp(row.mean()):.2f}", change])
    return table(
        title,
        rows,
        f"change: of the perplexity, from that of the language model after {steps[0]} steps; mean over "
        "tasks ± 95% interval.",
    )
