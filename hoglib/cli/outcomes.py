"""What the commands print of their reports, and the status that they exit with."""

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from hoglib._core.source_location import error_text
from hoglib._version import __version__
from hoglib.verification.report import Report

RIGHT, WRONG, NOT_RUN = 0, 1, 2


class Outcomes:
    """Reports as they come, each printed at once; what could not be run; and what follows of them all.

    few: whether a report that is right is printed with its table.
    """

    def __init__(self, seed: int, *, as_json: bool = False, few: bool = True) -> None:
        self.seed, self.as_json, self.few = seed, as_json, few
        self.reports: list[Report] = []
        self.failures: list[tuple[str, str]] = []

    def judge(self, label: str, doing: str, judged: Callable[[], Report]) -> None:
        """A report under its label, with the seed set before it is made; or why there is none."""
        torch.manual_seed(self.seed)
        announce(f"{doing} {label} ...")
        try:
            # what the user's code prints it would print a hundred times
            with contextlib.redirect_stdout(io.StringIO()):
                report = judged()
        except (Exception, SystemExit) as error:
            announce("")
            self.failed(label, error_text(error))
            return
        announce("")
        report.name = label
        self.reports.append(report)
        if not self.as_json:
            width = min(100, max(60, shutil.get_terminal_size((100, 24)).columns))
            text = report.text(table=self.few or not report.ok, width=width)
            print(text + "\n", flush=True)

    def failed(self, label: str, why: str) -> None:
        self.failures.append((label, why))
        complain(f"{label}: {why}")

    @property
    def status(self) -> int:
        if any(report.ran and not report.ok for report in self.reports):
            return WRONG
        unclear = any(not (report.ran and report.judged) for report in self.reports)
        return NOT_RUN if unclear or self.failures or not self.reports else RIGHT

    def summary(self) -> str:
        wrong = [report.name for report in self.reports if report.ran and not report.ok]
        unknown = [report.name for report in self.reports if report.ok and not report.judged]
        not_run = [
            *(report.name for report in self.reports if not report.ran),
            *(name for name, _ in self.failures),
        ]
        right = sum(report.ok and report.judged for report in self.reports)
        parts = [f"{right} right"]
        if wrong:
            parts.append(f"{len(wrong)} WRONG ({', '.join(wrong)})")
        if unknown:
            parts.append(f"{len(unknown)} not judged ({', '.join(unknown)})")
        if not_run:
            parts.append(f"{len(not_run)} not run ({', '.join(not_run)})")
        return ", ".join(parts)

    def conclude(self, note: str = "", **more: object) -> int:
        """Prints the JSON, or a line on several reports and the note; returns the status."""
        if self.as_json:
            print(self.json(**more))
        elif note or len(self.reports) + len(self.failures) > 1:
            print(self.summary() + note)
        return self.status

    def json(self, **more: object) -> str:
        return json.dumps(
            {
                "ok": self.status == RIGHT,
                "reports": [report.to_dict() for report in self.reports],
                "not_run": [{"name": name, "error": error} for name, error in self.failures],
                **more,
                "seed": self.seed,
                "hoglib": __version__,
                "torch": torch.__version__,
            },
            indent=2,
        )


def stdout_for(as_json: bool) -> AbstractContextManager:
    """What the user's code prints must not stand in the JSON."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def complain(why: object) -> None:
    print(f"error: {why}", file=sys.stderr)


def announce(text: str) -> None:
    """A line for who waits at a terminal, until the next one."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
