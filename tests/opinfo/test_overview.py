"""docs/ops.md, whose table is made from the catalogue."""

from pathlib import Path

import torch

from tests.opinfo import CATALOGUE, overview

ROOT = Path(__file__).parents[2]


def test_a_row_says_what_the_catalogue_says():
    (cube,) = [info for info in CATALOGUE if info.name == "cube by hand"]
    cells = ("cube by hand", "external", "x^3, by NumPy", "3", "no", "float64, float32, complex128")
    assert overview.row(cube) == cells
    changed = cube._replace(max_order=None, smooth=False, skips={}, dtypes=(torch.bfloat16,))
    assert overview.row(changed)[3:] == ("any, piecewise", "yes", "bfloat16")


def test_the_page_is_current():
    # if not: python -m tests.opinfo.overview
    table = overview.markdown()
    assert (ROOT / "docs/ops.md").read_text().endswith(table + "\n")
    assert len(table.splitlines()) == len(CATALOGUE) + 2 > 32
