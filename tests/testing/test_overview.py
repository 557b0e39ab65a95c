"""`hoglib ops` and the page that is made from it."""

from pathlib import Path

import pytest
import torch

from hoglib.cli.main import main
from hoglib.testing.opinfo import CATALOGUE, overview

ROOT = Path(__file__).parents[2]


def test_a_row_says_what_the_catalogue_says():
    (cube,) = [info for info in CATALOGUE if info.name == "cube by hand"]
    cells = ("cube by hand", "external", "x^3, by NumPy", "3", "no", "float64, float32, complex128")
    assert overview.row(cube) == cells
    changed = cube._replace(max_order=None, smooth=False, skips={}, dtypes=(torch.bfloat16,))
    assert overview.row(changed)[3:] == ("any, piecewise", "yes", "bfloat16")


def test_the_page_is_current():
    # if not: python -m hoglib ops --markdown
    table = overview.markdown(overview.rows())
    assert (ROOT / "docs/ops.md").read_text().endswith(table + "\n")
    assert len(table.splitlines()) == len(CATALOGUE) + 2 > 32


def test_the_command_prints_the_table(capsys):
    assert main(["ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["op", "theme", "y", "=", "orders", "compile", "dtypes"]
    assert [line.split("  ")[0] for line in lines[2:]] == [info.name for info in CATALOGUE]
    assert len({line.index(info.theme, len(info.name)) for line, info in zip(lines[2:], CATALOGUE, strict=True)}) == 1  # fmt: skip
    assert main(["ops", "--markdown"]) == 0
    assert capsys.readouterr().out == overview.markdown(overview.rows()) + "\n"


def test_a_bad_command():
    with pytest.raises(SystemExit) as stopped:
        main(["opps"])
    assert stopped.value.code == 2
