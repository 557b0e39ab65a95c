"""`hoglib ops` and the page that is made from it."""

from pathlib import Path

import pytest
import torch

from hoglib.cli.main import main
from hoglib.testing.opinfo import CATALOGUE, overview
from tests.functions import Cube, Detached, WrongTangent

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table():
    return overview.rows()


def test_every_row_is_right(table):
    assert [row.cells[0] for row in table if not row.right] == []
    assert len(table) == len(CATALOGUE) > 30
    assert all(row.cells[-1] == "ok" for row in table)


def test_the_page_is_current(table):
    # if not: python -m hoglib ops --markdown
    assert (ROOT / "docs/ops.md").read_text().endswith(overview.markdown(table) + "\n")


def test_the_command_prints_the_table(table, capsys):
    assert main(["ops"]) == 0
    assert capsys.readouterr().out == overview.text(table) + "\n"
    assert main(["ops", "--markdown"]) == 0
    assert capsys.readouterr().out == overview.markdown(table) + "\n"


def test_a_bad_command():
    with pytest.raises(SystemExit) as stopped:
        main(["opps"])
    assert stopped.value.code == 2


def test_without_numpy_the_ops_that_call_it_are_left_out(monkeypatch, capsys):
    some = [info for info in CATALOGUE if info.theme == "external" or info.name == "stop_gradient"]
    monkeypatch.setattr(overview, "CATALOGUE", some)
    monkeypatch.setattr(overview, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.Tensor, "numpy", None, raising=False)
    assert main(["ops"]) == 0
    out, error = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["stop_gradient"]
    assert "Left out, because NumPy is not installed: cube by hand; external" in error


def faulty(function):
    (cube,) = [info for info in CATALOGUE if info.name == "cube by hand"]
    return cube._replace(op=function)


WRONG = {
    "second derivative lost": (Detached.apply, "1 of 3"),
    "wrong tangent": (WrongTangent.apply, "WRONG"),
    "another function": (lambda x: Cube.apply(x) + x, "0 of 3"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_faulty_op_is_seen(fault, monkeypatch, capsys):
    function, cell = WRONG[fault]
    row = overview.row(faulty(function))
    assert not row.right
    assert cell in row.cells
    monkeypatch.setattr(overview, "CATALOGUE", [faulty(function)])
    assert main(["ops"]) == 1
    assert "these ops differ from their references: cube by hand" in capsys.readouterr().err
