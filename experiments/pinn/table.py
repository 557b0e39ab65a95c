"""The table of networks for an equation: errors of the solution and its residual."""

from experiments.logs import Points
from experiments.shared.layout import table
from experiments.shared.race import LABELS, spent


def pinn_table(
    title: str, curves: dict[str, Points], ends: dict[str, tuple[float, float, float]]
) -> str:
    """Optimizers beside each other.

    Args:
        title: The equation.
        curves: (step, value) of gradients and seconds, with the name of an optimizer after a slash.
        ends: Relative error, largest error and residual of each.
    Returns:
        The table.
    """
    rows = [["optimizer", "error", "largest", "residual", "gradients", "seconds"]]
    for name, numbers in ends.items():
        rows.append([LABELS[name], *(f"{x:.1e}" for x in numbers), *spent(curves, name)])
    return table(
        f"Errors of {title} on a grid of 101 x 101 points",
        rows,
        "error: |u - exact| / |exact|; largest: of |u - exact|; residual: root mean square of L u - f, "
        "in units of that of f if it is not 0; gradients: the cost, in gradients of a batch; seconds: "
        "after the warm-up.",
    )
