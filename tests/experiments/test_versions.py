"""The table of versions: made by running interpreters, and what the metadata claim stands in it."""

import json
import re
import sys
from pathlib import Path

import pytest

from experiments import versions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/versions.md").read_text()
OLD = versions.Row("3.11.7", "2.13.0+cpu", "Linux x86_64", "CPU", "6 ok, 1 skipped", "")


def page_of(*rows):
    return f"# Versions\n\n{versions.HEAD}" + "".join(f"{row}\n" for row in rows) + "\nAnother.\n"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (OLD._replace(check="7 ok"), [OLD._replace(check="7 ok")]),
        (OLD._replace(torch="2.9.1"), [OLD._replace(torch="2.9.1"), OLD]),
        (OLD._replace(devices="CPU, H100"), [OLD, OLD._replace(devices="CPU, H100")]),
    ],
)
def test_a_row_has_its_place(row, expected):
    assert versions.updated(page_of(OLD), [row]) == page_of(*expected)
    assert versions.updated(page_of(), [row]) == page_of(row)


def test_a_row_says_what_ran(monkeypatch):
    checks = [{"status": "ok"}, {"status": "skipped"}]
    found = {"python": "3.11.7", "torch": "2.13.0", "platform": "Linux", "devices": []}
    said = {
        "hoglib": json.dumps({**found, "checks": checks}),
        "pytest": "...\n3 passed, 1 skipped in 0.10s\n",
    }
    monkeypatch.setattr(versions, "_output", lambda command: said[command[2]])
    row = versions.run(sys.executable, ["tests/ops"])
    assert row[:4] == ("3.11.7", "2.13.0", "Linux", "CPU")
    assert row[4:] == ("1 ok, 1 skipped", "tests/ops: 3 passed, 1 skipped")


def test_the_metadata_claim_no_more_than_the_table():
    rows = versions.rows(PAGE)
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert set(classifiers) <= {row.python.rpartition(".")[0] for row in rows}
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned in {row.torch.split("+")[0] for row in rows}
