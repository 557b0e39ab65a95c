"""The benchmark of depth runs, and prints a row for each of its parts."""

from experiments.benchmarks.depth import main


def test_the_smoke_run_prints_each_part(capsys):
    main(["--smoke"])
    lines = capsys.readouterr().out.splitlines()[1:]
    parts = [line[:12].strip() for line in lines]
    assert parts == ["memory"] * 5 + ["growth"] * 3 + ["first call"] * 2 + ["replay"] * 4
    errors = [float(line.rpartition("error ")[2]) for line in lines if "error" in line]
    assert max(errors) < 1e-4
