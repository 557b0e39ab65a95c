"""The table of training on wrong labels, and the weights that were learned."""

from math import nan
from typing import NamedTuple

from torch import Tensor

from experiments.logs import Points
from experiments.shared.layout import percentage, table


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
    rows = [["trained on", "accuracy", "behind", "best"]]
    first, *_ = correct.values()
    for label, flags in correct.items():
        best = max((value for _, value in curves.get(label, [])), default=nan)
        behind = "" if flags is first else percentage(first.double() - flags.double())
        rows.append([label, percentage(flags), behind, "-" if best != best else f"{best:.1%}"])
    # where there are no wrong labels there is nothing to detect
    right, wrong, auc = ("-" if x != x else f"{x:.2f}" for x in detection)
    return table(
        f"Accuracy on {len(first)} held-out digits, ± 95% interval; {noise}",
        rows,
        "behind: the first, digit by digit; best: the highest on the way, by these same digits, which "
        "flatters.",
        f"Mean learned weight, 1 in plain training: right labels {right}, wrong labels {wrong}; AUC of "
        f"the weights as a detector of wrong labels: {auc}.",
    )
