"""What `make test` leaves to `make test-full`: cases of a parametrized test that fail together with
others, and runs of minutes whose parts are tested by themselves."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

FULL = pytest.mark.full


def all_but(kept: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """The cases, each a value or a tuple of values, of which those that are not kept are marked."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if kept(*values) else pytest.param(*values, marks=FULL))
    return found


def only(*names: Any) -> Callable[[Any], bool]:
    """Keeps the cases of these names."""
    return lambda name: name in names
