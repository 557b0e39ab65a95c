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
    depth,
    entering,
    fixed_points,
    inner_loops,
    kfac,
    language_models,
    laplacian,
    leave_out,
    ops,
    penalties,
    remat,
    stand_ins,
    tracers,
)  # fmt: skip
from experiments.benchmarks.memory import peak_bytes
from hoglib.ops import _attention_blocks
from tests.long_tail import FULL

CPU = torch.device("cpu")


@pytest.fixture
def printed(capsys, monkeypatch):
    """printed(module): the lines that its smoke run prints."""

    def run(module):
        monkeypatch.setattr(sys, "argv", [module.__name__, "--smoke"])
        threads = torch.get_num_threads()
        module.main()
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
    assert row.count("of the time") == row.count("of the peak") == 2


def test_the_audit_of_right_models_is_right_and_the_fault_is_found():
    lines = audit.rows(small=True)
    assert len(lines) == len(audit.MODELS)
    assert all("| right |" in line for line in lines[:-1])
    assert "| wrong in 5 |" in lines[-1]


@FULL
def test_each_part_of_depth_prints_rows(printed, monkeypatch):
    def run_here(command, **options):
        """What a process of its own would print, without importing torch again."""
        assert command[:3] == [sys.executable, "-m", depth.NAME]
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            depth.main(command[3:])
        return SimpleNamespace(stdout=stdout.getvalue())

    monkeypatch.setattr(depth, "subprocess", SimpleNamespace(run=run_here, PIPE=None))
    lines = printed(depth)[1:]
    assert {line[:12].strip() for line in lines} == {*depth.PARTS} - {"first-call"} | {"first call"}
    assert max(errors_of(lines)) < 1e-4


def test_entering_a_graph_has_a_row_for_each_kind_of_tensors(printed):
    lines = printed(entering)[4:]
    assert [line.split("|")[1].strip() for line in lines] == list(entering.ENTERED)


def test_both_tracers_take_a_plain_model(printed):
    lines = printed(tracers)[4:]
    assert [line.count("error 0e+00") for line in lines] == [2]


def test_the_graph_that_is_entered_hands_out_what_its_first_call_computed():
    run = entering.entered_tensors(2)
    first = run()
    for x in run.args[0].values():
        x.zero_()
    torch.testing.assert_close(run(), first)


def test_each_part_of_kronecker_factors_prints_rows(printed):
    lines = printed(kfac)
    for part in ("newton", "systems", "norms"):
        assert any(line.startswith(part) for line in lines)
    assert max(errors_of([line for line in lines if line.startswith("norms")])) < 1e-5


def test_products_until_a_loss_and_the_loss_at_products():
    run = [kfac.Point(10, 3.0), kfac.Point(20, 2.0), kfac.Point(30, 1.0), kfac.Point(40, 0.5)]
    assert kfac.until(iter(run), 2.0, 35) == (20, 1.0)
    assert kfac.until(iter(run), 0.6, 20) == (40, 2.0)
    with pytest.raises(AssertionError, match="no end"):
        kfac.until(iter(run), 0.1, 35)


def test_chunks_of_language_models_are_compared_and_an_error_in_bfloat16_is_larger():
    rows = language_models.memory_rows(small=True)
    assert [row.split(" | ")[:2] for row in rows] == [["| `hvp`", "16"], ["| `ggn_vp`", "16"]]
    assert all(row.count(" s ") == 3 for row in rows)
    for row in language_models.error_rows(small=True)[:2]:
        single, _, half = (float(cell) for cell in row.strip("| ").split(" | ")[1:])
        assert single < 1e-4 < half < 1


def test_the_laplacian_has_every_way_twice_and_higher_orders_are_compared():
    (row,) = laplacian.rows(small=True)
    assert row.startswith("| 256 x 2 -> 1 |")
    assert row.count(" / ") == 2 * (len(laplacian.WAYS) - 1)
    rows = laplacian.higher_rows(small=True)
    nested = [row for row in rows if row.split(" | ")[1] == "nested by hand"]
    assert len(nested) == 2
    assert all(row.count("1.00") == 2 for row in nested)


def test_the_ops_have_both_tables(printed):
    text = "\n".join(printed(ops))
    for name in (*ops.swishes(), *ops.workloads(small=True)):
        assert f"| {name} |" in text


def test_penalties_have_a_row_for_every_critic_and_way_and_compiled_ones():
    rows = penalties.rows(small=True)
    ways = sum(len(ours) for _, ours in penalties.STEPS.values())
    assert len(rows) == len(penalties.NETWORKS) * ways
    assert sum("raises" in row for row in rows) == ways  # attention by hand
    rows = penalties.compiled_rows(small=True, backend="eager")
    assert [row.split(" | ")[2] for row in rows] == ["hoglib", "compiled"] * len(penalties.SMOOTH)
    assert not any("raises" in row for row in rows)


def test_a_wrong_gradient_of_a_penalty_is_not_timed(monkeypatch):
    monkeypatch.setattr(penalties.hog.penalties, "r1", lambda c, x: 2 * c(x).mean())
    with pytest.raises(AssertionError):
        penalties.rows(small=True)


def test_the_stand_ins_have_every_row():
    assert [line.split("|")[1].strip() for line in stand_ins.calls(1)] == [
        "torch.sin of 4 numbers", "x.shape of 4 numbers", "the walk over one node of a graph",
    ]  # fmt: skip
    rows = stand_ins.beside_torch(1, small=True)
    assert len(rows) == len(stand_ins.stand_ins(small=True))


def test_inner_loops_have_a_row_for_each_memory(printed):
    lines = printed(inner_loops)
    assert len(lines) == len(inner_loops.NETWORKS) * len(inner_loops.MEMORY) + 2
    assert max(errors_of(lines)) < 1e-5


def test_fixed_points_have_the_derivatives_of_unrolled_steps(printed):
    lines = printed(fixed_points)
    ours = [line for line in lines if line.startswith("hoglib")]
    assert len(ours) == 2
    assert all(
        float(part.split(",")[0]) < 1e-10 for line in ours for part in line.split("error ")[1:]
    )


def test_scores_are_ranked_beside_trainings_without_some_sequences(printed):
    lines = printed(leave_out)
    assert [line[:22].strip() for line in lines] == ["ekfac", "kfac", "product of gradients"]
    assert all(-1 <= float(line.split()[-3]) <= 1 for line in lines)


def test_remat_prints_a_row_for_each_method_and_order(printed):
    orders = [line.split()[0] for line in printed(remat)[2:]]
    assert orders == ["first"] * 3 + ["second"] * 3 + ["forward"] * 2


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
