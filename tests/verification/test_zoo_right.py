"""Right Functions of many kinds: none fails, and no derivative is doubted."""

import pytest
import torch

import hoglib as hog
from tests.zoo.right import RIGHT


@pytest.mark.parametrize("one", RIGHT, ids=[one.name for one in RIGHT])
def test_it_is_right(one):
    torch.manual_seed(0)
    report = hog.verify(one.function, one.inputs(), **one.options)
    doubts = [row for row in report.warnings if " derivative: " in row.name or row.name == "finite"]
    assert not report.failed, report
    assert not doubts, report
    assert report.judged
