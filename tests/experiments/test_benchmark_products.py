"""The benchmark of the matrix products prints a row a class."""

import pytest
import torch

from experiments.benchmarks import products
from hoglib import _onednn as onednn
from hoglib import _timed_products as timed


@pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")
def test_smoke(monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.setattr(timed, "SIZES", timed.SIZES)  # put back afterwards
    monkeypatch.setattr("sys.argv", ["products", "--smoke"])
    products.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert printed.count("| 64 x 64 x 64 |") == 2


def test_a_row():
    times = {timed.Class(64, 256, 1024, True): timed.Times(2e-3, 1e-3)}
    (row,) = products.rows(times)
    assert row == "| 64 x 256 x 1024 | by columns | 17 | 34 | 2.00 | yes |"
