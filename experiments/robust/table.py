"""The table of classifiers under attack."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from experiments.shared.layout import percentage, table


class Tried(NamedTuple):
    """A penalty with a weight, its area on the validation images, and whether it was chosen."""

    penalty: str
    weight: float
    area: float
    chosen: bool


def robustness_table(
    epsilons: Sequence[float],
    correct: dict[str, dict[str, Tensor]],
    tried: Sequence[Tried],
    validation: int,
) -> str:
    """Accuracy of networks under attacks, and their gain over the first; the weights that were tried.

    Args:
        epsilons: Bounds of the attacks.
        correct: By network and attack, which test images are classified correctly [epsilons, n].
        tried: All penalties and weights.
        validation: Number of images by which weights were chosen.
    Returns:
        The table.
    """
    rows = [["", "attack", *(f"{e:g}" for e in epsilons)]]
    first, *others = correct
    for label, by_attack in correct.items():
        for attack, flags in by_attack.items():
            rows.append([label, attack, *map(percentage, flags)])
    for label in others:
        for attack, flags in correct[label].items():
            # by the same digits, so that what is hard for both cancels from the interval
            gains = flags.double() - correct[first][attack].double()
            rows.append([f"{label}: gain", attack, *map(percentage, gains)])
    count = next(iter(correct[first].values())).shape[1]
    found = table(
        f"Accuracy on {count} held-out digits by the bound of the attack (white to black is 1), "
        "± 95% interval",
        rows,
        f"gain: over {first}, digit by digit.",
        left=2,
    )
    if not tried:
        return found
    choice = [["penalty", "weight", "area", ""]]
    for penalty, weight, area, chosen in tried:
        choice.append([penalty, f"{weight:g}", f"{area:.1%}", "<- chosen" if chosen else ""])
    title = f"Area: accuracy under PGD on {validation} other digits, the mean over the bounds."
    return f"{found}\n\n{table(title, choice)}"
