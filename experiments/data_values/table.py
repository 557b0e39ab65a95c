"""The table of values of training examples, and what it is computed from."""

from math import nan
from typing import NamedTuple

from torch import Tensor

from experiments.shared.layout import percentage, table
from hoglib.meta import LeaveKOut


class Scored(NamedTuple):
    """Training examples that several methods have scored.

    Attributes:
        harm: By method, a number for each example [n]: the larger, the more harmful.
        wrong: Which labels are wrong [n].
        check: Predicted and actual changes of the clean loss without random subsets.
        correct: Which test examples the network classifies correctly.
        without: The same for networks trained without the most harmful examples of each method.
    """

    harm: dict[str, Tensor]
    wrong: Tensor
    check: LeaveKOut
    correct: Tensor
    without: dict[str, Tensor]


class Curve(NamedTuple):
    """Precision and recall [n] of the k most harmful examples as wrong labels, k = 1, ..., n."""

    precision: Tensor
    recall: Tensor

    @property
    def average(self) -> float:
        """The average precision: the mean of the precision at each wrong label that is found."""
        found = self.recall.diff(prepend=self.recall.new_zeros(1))
        return float((self.precision * found).sum()) if len(found) else nan


def precision_recall(harm: Tensor, wrong: Tensor) -> Curve:
    """The curve of a score [n] as a detector of the labels that are wrong, a mask [n]."""
    hits = wrong[harm.argsort(descending=True, stable=True)].double().cumsum(0)
    ranks = hits.new_ones(len(hits)).cumsum(0)
    return Curve(hits / ranks, hits / hits[-1])


def data_values_table(scored: Scored, noise: str) -> str:
    """How each method finds wrong labels, and what a training without what it found is worth."""
    count = int(scored.wrong.sum())
    rows = [["score", "precision", f"in first {count}", "accuracy without"]]
    for name, harm in scored.harm.items():
        curve = precision_recall(harm.cpu(), scored.wrong.cpu())
        found = f"{float(curve.precision[count - 1]):.0%}" if count else "-"
        average = f"{curve.average:.3f}" if count else "-"
        rows.append([name, average, found, percentage(scored.without[name].cpu())])
    right = percentage(scored.correct.cpu())
    return table(
        f"Wrong labels found by three scores; {noise}",
        rows,
        "precision: average precision; accuracy without: of a network trained without the first "
        f"{count}; of the network itself on {len(scored.correct)} held-out digits, ± 95% interval: "
        f"{right}.",
        f"Prediction by the gradient: {scored.check}",
    )
