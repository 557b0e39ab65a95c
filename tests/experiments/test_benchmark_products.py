"""The benchmark of the matrix products prints a row a class."""

import pytest
import torch

from experiments.benchmarks import products
from hoglib._core import timed_products, torch_internals


@pytest.mark.skipif(not torch_internals.onednn_available(), reason="this torch has no oneDNN")
def test_smoke(monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.setattr(timed_products, "SIZES", timed_products.SIZES)  # put back afterwards
    monkeypatch.setattr("sys.argv", ["products", "--smoke"])
    products.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert printed.count("| 64 x 64 x 64 |") == 2


@pytest.mark.parametrize(
    ("dnn", "taken"), [(1e-3, "everywhere"), (1.8e-3, "in graphs"), (2e-3, "")]
)
def test_a_row(dnn, taken):
    times = {timed_products.Class(64, 256, 1024, True): timed_products.Times(2e-3, dnn)}
    (row,) = products.rows(times)
    fast = f"{0.033554432 / dnn:.0f} | {2e-3 / dnn:.2f}"
    assert row == f"| 64 x 256 x 1024 | by columns | 17 | {fast} | {taken} |"
