"""The benchmark of remat runs, and what it counts is right."""

import pytest
import torch

from experiments.benchmarks.memory import peak_bytes
from experiments.benchmarks.remat import LAYERS, Sizes, main, measure

CPU = torch.device("cpu")


@pytest.mark.parametrize("network", LAYERS)
def test_the_smoke_run_prints_a_row_for_each_method_and_order(network, capsys):
    main(["--smoke", "--network", network])
    lines = capsys.readouterr().out.splitlines()
    orders = ["first"] * 3 + ["second"] * 3 + ["forward"] * 2
    assert [line.split()[0] for line in lines[2:]] == orders


@pytest.mark.parametrize(
    ("network", "sizes"),
    {
        "mlp": Sizes(layers=12, width=8, batch=(64,), repeats=1),
        "transformer": Sizes(layers=6, width=8, batch=(4, 16), repeats=1),
    }.items(),
)
def test_results_agree_and_remat_needs_the_least_memory(network, sizes):
    rows = measure(network, sizes, CPU)
    assert all(row.error < 1e-5 for row in rows)
    peak = {(row.order, row.method): row.mebibytes for row in rows}
    for order in ("first", "second", "forward"):
        assert peak[order, "hoglib remat"] < 0.6 * peak[order, "plain"]


def test_peak_memory_counts_what_is_alive_at_once():
    x = torch.ones(1000, dtype=torch.float64)

    def two_at_once() -> None:
        for _ in range(3):
            y = x + 1
            z = y * 2  # 16 kB
            del y, z

    assert peak_bytes(two_at_once, CPU) == 16000


def test_peak_memory_counts_views_once_and_inputs_not_at_all():
    x = torch.ones(1000, dtype=torch.float64)
    assert peak_bytes(lambda: x.view(10, 100).add_(1).sum(), CPU) == 8
    assert peak_bytes(lambda: (x + 1).view(10, 100).t().unbind(), CPU) == 8000


def test_peak_memory_counts_what_has_the_id_of_an_earlier_tensor():
    def hundred_beside_others_that_come_and_go() -> None:
        kept = []
        for _ in range(100):
            other = torch.frombuffer(bytearray(8), dtype=torch.float64)  # by no operation
            other.view_as(other)
            del other
            kept.append(torch.ones(1000, dtype=torch.float64))

    assert peak_bytes(hundred_beside_others_that_come_and_go, CPU) == 800000
