"""Tables of classifiers of digits: trained on wrong labels, and attacked."""

from collections.abc import Sequence
from math import nan
from typing import NamedTuple

from torch import Tensor

from experiments.logs import Points
from experiments.shared.layout import align, percentage


class Detection(NamedTuple):
    """Learned weights as a detector of wrong labels.

    Attributes:
        right: Mean weight of examples with right labels.
        wrong: Mean weight of examples with wrong labels.
        auc: Probability that of a wrong and a right label, each drawn at random, the wrong one has the
            lower weight (the area under the ROC curve); NaN where there are none of a kind.
    """

    right: float
    wrong: float
    auc: float


def detect_wrong_labels(weights: Tensor, wrong: Tensor) -> Detection:
    """The detection by weights [n] of the labels that are wrong, a mask [n]."""
    of_right, of_wrong = weights[~wrong].double(), weights[wrong].double()
    # all pairs of a wrong and a right label: their mean is the area under the ROC curve
    lower = of_wrong[:, None] < of_right
    equal = of_wrong[:, None] == of_right
    auc = (lower + 0.5 * equal).mean().item() if lower.numel() else nan
    return Detection(of_right.mean().item(), of_wrong.mean().item(), auc)


def reweighting_table(
    correct: dict[str, Tensor], curves: dict[str, Points], detection: Detection, noise: str
) -> str:
    """Accuracy of each network, and the weights of the first.

    Args:
        correct: Which test examples [n] each network classifies correctly.
        curves: (step, accuracy) during training.
        detection: What the learned weights say of wrong labels.
        noise: The wrong labels in words.
    Returns:
        The table.
    """
    rows = [["trained on", "accuracy", "behind", "best", "right labels", "wrong labels", "AUC"]]
    first, *_ = correct.values()
    for label, flags in correct.items():
        best = max((value for _, value in curves.get(label, [])), default=nan)
        row = [label, percentage(flags), "", f"{best:.1%}", "", "", ""]
        if flags is first:
            row[4:] = [f"{value:.2f}" for value in detection]
        else:
            row[2] = percentage(first.double() - flags.double())
        # where there are no wrong labels there is nothing to detect
        rows.append(["-" if "nan" in cell else cell for cell in row])
    return "\n".join(
        [
            f"Accuracy on {len(first)} held-out digits, ± 95% interval; {noise}",
            "",
            *align(rows, left=1),
            "",
            "behind: the first, digit by digit; best: the highest on the way, by these same digits, "
            "which flatters;\nright, wrong labels: mean weight, 1 in plain training; AUC: of the "
            "weights as a detector of wrong labels.",
        ]
    )


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
    lines = [
        f"Accuracy on {count} held-out digits by the bound of the attack (white to black is 1), "
        "± 95% interval",
        "",
        *align(rows, left=2),
        "",
        f"gain: over {first}, digit by digit.",
    ]
    if tried:
        choice = [["penalty", "weight", "area", ""]]
        for penalty, weight, area, chosen in tried:
            choice.append([penalty, f"{weight:g}", f"{area:.1%}", "<- chosen" if chosen else ""])
        lines += [
            "",
            *align(choice, left=1),
            "",
            f"area: accuracy under PGD on {validation} other digits, the mean over the bounds.",
        ]
    return "\n".join(lines)
