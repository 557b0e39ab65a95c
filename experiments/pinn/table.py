"""The table of networks for an equation: errors of the solution and its residual."""

from math import nan

from experiments.logs import Points
from experiments.shared.layout import align


def pinn_table(
    title: str, curves: dict[str, Points], ends: dict[str, tuple[str, float, float, float]]
) -> str:
    """Optimizers beside each other.

    Args:
        title: The equation.
        curves: (step, value) of gradients and seconds, with the name of an optimizer after a slash.
        ends: Label, relative error, largest error and residual of each.
    Returns:
        The table.
    """
    rows = [["optimizer", "error", "largest", "residual", "gradients", "seconds"]]
    for name, (label, *numbers) in ends.items():
        spent = [
            curves.get(f"{what}/{name}", [(0, nan)])[-1][1] for what in ("gradients", "seconds")
        ]
        row = [label, *(f"{x:.1e}" for x in numbers), f"{spent[0]:.0f}", f"{spent[1]:.1f}"]
        rows.append(["-" if cell == "nan" else cell for cell in row])
    return "\n".join(
        [
            f"Errors of {title} on a grid of 101 x 101 points",
            "",
            *align(rows, left=1),
            "",
            "error: |u - exact| / |exact|; largest: of |u - exact|; residual: root mean square of\n"
            "L u - f, in units of that of f if it is not 0; gradients: the cost, in gradients of a\n"
            "batch; seconds: after the warm-up.",
        ]
    )
