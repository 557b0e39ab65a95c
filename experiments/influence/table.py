"""The table of errors and of the training digits behind them, and what it is computed from."""

from typing import NamedTuple

import torch
from torch import Tensor

from experiments.shared.layout import percentage, table
from experiments.shared.noisy_digits import Examples


class Retrained(NamedTuple):
    """Trainings without the most harmful examples of each query.

    Attributes:
        predicted: Change of the loss of each query [q] that the scores predict.
        actual: Its change.
        right: Whether it is classified correctly afterwards.
    """

    predicted: Tensor
    actual: Tensor
    right: Tensor

    @property
    def correlation(self) -> float:
        """Of predicted and actual changes."""
        return float(torch.corrcoef(torch.stack([self.predicted, self.actual]))[0, 1])


class Errors(NamedTuple):
    """Test examples that were classified wrongly, and scores of the training examples.

    Attributes:
        train: The training examples.
        queries: The test examples.
        predicted: What the network took them for.
        harm: By method the scores [train, queries]; the first two are in units of the loss.
        checks: By method what trainings without the most harmful ones gave.
        leave_out: How many were left out.
    """

    train: Examples
    queries: Examples
    predicted: Tensor
    harm: dict[str, Tensor]
    checks: dict[str, Retrained]
    leave_out: int


def influence_table(errors: Errors, title: str) -> str:
    """What each method's most harmful digits are, and what a training without them gives."""
    mislabelled = errors.train.label != errors.train.truth
    share = float(mislabelled.float().mean())
    rows = [["left out", "now right", "change", "correlation", "wrong"]]
    for name, harm in errors.harm.items():
        check = errors.checks[name]
        worst = harm.topk(min(errors.leave_out, len(harm) - 1), dim=0).indices
        scaled = [*errors.harm].index(name) < 2
        row = [name, percentage(check.right.cpu()), f"{float(check.actual.mean()):+.2f}"]
        row += [f"{check.correlation:.2f}" if scaled else "-"]
        rows.append([*row, f"{float(mislabelled[worst].float().mean()):.0%}"])
    return table(
        f"Training again without {errors.leave_out} digits for each error; {title}",
        rows,
        "now right: of the errors, ± 95% interval; change: of the loss of the test digit, the mean; "
        "correlation: of predicted and actual changes; wrong: mislabelled of the digits left out; of "
        f"all training digits {share:.0%} are.",
    )
