"""The table of docs/versions.md: the versions that hoglib was run on, and what was run.

    python -m tests.versions                                       this interpreter
    python -m tests.versions .venv/bin/python other/bin/python     others, with torch installed
    python -m tests.versions --tests tests/curvature               and these tests, by pytest
    python -m tests.versions --tests tests --options="-n 2"        with options of pytest

Each interpreter runs `hoglib check` from this checkout, and the tests if any are named, whose exit
status is the command's. Its row replaces the one of the same versions; all other rows stay.
`make test TORCH=2.15.0` is this command in an environment of that release.
"""

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
HEAD = (
    "| Python | torch | platform | devices | `hoglib check` | tests |\n|---|---|---|---|---|---|\n"
)


class Row(NamedTuple):
    """A row of the table: the versions, and what was run."""

    python: str
    torch: str
    platform: str
    devices: str
    check: str
    tests: str

    @property
    def versions(self) -> tuple[str, ...]:
        """What the row is about."""
        return self[:4]

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


def run(python: str, tests: list[str], options: str = "") -> tuple[Row, int]:
    """The row of an interpreter, and pytest's exit status."""
    done, _ = _output([python, "-m", "hoglib", "check", "--json"])
    found = json.loads(done)
    counts = Counter(one["status"] for one in found["checks"])
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(options)]
    said, status = _output([*pytest, *tests], shown=True) if tests else ("", 0)
    if status not in (0, 1):  # usage, interrupt, no test: not a run of these tests
        raise SystemExit(status)
    row = Row(
        found["python"],
        found["torch"],
        found["platform"],
        ", ".join(["CPU", *found["devices"]]),
        ", ".join(f"{count} {status}" for status, count in counts.items()),
        f"{', '.join(tests)}: {said.splitlines()[-1].split(' in ')[0]}" if tests else "",
    )
    return row, status


def _output(command: list[str], shown: bool = False) -> tuple[str, int]:
    """What a command prints, as it comes also on this terminal, and its exit status."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = b""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
        assert isinstance(process.stdout, io.BufferedReader)
        while part := process.stdout.read1():
            said += part
            if shown:
                print(part.decode(errors="replace"), end="", flush=True)
    if not said.strip():
        raise SystemExit(
            f"{' '.join(command)}: expected output, got none (exit {process.returncode})"
        )
    return said.decode(), process.returncode


def rows(page: str) -> list[Row]:
    """The rows of the table in a page."""
    return [Row(*(cell.strip() for cell in line.split("|")[1:-1])) for line in _table(page)]


def _table(page: str) -> list[str]:
    lines = page.partition(HEAD)[2].splitlines()
    return list(takewhile(lambda line: line.startswith("|"), lines))


def updated(page: str, new: list[Row]) -> str:
    """The page, with these rows in place of those of the same versions."""
    kept = {row.versions: row for row in [*rows(page), *new]}
    table = "".join(f"{kept[versions]}\n" for versions in sorted(kept, key=_in_order))
    old = HEAD + "".join(f"{line}\n" for line in _table(page))
    return page.replace(old, HEAD + table)


def _in_order(versions: tuple[str, ...]) -> tuple[list[list[int]], tuple[str, ...]]:
    python, torch, *_ = versions
    numbers = [[int(part) for part in re.findall(r"\d+", text)] for text in (python, torch)]
    return numbers, versions


def main(args: list[str] | None = None) -> int:
    """Run the interpreters and write the page; whether a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH")
    parser.add_argument("--options", default="", help="of pytest, in one argument")
    given = parser.parse_args(args)
    found = [run(python, given.tests, given.options) for python in given.pythons]
    new = [row for row, _ in found]
    PAGE.write_text(updated(PAGE.read_text(), new))
    print(HEAD + "\n".join(map(str, new)))
    return max(status for _, status in found)


if __name__ == "__main__":
    sys.exit(main())
