"""The table of optimizers of an autoencoder."""

from math import nan

from experiments.logs import Points
from experiments.shared.layout import table
from experiments.shared.race import LABELS, spent


def race_table(curves: dict[str, Points], errors: dict[str, float]) -> str:
    """Optimizers beside each other.

    Args:
        curves: (step, value) of train, val, gradients and seconds, each with the name of an optimizer
            after a slash.
        errors: Final held-out error of each optimizer.
    Returns:
        The table.
    """
    rows = [["optimizer", "held out", "best", "training", "gradients", "seconds"]]
    for name, error in errors.items():
        best = min([error, *(value for _, value in curves.get(f"val/{name}", []))])
        training = curves.get(f"train/{name}", [(0, nan)])[-1][1]
        cells = ["-" if x != x else f"{x:.4f}" for x in (error, best, training)]
        rows.append([LABELS[name], *cells, *spent(curves, name)])
    return table(
        "Squared error of an image, pixels from 0 to 1",
        rows,
        "best: the lowest on the way, by these same held-out images, which flatters; gradients: what "
        "the run cost, in gradients of the whole training set.",
    )
