"""Tables of text that fit a terminal, and numbers with their intervals."""

import textwrap
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import sqrt
from typing import TypeVar

from torch import Tensor

WIDTH = 80  # columns of a terminal
LABEL = 16  # characters that the first column keeps, however wide the others are

Row = TypeVar("Row")


def table(title: str, rows: list[list[str]], *notes: str, left: int = 1) -> str:
    """A title, right-aligned columns under a ruled head, and notes, all within WIDTH.

    Args:
        title: Title.
        rows: Rows of cells, the head first. A first cell that is too wide goes on in the next line;
            columns that do not fit beside the others follow below, with the left-aligned ones again.
        notes: Paragraphs below.
        left: How many columns are left-aligned.
    Returns:
        The table.
    """
    room = WIDTH - sum(2 + width for width in _widths(rows)[1:])
    broken = [line for row in rows for line in _broken(row, max(room, LABEL))]
    columns = ["\n".join(_aligned(part, left)) for part in _side_by_side(broken, max(left, 1))]
    paragraphs = (textwrap.fill(note, WIDTH) for note in notes)
    return "\n\n".join([textwrap.fill(title, WIDTH), *columns, *paragraphs])


def _widths(rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _broken(row: list[str], room: int) -> Iterator[list[str]]:
    """A row as lines, whose first cells have at most so many characters."""
    first, *more = textwrap.wrap(row[0], room) or [""]
    yield [first, *row[1:]]
    for part in more:
        yield [part, *[""] * (len(row) - 1)]


def _side_by_side(rows: list[list[str]], kept: int) -> list[list[list[str]]]:
    """The rows as tables within WIDTH, each with the first `kept` columns and some of the others."""
    widths = [2 + width for width in _widths(rows)]
    parts: list[list[int]] = [[]]
    for column in range(kept, len(widths)):
        if parts[-1] and sum(widths[i] for i in (*range(kept), *parts[-1], column)) > WIDTH + 2:
            parts.append([])
        parts[-1].append(column)
    return [[[*row[:kept], *(row[i] for i in part)] for row in rows] for part in parts]


def _aligned(rows: list[list[str]], left: int) -> list[str]:
    widths = _widths(rows)
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
    mean, error = mean_and_error(values)
    return mean, 1.96 * error


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
