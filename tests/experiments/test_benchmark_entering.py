"""The benchmark of entering a graph runs, and what it enters is code that computes nothing."""

import sys

import torch

from experiments.benchmarks import entering


def test_the_smoke_run_prints_a_row_for_each_kind_of_tensors(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["entering", "--smoke"])
    entering.main()
    lines = capsys.readouterr().out.splitlines()[4:]
    assert [line.split("|")[1].strip() for line in lines] == list(entering.ENTERED)


def test_the_graph_that_is_entered_hands_out_what_its_first_call_computed():
    run = entering.entered_tensors(2)
    first = run()
    for x in run.args[0].values():
        x.zero_()
    torch.testing.assert_close(run(), first)
