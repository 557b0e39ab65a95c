"""Tables of few-shot learners: regression of sinusoids, and classification of images."""

from collections.abc import Sequence
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.shared.layout import mean_and_interval, newest_of_each, table

# A larger error is that of a diverged gradient descent: predicting zero costs at most 12.5 on average
# (amplitude 5).
DIVERGED = 100.0
NAMES = {"maml": "MAML", "reptile": "Reptile", "imaml": "iMAML", "prototypes": "prototypes"}


def sinusoid_table(columns: dict[str, Tensor], steps: Sequence[int]) -> str:
    """Query errors after each number of gradient steps, one column a method.

    Args:
        columns: Errors [len(steps), tasks] by method.
        steps: Numbers of gradient steps.
    Returns:
        The table.
    """
    tasks = next(iter(columns.values())).shape[1]
    rows = [["gradient steps", *(cell for label in columns for cell in (label, "diverged"))]]
    for i, count in enumerate(steps):
        row = [str(count)]
        for errors in columns.values():
            mean, interval, diverged = summarize_errors(errors[i])
            row += [f"{mean:.3f} ± {interval:.3f}", str(diverged)]
        rows.append(row)
    title = f"Query MSE on {tasks} held-out tasks, mean ± 95% interval"
    note = (
        f"diverged: tasks with an error that is not finite or over {DIVERGED:.0f}; not in the mean."
    )
    return table(title, rows, note, left=0)


class ErrorSummary(NamedTuple):
    """Mean and half of its 95% interval over the tasks that did not diverge; the number that did."""

    mean: float
    interval: float
    diverged: int


def summarize_errors(errors: Tensor) -> ErrorSummary:
    """mean ± 1.96 s / sqrt(n) over the errors that are finite and at most DIVERGED."""
    kept = errors[torch.isfinite(errors) & (errors <= DIVERGED)].double()
    mean, interval = mean_and_interval(kept) if len(kept) > 1 else (kept.mean().item(), nan)
    return ErrorSummary(mean, interval, len(errors) - len(kept))


class LearnerResult(NamedTuple):
    """A row of the table of few-shot classifiers; the fields are those of summary.json."""

    method: str
    accuracy: float
    interval: float
    parameters: int
    steps: int


def classification_table(
    own: LearnerResult,
    others: Sequence[LearnerResult],
    pixels: LearnerResult,
    title: str,
    tasks: int,
) -> str:
    """A run, the newest run of each other method on the same tasks, and a comparison of pixels."""
    # this run first, so that it stands for its method
    results = newest_of_each([own, *others], lambda r: r.method)
    rows = [["method", "accuracy", "parameters", "meta-steps", ""]]
    for r in [*sorted(results, key=lambda r: -r.accuracy), pixels]:
        size, steps = (f"{r.parameters:,}", f"{r.steps:,}") if r.steps else ("", "")
        here = "<- this run" if r is own else ""
        rows.append([r.method, f"{r.accuracy:.1%} ± {r.interval:.1%}", size, steps, here])
    head = f"Accuracy on {tasks} held-out tasks, {title}, mean ± 95% interval"
    return table(head, rows)


def describe_learner(algorithm: str, options: dict[str, Any]) -> str:
    """A learner in a few words: its name, and the options that it was given."""
    words = [NAMES[algorithm]]
    for name, value in options.items():
        if isinstance(value, bool):
            words += [name.replace("_", " ")] if value else []
        # a bool is an int, and is taken above
        elif isinstance(value, int | float) and name.startswith("inner_"):
            words.append(f"{name.removeprefix('inner_')} {value:g}")
        else:
            words.append(f"{name} {value}")
    return ", ".join(words)
