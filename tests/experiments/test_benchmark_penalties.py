"""The benchmark of penalties runs, and compares what it times."""

import pytest

import hoglib as hog
from experiments.benchmarks import penalties


def test_a_row_for_every_critic_and_way():
    rows = penalties.rows(small=True)
    ways = sum(len(ours) for _, ours in penalties.STEPS.values())
    assert len(rows) == len(penalties.NETWORKS) * ways
    assert sum("raises" in row for row in rows) == ways  # attention by hand


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    monkeypatch.setattr(penalties.hog.penalties, "r1", lambda c, x: 2 * c(x).mean())
    with pytest.raises(AssertionError):
        penalties.rows(small=True)
    assert hog.penalties.r1 is not None


def test_a_compiled_step_of_every_smooth_critic():
    rows = penalties.compiled_rows(small=True, backend="eager")
    assert [row.split(" | ")[2] for row in rows] == ["hoglib", "compiled"] * len(penalties.SMOOTH)
    assert not any("raises" in row for row in rows)
