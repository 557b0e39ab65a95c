"""The table of `hoglib ops`: what the docstring of each op says of it."""

import re
from inspect import getdoc

from hoglib import ops

HEAD = ("op", "equation", "orders")
# By what a docstring says; of others the second derivative is 0, or follows a convention stated there.
_ORDERS = {
    "no derivative of any order": "none",
    "as many orders as derivatives were given": "as given",
    "to any order": "any",
}


def rows() -> list[tuple[str, str, str]]:
    """Each op by its name, the first line of its equations, and the orders of its derivatives."""
    return [(name, *_of_docstring(getdoc(getattr(ops, name)) or "")) for name in ops.__all__]


def _of_docstring(text: str) -> tuple[str, str]:
    body = text.split("\nArgs:")[0]
    equation = re.search(r"^    (.+)$", body, re.MULTILINE)
    assert equation is not None
    words = " ".join(body.split()).lower()
    orders = next((cell for said, cell in _ORDERS.items() if said in words), "first")
    return re.sub(r",? {2,}", "; ", equation[1].strip()), orders


def text(table: list[tuple[str, str, str]]) -> str:
    """The table in aligned columns, for a terminal or a log."""
    lines = [HEAD, *table]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    ruled = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([ruled[0], "-" * len(ruled[0]), *ruled[1:]])


def markdown(table: list[tuple[str, str, str]]) -> str:
    """The table for a page of the docs."""
    escaped = [[re.sub(r"([|\[])", r"\\\1", cell) for cell in line] for line in table]  # no links
    lines = [list(HEAD), ["---"] * len(HEAD), *escaped]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
