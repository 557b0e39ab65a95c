"""The table of the Hessian's spectrum during training."""

from collections.abc import Sequence

from experiments.shared.layout import table
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
        row = [str(measurement.batch), "-" if loss is None else f"{loss:.4f}"]
        row += ["-" if accuracy is None else f"{accuracy:.1%}"]
        row += [f"{float(spectrum.largest[-1]):.2f}", f"{float(spectrum.smallest[0]):.3f}"]
        rows.append([*row, f"{trace:.1f} ± {error:.1f}"])
    note = "largest, smallest: eigenvalues of the Hessian; trace ± one standard error."
    return table(title, rows, note, left=0)
