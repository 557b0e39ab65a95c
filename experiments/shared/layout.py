"""Columns of text, and numbers with their intervals."""

from collections.abc import Callable, Hashable, Sequence
from math import sqrt
from typing import TypeVar

from torch import Tensor

Row = TypeVar("Row")


def align(rows: list[list[str]], left: int = 0) -> list[str]:
    """Lines of right-aligned columns under a ruled head; the first `left` columns are left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def mean_and_interval(values: Tensor) -> tuple[float, float]:
    """The mean of values [n], and half of its 95% interval, 1.96 s / sqrt(n)."""
    return values.mean().item(), 1.96 * values.std().item() / sqrt(len(values))


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean of independent values [n], and its standard error s / sqrt(n)."""
    return values.mean().item(), values.std().item() / sqrt(len(values))


def number(values: Tensor) -> str:
    """The mean of values [n] with its 95% interval, as text."""
    mean, half = mean_and_interval(values.double())
    return f"{mean:.4f} ± {half:.4f}"


def percentage(values: Tensor) -> str:
    """The mean of values [n] with its 95% interval, as percentages, with the population's s."""
    values = values.double()
    half = 1.96 * values.std(correction=0).item() / sqrt(len(values))
    return f"{values.mean().item():.1%} ± {half:.1%}"


def newest_of_each(rows: Sequence[Row], kind: Callable[[Row], Hashable]) -> list[Row]:
    """Of rows sorted from the newest, the first of each kind."""
    kept: dict[Hashable, Row] = {}
    for row in rows:
        kept.setdefault(kind(row), row)
    return [*kept.values()]
