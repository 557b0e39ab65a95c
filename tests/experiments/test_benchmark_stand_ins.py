"""The benchmark of the stand-ins runs, and compares what it times."""

from experiments.benchmarks import stand_ins


def test_every_row_is_there():
    assert [line.split("|")[1].strip() for line in stand_ins.calls(1)] == [
        "torch.sin of 4 numbers",
        "x.shape of 4 numbers",
        "the walk over one node of a graph",
    ]
    rows = stand_ins.beside_torch(1, small=True)
    assert len(rows) == len(stand_ins.stand_ins(small=True))
