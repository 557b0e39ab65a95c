"""The peak that tests of memory ask for: what is alive at once, each storage once."""

import torch

from tests.memory import peak_bytes

CPU = torch.device("cpu")


def test_peak_memory_counts_what_is_alive_at_once():
    x = torch.ones(1000, dtype=torch.float64)

    def two_at_once() -> None:
        for _ in range(3):
            y = x + 1
            z = y * 2  # 16 kB
            del y, z

    assert peak_bytes(two_at_once, CPU) == 16000
    # views once, and inputs not at all
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
