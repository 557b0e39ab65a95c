"""What the pages for users of other libraries name in their tables is there."""

import re
from functools import reduce
from pathlib import Path

import torch

import hoglib as hog
from tests.rows import rows

PAGES = sorted((Path(__file__).parents[2] / "docs" / "migrate").glob("*.md"))
CALLED = {
    name
    for home in (
        hog, hog.curvature, hog.meta, hog.penalties, hog.KFACOperator, hog.curvature.LowRankOperator,
        hog.curvature.KFAC, torch, torch.Tensor, torch.linalg, torch.optim, torch.func, torch.autograd,
    )
    for name in dir(home)
}  # fmt: skip


def cells():
    """The code in the second column of each table, which is hoglib's."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            row = [cell.strip() for cell in line.strip("|").split(" | ")]
            if line.startswith("| `") and len(row) > 1:
                yield from ((page.stem, code) for code in re.findall(r"`([^`]+)`", row[1]))


@rows(("page", "code"), list(cells()))
def test_what_a_row_calls_exists(page, code):
    for path in re.findall(r"\bhog\.([a-zA-Z_.]+\w)", code):
        reduce(getattr, path.split("."), hog)
    assert set(re.findall(r"(\w+)\(", code)) <= CALLED | {"loss", "lsmr", "maml"}, page
