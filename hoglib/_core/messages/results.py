"""Classes of results: `torch.load` reads them back, and a notebook shows them as tables."""

from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, TypeVar

import torch

from hoglib._core.messages import validation

T = TypeVar("T")


def result(kind: type[T]) -> type[T]:
    """A class decorator for results, NamedTuples or dataclasses.

    By default `torch.load` refuses unregistered classes. Loading a registered result runs no code:
    pickle makes the object from its fields.
    """
    torch.serialization.add_safe_globals([kind])
    if not hasattr(kind, "_repr_html_"):
        kind._repr_html_ = _as_table  # type: ignore[attr-defined]
    return kind


def _as_table(self: Any) -> str:
    """The result for notebooks: its name above a table of its fields."""
    names = [one.name for one in fields(self)] if is_dataclass(self) else self._fields
    rows = [
        f"<tr><td>{name}</td><td style='text-align: left'>"
        f"{escape(validation.shortened(getattr(self, name)))}</td></tr>"
        for name in names
    ]
    return f"<b>{type(self).__name__}</b><table>{''.join(rows)}</table>"
