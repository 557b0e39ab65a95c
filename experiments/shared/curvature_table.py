"""Tables of curvature: the Hessian's spectrum during training, and NewtonCG beside Adam."""

from collections.abc import Sequence
from math import nan

from experiments.logs import Points
from experiments.shared.layout import align
from hoglib.lightning import Measurement

MOST_ROWS = 13


def spectrum_table(
    history: Sequence[Measurement],
    losses: dict[int, float],
    accuracies: dict[int, float],
    title: str,
) -> str:
    """Evenly spaced measurements of a fit, with training loss and test accuracy by step."""
    rows = [["step", "train loss", "test accuracy", "largest", "smallest", "trace"]]
    gaps = max(1, min(len(history), MOST_ROWS) - 1)
    # evenly spaced, the first and the last among them
    picks = sorted({round(i * (len(history) - 1) / gaps) for i in range(gaps + 1)})
    for measurement in (history[pick] for pick in picks):
        spectrum = measurement.spectrum
        trace, error = spectrum.trace
        loss, accuracy = losses.get(measurement.batch), accuracies.get(measurement.batch)
        rows.append(
            [
                str(measurement.batch),
                "-" if loss is None else f"{loss:.4f}",
                "-" if accuracy is None else f"{accuracy:.1%}",
                f"{float(spectrum.largest[-1]):.2f}",
                f"{float(spectrum.smallest[0]):.3f}",
                f"{trace:.1f} ± {error:.1f}",
            ]
        )
    note = "largest, smallest: eigenvalues of the Hessian; trace: estimate ± one standard error."
    return "\n".join([title, "", *align(rows), "", note])


def race_table(curves: dict[str, Points], ends: dict[str, tuple[str, float]]) -> str:
    """Optimizers beside each other.

    Args:
        curves: (step, value) of train, val, gradients and seconds, each with the name of an optimizer
            after a slash.
        ends: Label and final held-out error of each optimizer.
    Returns:
        The table.
    """

    def last(key: str) -> float:
        return curves[key][-1][1] if key in curves else nan

    rows = [["optimizer", "held out", "best", "training", "gradients", "seconds"]]
    for name, (label, error) in ends.items():
        best = min([error, *(value for _, value in curves.get(f"val/{name}", []))])
        row = [label, f"{error:.4f}", f"{best:.4f}", f"{last(f'train/{name}'):.4f}"]
        row += [f"{last(f'gradients/{name}'):.0f}", f"{last(f'seconds/{name}'):.1f}"]
        rows.append(["-" if cell == "nan" else cell for cell in row])
    return "\n".join(
        [
            "Squared error of an image, pixels from 0 to 1",
            "",
            *align(rows, left=1),
            "",
            "best: the lowest on the way, by these same held-out images, which flatters;\n"
            "gradients: what the run cost, in gradients of the whole training set.",
        ]
    )
