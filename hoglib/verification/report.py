"""Reports: one row for each check, with a status, an error and a sentence."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite
from typing import Any, NamedTuple, final

from hoglib import plotting
from hoglib._core.messages import results
from hoglib.errors import ArgumentTypeError, VerificationError

STATUSES = ("pass", "fail", "warn", "skip")

# background colours of statuses in a notebook: tints of plotting.VERDICTS
COLOURS = {"pass": "#CCE3F0", "fail": "#F7DFCC", "warn": "#FAECCC", "skip": "#F3F3F3"}
WIDTH = 100  # characters in a line of text
CULPRIT = "culprit: "  # a row's name begins with this if `audit` blames a module
NOT_COMPARED = "nothing could be compared"
# Second derivatives take one level of reverse or forward mode over another.
MODES = {
    "rr": "reverse-over-reverse",
    "fr": "forward-over-reverse",
    "rf": "reverse-over-forward",
    "ff": "forward-over-forward",
}
ORDINALS = {1: "first", 2: "second", 3: "third", 4: "fourth"}


@results.result
class Row(NamedTuple):
    """One check of a report.

    Attributes:
        name: The check, such as "second derivative: reverse-over-reverse".
        status: "pass", "fail", "warn" or "skip".
        error: The relative error, for a check that compares numbers.
        text: The fault and its fix, or why the check was skipped.
    """

    name: str
    status: str
    error: float | None = None
    text: str = ""


Rows = Iterator[Row]


def finding(name: str, text: str, status: str = "fail") -> Row:
    """The row of a check that passes if there is no text."""
    return Row(name, status if text else "pass", None, text)


@results.result
@final
class Report:
    """The result of `hog.verify` and `hog.audit`: one row for each check.

    ``print(report)`` shows failures and warnings, then one line for each check. Iterate over the rows,
    count them by ``len``, or find one by name, as in ``report["vmap"]``.

    Args:
        name: The name of the checked function or loss.
        rows: The checks, each a :class:`Row`.
        judged: Whether any derivative could be compared. Default: read from the rows.
    Example:
        >>> report = hog.verify(torch.sin, torch.ones(3))
        >>> report.ok, report.judged
        (True, True)
        >>> report["first derivative: reverse"].status
        'pass'
        >>> report.raise_if_failed() is report
        True
    """

    def __init__(self, name: str, rows: Sequence[Row], *, judged: bool | None = None) -> None:
        self.name, self.rows, self._judged = name, tuple(rows), judged

    @property
    def ok(self) -> bool:
        """False exactly if a row failed."""
        return not self.failed

    @property
    def ran(self) -> bool:
        """Whether the function runs on its inputs at all."""
        return not any(row.name == "runs" for row in self.failed)

    @property
    def judged(self) -> bool:
        """Whether any derivative could be compared with anything.

        False at inputs on kinks only, outside of the domain, or so large that differences are rounding.
        """
        if self._judged is not None:
            return self._judged
        rows = [row for row in self.rows if " derivative: " in row.name and row.status != "skip"]
        # higher orders are compared with differences of the first, and judge nothing without it
        rows = [row for row in rows if row.name.startswith("first")] or rows
        return not rows or any(row.status != "warn" or row.error is not None for row in rows)

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows that failed."""
        return self._with_status("fail")

    @property
    def warnings(self) -> tuple[Row, ...]:
        """The rows that warn."""
        return self._with_status("warn")

    @property
    def culprits(self) -> tuple[str, ...]:
        """The names of the modules that `hog.audit` blames."""
        names = (row.name for row in self.failed if row.name.startswith(CULPRIT))
        return tuple(name.removeprefix(CULPRIT) for name in names)

    def _with_status(self, status: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.status == status)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        names = ", ".join(row.name for row in self.rows)
        raise KeyError(f"expected the name of a row, one of {names}; got {name!r}.")

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __bool__(self) -> bool:
        # otherwise `assert report` would pass for any report with rows
        text = "a report has no truth value; use report.ok or report.raise_if_failed()."
        raise ArgumentTypeError(text)

    def raise_if_failed(self) -> "Report":
        """Raise VerificationError, an AssertionError, if a row failed or no derivative was judged.

        Returns:
            This report, if it did not raise.
        """
        if not (self.ok and self.judged):
            raise VerificationError(str(self))
        return self

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON: name, ok, judged, counts by status, and the rows.

        Args:
            indent: As in ``json.dumps``.
        Returns:
            The text; an infinite or NaN error is null.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def to_dict(self) -> dict[str, Any]:
        """The content of `to_json` as a dict."""
        # JSON has no infinity and no NaN
        known = (row if isfinite(row.error or 0) else row._replace(error=None) for row in self.rows)
        return {
            "name": self.name,
            "ok": self.ok,
            "judged": self.judged,
            "counts": {status: len(self._with_status(status)) for status in STATUSES},
            "rows": [row._asdict() for row in known],
        }

    def plot(self, ax: object = None) -> Any:
        """Draw the relative error of each check that compares numbers, and the failures without one.

        Args:
            ax: Axes of matplotlib. Default: axes of a new figure of pyplot.
        Returns:
            The axes.
        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        return plotting.report(self, ax)

    def to_dataframe(self) -> Any:
        """The rows as a data frame; needs pandas."""
        return plotting.frame(row._asdict() for row in self.rows)

    def _repr_html_(self) -> str:
        """The report for notebooks: the rows as a table, with the status in colour."""
        lines = [
            f"<tr><td>{escape(row.name)}</td><td style='color: black; background: "
            f"{COLOURS[row.status]}'>{row.status}</td><td>{_error(row)}</td>"
            f"<td style='text-align: left; white-space: pre-wrap'>{escape(row.text)}</td></tr>"
            for row in self.rows
        ]
        return f"<b>{escape(self._headline())}</b><table>{''.join(lines)}</table>"

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(self._with_status(status))} {status}" for status in STATUSES)
        return f"Report({self.name}: {counts})"

    def text(self, *, table: bool = True, width: int = WIDTH) -> str:
        """A headline, a paragraph for each failure and warning, and one line for each check.

        Args:
            table: Whether to include the lines of all checks.
            width: The number of characters in a line.
        Returns:
            The text.
        """
        lines = [*textwrap.wrap(self._headline(), width), *self._sentences(width)]
        return "\n".join([*lines, "", *self._table(width)] if table else lines)

    __str__ = text

    def _headline(self) -> str:
        # rows on culprits explain other failures, and count as no checks of their own
        checks = [row for row in self.rows if not row.name.startswith(CULPRIT)]
        checked = sum(row.status != "skip" for row in checks)
        if not self.ran:
            return f"{self.name}: NOT RUN."
        if self.ok and not self.judged:
            return f"{self.name}: NOT JUDGED. None of its derivatives could be compared."
        unknown = [row.name for row in checks if NOT_COMPARED in row.text and row.status == "warn"]
        if self.ok and unknown:
            return (
                f"{self.name}: NOT JUDGED in full. Nothing is wrong by {checked} checks, but not all "
                f"of this could be compared: {', '.join(unknown)}."
            )
        if self.ok:
            known = len(self.warnings)
            also = f", with {known} warning{'s' * (known > 1)}" if known else ""
            return f"{self.name}: right, by {checked} checks{also}."
        wrong = sum(row.status == "fail" for row in checks)
        return f"{self.name}: WRONG, by {wrong} of {checked} checks."

    def _sentences(self, width: int) -> list[str]:
        lines = []
        names: dict[tuple[str, str], list[str]] = {}  # rows by (status, text)
        for row in (*self.failed, *self.warnings):
            names.setdefault((row.status, row.text), []).append(row.name)
        for (status, text), known in names.items():
            mark = "FAIL" if status == "fail" else status
            lines += ["", f"{mark}  {known[0]}", *(f"      {name}" for name in known[1:])]
            lines += _wrap_text(text, width)
        return lines

    def _table(self, width: int) -> list[str]:
        column = max((len(row.name) for row in self.rows), default=0)
        lines = [f"{'check':{column}}  status  error"]
        last = ""
        for row in self.rows:
            mark = "FAIL" if row.status == "fail" else row.status
            reason = row.text if row.status == "skip" else ""
            # a repeated reason is printed once
            reason, last = ("the same" if reason and reason == last else reason), reason
            start = f"{row.name:{column}}  {mark:6}  {_error(row):6}"
            first, *rest = textwrap.wrap(reason, max(width - len(start) - 2, 40)) or [""]
            lines.append(f"{start}  {first}".rstrip())
            lines += [" " * (len(start) + 2) + line for line in rest]
        return lines


def _error(row: Row) -> str:
    return "" if row.error is None else f"{row.error:.0e}"


def _wrap_text(text: str, width: int) -> list[str]:
    """Wrap each line to the width; indented lines, such as code, stay as they are."""
    lines = []
    for line in text.splitlines():
        if line.startswith("    "):
            lines.append("  " + line)
        else:
            parts = textwrap.wrap(line, width - 6, break_long_words=False) or [""]
            lines += ["      " + part for part in parts]
    return lines
