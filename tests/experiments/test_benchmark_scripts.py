"""The benchmarks that are programs of their own: each runs, prints its rows, and compares what it times."""

import contextlib
import importlib
import io
import sys
from types import SimpleNamespace

import pytest
import torch

from experiments.benchmarks import (
    attention,
    audit,
    fixed_points,
    language_models,
    laplacian,
    leave_out,
    ops,
    remat,
    resident,
    sparse,
    stand_ins,
    tracers,
)  # fmt: skip
from experiments.benchmarks.timing import program
from hoglib.ops import _attention_blocks
from tests.long_tail import FULL


@pytest.fixture
def printed(capsys, monkeypatch):
    """printed(module): the lines that its smoke run prints."""

    def run(module):
        monkeypatch.setattr(sys, "argv", [module.__name__, "--smoke"])
        threads = torch.get_num_threads()
        program(module.__doc__, module.TABLES)
        torch.set_num_threads(threads)
        return capsys.readouterr().out.splitlines()

    return run


def errors_of(lines):
    return [float(line.rpartition("error ")[2]) for line in lines if "error" in line]


@pytest.mark.parametrize("name", ["gradient", "HVP, reverse over reverse"])
def test_attention_has_a_time_and_a_peak_of_each_route(name, monkeypatch):
    monkeypatch.setattr(_attention_blocks, "SIZES", {"cpu": _attention_blocks.Sizes(0, 2**17)})
    row = attention.row(name, 16, repeats=1)
    assert row.startswith(f"| {name} | 16 | ")
    assert row.count("of the time") == row.count("of the peak") == 1


def test_the_audit_of_right_models_is_right_and_the_fault_is_found():
    lines = [*audit.rows(small=True)]
    assert len(lines) == len(audit.MODELS)
    assert all("| right |" in line for line in lines[:-1])
    assert "| wrong in 5 |" in lines[-1]


def test_sparse_derivatives_have_times_or_the_library_that_is_missing(printed):
    lines = [line for line in printed(sparse) if "| hoglib |" in line or "missing:" in line]
    assert [line.split(" | ")[1] for line in lines if "hoglib" in line] == ["hoglib"] * 3
    assert all(library in " ".join(lines) for library in ("jax", "hoglib"))


@FULL
def test_each_part_of_recomputation_prints_rows(capsys, monkeypatch):
    def run_here(command, **options):
        """What a process of its own would print, without importing torch again."""
        assert command[:3] == [sys.executable, "-m", remat.NAME]
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            remat.main(command[3:])
        return SimpleNamespace(stdout=stdout.getvalue())

    monkeypatch.setattr(remat, "subprocess", SimpleNamespace(run=run_here, PIPE=None))
    threads = torch.get_num_threads()
    remat.main(["--smoke"])
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert sum(line.startswith(("mlp", "transformer")) for line in lines) == 2 * 8
    assert sum("memory=" in line for line in lines) == 4 * len(remat.LOOPS) + 2
    assert sum(line.startswith("first call") for line in lines) == 2
    assert max(errors_of(lines)) < 1e-4


def test_both_tracers_take_a_plain_model(printed):
    lines = printed(tracers)[4:]
    assert [line.count("error 0e+00") for line in lines] == [2]


def test_chunks_of_language_models_are_compared_and_an_error_in_bfloat16_is_larger():
    rows = language_models.memory_rows(small=True)
    assert [row.split(" | ")[:2] for row in rows] == [["| `hvp`", "16"], ["| `ggn_vp`", "16"]]
    assert all(row.count(" s ") == 3 for row in rows)
    for row in language_models.error_rows(small=True)[:2]:
        single, _, half = (float(cell) for cell in row.strip("| ").split(" | ")[1:])
        assert single < 1e-4 < half < 1


def test_laplacians_are_compared_with_nested_loops():
    rows = [*laplacian.rows(small=True)]
    nested = [row for row in rows if row.split(" | ")[1] == "nested by hand"]
    assert (len(rows), len(nested)) == (4, 2)
    assert all(row.count("1.00") == 2 for row in nested)


def test_the_ops_have_both_tables(printed):
    text = "\n".join(printed(ops))
    for name in (*ops.swishes(), *ops.workloads(small=True)):
        assert f"| {name} |" in text


def test_the_stand_ins_have_every_row():
    (line,) = stand_ins.calls(True)
    assert line.startswith("| torch.sin of 4 numbers | ")
    rows = [*stand_ins.beside_torch(small=True)]
    assert len(rows) == len(stand_ins.stand_ins(small=True))


def test_fixed_points_have_the_derivatives_of_unrolled_steps(printed):
    lines = printed(fixed_points)
    ours = [line for line in lines if line.startswith("hoglib")]
    assert len(ours) == 2
    assert all(
        float(part.split(",")[0]) < 1e-10 for line in ours for part in line.split("error ")[1:]
    )


def test_scores_are_ranked_beside_trainings_without_some_sequences(printed):
    lines = printed(leave_out)[1:]
    assert [line[:22].strip() for line in lines] == ["ekfac", "kfac", "product of gradients"]
    assert all(-1 <= float(line.split()[-3]) <= 1 for line in lines)


@pytest.mark.parametrize("name", resident.CASES)
def test_each_case_of_resident_memory_runs(name):
    assert resident.measure(name, 2)["held"] > 0


def test_the_benchmarks_import_no_lightning(monkeypatch):
    """Which fails where curvlinops has brought its torchvision."""
    for name in [*sys.modules]:
        if name.split(".")[0] in ("experiments", "lightning") or name.startswith(
            "hoglib.lightning"
        ):
            monkeypatch.delitem(sys.modules, name)
    importlib.import_module("experiments.benchmarks.__main__")
    assert "lightning" not in sys.modules
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        del sys.modules[name]  # for those of before
