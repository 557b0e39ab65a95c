"""The table of potentials: errors of energies and forces."""

from typing import NamedTuple

from torch import Tensor

from experiments.shared.layout import number, table


class Errors(NamedTuple):
    """Errors of each cluster [n]: of the energy by atom, and the mean over components of forces."""

    energy: Tensor
    force: Tensor


def forces_table(rows: dict[str, Errors], atoms: int, clusters: int) -> str:
    """Errors by what a potential was trained on, and the gain over the first.

    Args:
        rows: Errors on the same held-out clusters by label; the last row is the error without training.
        atoms: Atoms of a cluster.
        clusters: Number of training clusters.
    Returns:
        The table.
    """
    cells = [["trained on", "energy error", "of it", "force error", "of it"]]
    first, *_, last = rows
    for label, errors in rows.items():
        row = [label]
        for error, untrained in zip(errors, rows[last], strict=True):
            row += [number(error), f"{error.mean() / untrained.mean():.1%}"]
        cells.append(row)
    for label in [*rows][1:-1]:
        row = [f"{label}: gain"]
        for error, of_first in zip(rows[label], rows[first], strict=True):
            row += [number(of_first.double() - error.double()), ""]
        cells.append(row)
    count = len(rows[first].energy)
    return table(
        f"Errors on {count} held-out clusters of {atoms} atoms, after training on {clusters}; mean ± "
        "95% interval",
        cells,
        "energy error: |difference| by atom; force error: the mean |difference| of a component; of it: "
        f"of that of {last}; gain: over {first}, cluster by cluster.",
    )
