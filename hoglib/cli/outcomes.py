"""The output of a command about its reports, and the exit status."""

import contextlib
import json
import shutil
import sys
from contextlib import AbstractContextManager
from typing import final

import torch

from hoglib._version import __version__
from hoglib.cli.isolation import News
from hoglib.verification.report import Report

RIGHT, WRONG, NOT_RUN = 0, 1, 2  # exit statuses


@final
class Outcomes:
    """Collects reports and failed runs. Prints each at once, and a conclusion at the end.

    show_tables: print the table of checks for correct reports, too.
    """

    def __init__(self, seed: int, *, as_json: bool = False, show_tables: bool = True) -> None:
        self.seed, self.as_json, self.show_tables = seed, as_json, show_tables
        self.reports: list[Report] = []
        self.failures: list[tuple[str, str]] = []  # (label, reason) of checks without a report

    def take(self, found: News, doing: str) -> None:
        """Print a report, or the reason why there is none."""
        # a check has begun: the next message overwrites this line
        if found.report is None and not found.why:
            _show_progress(f"{doing} {found.label} ...")
            return
        _show_progress("")
        if found.report is None:
            self.failures.append((found.label, found.why))
            print_error(f"{found.label}: {found.why}")
            return
        report = found.report
        report.name = found.label
        self.reports.append(report)
        if not self.as_json:
            # a readable width, also in a wide terminal
            width = min(100, max(60, shutil.get_terminal_size((100, 24)).columns))
            text = report.text(table=self.show_tables or not report.ok, width=width)
            print(text + "\n", flush=True)

    @property
    def status(self) -> int:
        """The exit status."""
        if any(report.ran and not report.ok for report in self.reports):
            return WRONG
        # a loss that could not be judged does not count as right
        unclear = any(not (report.ran and report.judged) for report in self.reports)
        return NOT_RUN if unclear or self.failures or not self.reports else RIGHT

    def conclude(self, note: str = "", **more: object) -> int:
        """Print the JSON, or one line about several reports with the note; return the exit status."""
        if self.as_json:
            found = {
                "ok": self.status == RIGHT,
                "reports": [report.to_dict() for report in self.reports],
                "not_run": [{"name": name, "error": error} for name, error in self.failures],
                **more,
                "seed": self.seed,
                "hoglib": __version__,
                "torch": torch.__version__,
            }
            print(json.dumps(found, indent=2))
        elif note or len(self.reports) + len(self.failures) > 1:
            print(self._summary() + note)
        return self.status

    def _summary(self) -> str:
        wrong = [report.name for report in self.reports if report.ran and not report.ok]
        unknown = [report.name for report in self.reports if report.ok and not report.judged]
        not_run = [report.name for report in self.reports if not report.ran]
        not_run += [name for name, _ in self.failures]
        right = sum(report.ok and report.judged for report in self.reports)
        kinds = {"WRONG": wrong, "not judged": unknown, "not run": not_run}
        rest = [f"{len(of)} {kind} ({', '.join(of)})" for kind, of in kinds.items() if of]
        return ", ".join([f"{right} right", *rest])


def stdout_for(as_json: bool) -> AbstractContextManager:
    """Send the output of user code to stderr if stdout is for JSON."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def print_error(why: object) -> None:
    """Print an error on stderr."""
    print(f"error: {why}", file=sys.stderr)


def _show_progress(text: str) -> None:
    """Show a line on a terminal; the next call overwrites it. Nothing in a log, which would keep it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
