"""The benchmark of the Laplacian runs, and compares what it times."""

from experiments.benchmarks import laplacian


def test_a_row_has_every_way_twice():
    (row,) = laplacian.rows(small=True)
    assert row.startswith("| 256 x 2 -> 1 |")
    assert row.count(" / ") == 2 * (len(laplacian.WAYS) - 1)


def test_higher_orders_are_compared_before_they_are_timed():
    rows = laplacian.higher_rows(small=True)
    assert [row.split(" | ")[1] for row in rows] == [
        "ours", "nested by hand", "collapsed by hand", "ours", "nested by hand",
    ]  # fmt: skip
    assert all(row.count("1.00") == 2 for row in rows if "nested" in row)
