"""The benchmark of the ops runs, checks its methods against each other, and prints both tables."""

import torch

from experiments.benchmarks import ops


def test_smoke(monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["ops", "--smoke"])
    ops.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    for name in (*ops.swishes(), *ops.workloads(small=True)):
        assert f"| {name} |" in printed
