"""The benchmark of attention runs, by blocks, and compares them with the formula."""

import pytest

from experiments.benchmarks import attention
from hoglib.ops import _attention_blocks


@pytest.mark.parametrize("name", ["gradient", "HVP, reverse over reverse"])
def test_a_row_has_a_time_and_a_peak_of_each_route(name, monkeypatch):
    monkeypatch.setattr(_attention_blocks, "SIZES", {"cpu": _attention_blocks.Sizes(0, 2**17)})
    row = attention.row(name, 16, repeats=1)
    assert row.startswith(f"| {name} | 16 | ")
    assert row.count("of the time") == row.count("of the peak") == 2


def test_a_wrong_route_has_no_row(monkeypatch):
    monkeypatch.setattr(attention, "by_blocks", lambda q, k, v: attention.formula(q, k, 1.01 * v))
    with pytest.raises(AssertionError, match="not close"):
        attention.row("jvp", 16, repeats=1)
