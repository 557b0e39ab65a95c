"""The benchmark of the Laplacian runs, and compares what it times."""

from experiments.benchmarks import laplacian


def test_a_row_has_every_way_twice():
    (row,) = laplacian.rows(small=True)
    assert row.startswith("| 256 x 2 -> 1 |")
    assert row.count(" / ") == 2 * (len(laplacian.WAYS) - 1)
