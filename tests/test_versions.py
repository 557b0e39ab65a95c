"""The table of versions: made by running interpreters, and the metadata claim what stands in it."""

import json
import re
from pathlib import Path

import pytest

from tests import versions

ROOT = Path(__file__).parents[1]
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


FOUND = {"python": "3.11.7", "torch": "2.13.0", "platform": "Linux", "devices": []}


@pytest.fixture
def page(monkeypatch, tmp_path):
    """A page to be written, where `hoglib check` has run."""
    checks = [{"status": "ok"}, {"status": "skipped"}]
    checked = json.dumps({**FOUND, "checks": checks}), 0
    output = versions._output

    def of(command, shown=False):
        return checked if command[2] == "hoglib" else output(command, shown)

    monkeypatch.setattr(versions, "_output", of)
    monkeypatch.setattr(versions, "PAGE", tmp_path / "versions.md")
    versions.PAGE.write_text(page_of(OLD))
    return versions.PAGE


@pytest.mark.parametrize(("right", "status"), [(True, 0), (False, 1)])
def test_a_row_says_what_ran_and_the_status_whether_it_failed(right, status, page, capfd):
    tests = page.with_name("test_some.py")
    tests.write_text(f"def test_one(): assert {right}\ndef test_two(): pass\n")
    assert versions.main(["--tests", str(tests), "--options=-k 'one or two'"]) == status
    said = "2 passed" if right else "1 failed, 1 passed"
    row = versions.Row("3.11.7", "2.13.0", "Linux", "CPU", "1 ok, 1 skipped", f"{tests}: {said}")
    assert versions.rows(page.read_text()) == [row, OLD]
    assert f"\n{said} in " in capfd.readouterr().out  # as it runs


def test_a_run_of_no_test_has_no_row(page):
    page.with_name("test_none.py").write_text("")
    with pytest.raises(SystemExit, match=r"^5$"):
        versions.main(["--tests", str(page.with_name("test_none.py"))])
    assert versions.rows(page.read_text()) == [OLD]


def test_the_metadata_claim_what_stands_in_the_table():
    rows = versions.rows(PAGE)
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert set(classifiers) == {row.python.rpartition(".")[0] for row in rows}
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned in {row.torch.split("+")[0] for row in rows}
