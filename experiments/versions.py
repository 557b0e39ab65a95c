"""The table of docs/versions.md: the versions that hoglib was run on, and what was run.

    python -m experiments.versions                                       this interpreter
    python -m experiments.versions .venv/bin/python other/bin/python     others, with torch installed
    python -m experiments.versions --tests tests/curvature               and these tests, by pytest

Each interpreter runs `hoglib check` from this checkout, and the tests if any are named. Its row
replaces the one of the same versions; all other rows stay.
"""

import argparse
import json
import os
import re
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


def run(python: str, tests: list[str]) -> Row:
    """The row of an interpreter."""
    done = _output([python, "-m", "hoglib", "check", "--json"])
    found = json.loads(done)
    counts = Counter(one["status"] for one in found["checks"])
    said = (
        _output([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]) if tests else ""
    )
    return Row(
        found["python"],
        found["torch"],
        found["platform"],
        ", ".join(["CPU", *found["devices"]]),
        ", ".join(f"{count} {status}" for status, count in counts.items()),
        f"{', '.join(tests)}: {said.splitlines()[-1].split(' in ')[0]}" if tests else "",
    )


def _output(command: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if not done.stdout.strip():
        raise SystemExit(f"{' '.join(command)}: expected output, got none (exit {done.returncode})")
    return done.stdout


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


def main(args: list[str] | None = None) -> None:
    """Run the interpreters and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH")
    given = parser.parse_args(args)
    new = [run(python, given.tests) for python in given.pythons]
    PAGE.write_text(updated(PAGE.read_text(), new))
    print(HEAD + "\n".join(map(str, new)))


if __name__ == "__main__":
    main()
