"""Tables of one property as one case, which runs every row and fails with all rows that do.

A case costs time of its own, whatever it tests, so a table is parametrized where its rows are worth one: by op,
by model, by example of seconds.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import product
from typing import Any

import pytest
import torch

from hoglib._core.runtime import source_location
from hoglib.verification import entry_points


def as_in_a_new_process() -> None:
    torch.manual_seed(0)
    entry_points.forget_verdicts()
    source_location.forget_warned()


def each(every: Iterable[tuple[str, Mapping[str, Any]]], run: Callable[..., Any]) -> None:
    """Calls `run` with each row of (label, arguments), and raises what those that fail raise, together."""
    every, failed = list(every), []
    for label, row in every:
        as_in_a_new_process()
        try:
            run(**row)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            error.add_note(f"in the row {label}")
            failed.append((label, error))
    if failed:
        told = ", ".join(label for label, _ in failed)
        message = f"{len(failed)} of {len(every)} rows fail: {told}"
        raise BaseExceptionGroup(message, [error for _, error in failed])


def _label(value: Any) -> str:
    text = str(getattr(value, "__name__", value))
    return text if len(text) < 60 else f"{text[:60]}..."


def rows(
    names: str | Iterable[str], table: Iterable[Any], ids: Any = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize` with the same arguments, but in one case; several together cross their tables.

    Each row begins as a test does. Fixtures are made once, for all rows.
    """
    names = tuple(n.strip() for n in names.split(",")) if isinstance(names, str) else tuple(names)
    values = [row if len(names) > 1 else (row,) for row in table]
    given = None if ids is None or callable(ids) else list(ids)
    label = ids if callable(ids) else _label
    own = [
        (given[i] if given else "-".join(map(label, row)), dict(zip(names, row, strict=True)))
        for i, row in enumerate(values)
    ]
    assert own, f"rows: a table of {names} without rows"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        function, others = getattr(test, "_rows", (test, [("", {})]))
        every = [
            (f"{inner}-{outer}" if inner else str(outer), {**a, **b})
            for (inner, a), (outer, b) in product(others, own)
        ]

        @wraps(test)
        def case(**fixtures: Any) -> None:
            each(every, lambda **row: function(**fixtures, **row))

        left = inspect.signature(function)
        _, bound = every[0]
        case.__signature__ = left.replace(  # type: ignore[attr-defined]
            parameters=[p for name, p in left.parameters.items() if name not in bound]
        )
        case._rows = function, every  # type: ignore[attr-defined]
        return case

    return decorate
