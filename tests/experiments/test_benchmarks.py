"""The benchmarks of curvature: every method against its truth, what is done with one that is wrong, the reports."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from experiments import plots
from experiments.benchmarks import __main__ as command
from experiments.benchmarks import report, timing, truths, with_torch
from experiments.benchmarks.measure import FEW, measure
from experiments.benchmarks.problems import MODELS, problem
from experiments.benchmarks.workload import (
    Eigenvalues,
    Method,
    Missing,
    Workload,
    columns,
    peer,
)
from experiments.benchmarks.workloads import WORKLOADS


def double_backward_off_by(error):
    def made(point):
        call = with_torch.double_backward(point)
        return lambda: tuple(part * (1 + error) for part in call())

    return made


def raising(error):
    def made(point):
        raise error

    return made


BEHAVIOURS = Workload(
    "behaviours",
    ("MLP",),
    {
        "right": Method(with_torch.double_backward),
        "nearly right": Method(double_backward_off_by(5e-5)),
        "wrong": Method(double_backward_off_by(3e-3)),
        "not a number": Method(double_backward_off_by(torch.nan)),
        "raising": Method(raising(ValueError("first | line\nsecond"))),
        "missing": Method(raising(Missing("missing: no hoglib.thing"))),
        "unlike": Method(with_torch.double_backward, beside="right"),
    },
)


@pytest.fixture(scope="module")
def behaviours():
    return measure(BEHAVIOURS, problem("MLP", 1, small=True), repeats=2, budget=60)[1]


def test_only_what_is_right_has_a_time(behaviours):
    statuses = {name: row["status"] for name, row in behaviours.items()}
    assert statuses == {
        "right": "ok",
        "nearly right": "ok",
        "wrong": "wrong",
        "not a number": "wrong",
        "raising": "raises",
        "missing": "missing",
        "unlike": "ok",
    }
    for row in behaviours.values():
        assert ("seconds" in row) == ("ratio" in row) == (row["status"] == "ok")
    assert behaviours["wrong"]["message"] == "wrong by 3e-3"
    assert behaviours["wrong"]["error"] == pytest.approx(3e-3, rel=1e-3)
    assert behaviours["raising"]["message"] == "raises: ValueError: first | line"
    assert behaviours["unlike"]["beside"]["name"] == "right"


def test_cells_say_why_there_is_no_time(behaviours):
    assert report.cell(behaviours["wrong"]) == "wrong by 3e-3"
    assert report.cell(behaviours["raising"]) == "raises: ValueError: first / line"
    assert report.cell(behaviours["missing"]) == "missing"
    assert report.cell(None) == ""


# The whole of the registry on one network, and one workload on every network.
SMOKE = [
    *((name, "MLP") for name, w in WORKLOADS.items() if "MLP" in w.problems),
    *((name, w.problems[0]) for name, w in WORKLOADS.items() if "MLP" not in w.problems),
    *(("hvp", name) for name in WORKLOADS["hvp"].problems if name != "MLP"),
]


@pytest.mark.parametrize(("name", "network"), SMOKE, ids=lambda text: text)
def test_smoke(name, network):
    assert {name for name, _ in SMOKE} == set(WORKLOADS)
    workload = WORKLOADS[name]
    unit, rows = measure(workload, problem(network, workload.vectors, small=True), 1, 60)
    assert list(rows) == list(workload.methods)
    assert unit["seconds"]["median"] > 0
    for method, row in rows.items():
        assert row["status"] in ("ok", "wrong", "raises", "missing")
        if not row["ours"] and row["status"] != "missing" and "by hand" in method:
            assert row["status"] == "ok", (method, row["message"])
        assert not row["ours"] or row["status"] == "ok", (method, row["message"])
        if row["status"] == "ok" and workload.memory and not method.startswith("JAX"):
            assert row["peak_bytes"] > 0


def test_products_of_a_loop_are_per_vector_and_not_kept():
    taken = []

    def lazily(point):
        def run():
            for v in point.vectors.unbind(1):
                taken.append(1)
                yield v

        return run

    loop = Workload("loop", (), {"all": Method(lazily, truth="v")}, vectors=5, per_vector=True)
    brief = Workload(
        "brief", (), {"two": Method(lazily, truth="v", few=True)}, vectors=5, per_vector=True
    )
    point = problem("MLP", 5, small=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(truths.TRUTHS, "v", truths.Truth(lambda p: p.vectors.double()))
        assert measure(loop, point, 1, 60)[1]["all"]["status"] == "ok"
        assert len(taken) == FEW + 5
        taken.clear()
        measure(brief, point, 1, 60)
        assert len(taken) == FEW + FEW


def small_mlp():
    """A small network in float64, and its outputs as a function of all parameters in one vector."""
    point = problem("MLP", 2, small=True)
    exact = point.double()
    flat = torch.cat([p.detach().reshape(-1) for p in exact.params.values()])

    def outputs(flat):
        return functional_call(exact.model, exact.named(flat), (exact.x,))

    return point, exact, flat, outputs


def test_truth_of_the_hessian():
    point, exact, flat, outputs = small_mlp()
    H = torch.func.hessian(lambda p: F.cross_entropy(outputs(p), exact.y))(flat)
    torch.testing.assert_close(truths.hessian(point), H @ exact.vectors)
    top = torch.linalg.eigvalsh(H)
    torch.testing.assert_close(truths.eigenvalues(point)[:, 0], top.flip(0)[:5])
    by_magnitude = top[top.abs().argsort(descending=True)[:5]].sort(descending=True).values
    torch.testing.assert_close(truths.eigenvalues(point, "LM")[:, 0], by_magnitude)
    gradient = torch.func.grad(lambda p: F.cross_entropy(outputs(p), exact.y))(flat)
    torch.testing.assert_close(truths.gradient(point)[:, 0], gradient)


def test_truth_of_gauss_newton_and_fisher():
    point, exact, flat, outputs = small_mlp()
    J = torch.func.jacrev(outputs)(flat)
    H = torch.func.hessian(lambda f: F.cross_entropy(f, exact.y))(outputs(flat))
    G = torch.einsum("ncp,ncmd,mdq->pq", J, H, J)
    torch.testing.assert_close(truths.gauss_newton(point)[:, 0], G @ exact.vectors[:, 0])
    rows = torch.func.jacrev(lambda p: F.cross_entropy(outputs(p), exact.y, reduction="none"))(flat)
    E = rows.T @ rows / len(rows)
    torch.testing.assert_close(truths.empirical_fisher(point)[:, 0], E @ exact.vectors[:, 0])


def test_results_of_every_form_are_columns():
    flat = torch.arange(12.0)
    block = flat.reshape(6, 2)
    assert columns(flat, 1).shape == (12, 1)
    assert torch.equal(columns(block, 2), block.double())
    leaves = (block[:4].reshape(2, 2, 2), block[4:])
    assert torch.equal(columns(leaves, 2), block.double())
    assert torch.equal(columns(dict(enumerate(leaves)), 2), block.double())
    one_a_vector = [(block[:4, i].reshape(2, 2), block[4:, i]) for i in range(2)]
    assert torch.equal(columns(one_a_vector, 2), block.double())
    assert torch.equal(columns(block.numpy(), 2), block.double())
    assert columns(Eigenvalues(torch.ones(5), 3), 1).shape == (5, 1)


def test_what_is_not_here_is_missing():
    with pytest.raises(Missing, match=r"^missing: no_such_library is not installed$"):
        peer("no_such_library")


def test_a_peer_that_does_not_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_peer.py").write_text("raise RuntimeError('needs more\\nthan this')")
    monkeypatch.syspath_prepend(tmp_path)
    said = r"^broken_peer does not import: RuntimeError: needs more$"
    with pytest.raises(Missing, match=said.replace("broken_peer ", "")):
        peer("broken_peer")


def test_a_ratio_is_one_of_neighbours_and_time_is_limited(monkeypatch):
    clock = {"unit": iter([1.0, 2.0, 4.0, 8.0] * 10), "call": iter([10.0] * 40)}
    monkeypatch.setattr(timing, "once", lambda function: next(clock[function]))

    class Named(str):
        def __call__(self):
            pass

    def rounds_of_ten_seconds(budget):
        monkeypatch.setattr(timing.time, "perf_counter", iter(range(0, 1000, 10)).__next__)
        return timing.beside(Named("unit"), {"a": Named("call")}, repeats=10, budget=budget)

    units, pairs = rounds_of_ten_seconds(45)
    assert units[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pairs["a"][0] == (10.0, 10.0 / 2**0.5)
    assert pairs["a"][1] == (10.0, 10.0 / 32**0.5)  # each round has its own, after the collection
    assert len(pairs["a"]) == 4  # a fifth would end beyond 45 s
    assert len(rounds_of_ten_seconds(15)[1]["a"]) == 3
    assert len(rounds_of_ten_seconds(5)[1]["a"]) == 1
    assert len(rounds_of_ten_seconds(1000)[1]["a"]) == 10


def results(behaviours):
    machine = {
        "processor": "abacus", "cores": 2, "threads": 1, "system": "Linux", "python": "3",
        "torch": "2", "hoglib": "0", "peers": {"jax": None, "other": "1.0"}, "date": "2026-01-01",
    }  # fmt: skip
    measured = {"title": "behaviours", "problem": "MLP", "methods": behaviours}
    return {"machine": machine, "workloads": [measured, measured | {"problem": "CNN"}]}


def test_table_and_picture(behaviours, tmp_path):
    lines = report.table(results(behaviours)).splitlines()
    assert lines[2] == "| **behaviours** | **MLP** | **CNN** |"
    assert "| wrong | wrong by 3e-3 | wrong by 3e-3 |" in lines
    assert len(lines) == 3 + len(behaviours)
    said = report.measured_on(results(behaviours))
    assert "abacus, one core of 2" in said
    assert "jax (missing), other 1.0" in said
    file = plots.benchmarks(report.by_title(results(behaviours)), tmp_path / "bars.png")
    assert file.stat().st_size > 1000


def test_the_page_takes_the_table_between_its_marks(behaviours, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.START}\n\nold\n\n{report.END}\n\nafter\n")
    for _ in range(2):
        report.write(page, results(behaviours))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("| wrong |") == 1
    page.write_text("no marks")
    with pytest.raises(ValueError, match="expected the marks"):
        report.write(page, results(behaviours))
    real = command.PAGE.read_text()
    assert report.START in real
    assert report.END in real


def test_the_command(tmp_path, capsys):
    options = ["--smoke", "--workload", "micro", "--problem", "MLP", "--output", str(tmp_path)]
    assert command.main(options) == 0
    assert "| **one product more, in four micro-batches** | **MLP** |" in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found["machine"]) == {
        "processor", "cores", "threads", "system", "python", "torch", "hoglib", "peers", "date",
    }  # fmt: skip
    (measured,) = found["workloads"]
    assert (measured["workload"], measured["problem"]) == ("micro", "MLP")
    row = measured["methods"]["by hand"]
    assert row["status"] == "ok"
    assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    assert row["peak_bytes"] > 0
    assert row["error"] < 1e-4
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json", "table.md", "benchmarks.png",
    }  # fmt: skip
    (tmp_path / "table.md").unlink()
    assert command.main(["--render", "--output", str(tmp_path)]) == 0
    assert "micro-batches" in (tmp_path / "table.md").read_text()


def test_a_process_that_dies_is_told_of_and_the_others_count():
    found, wrong = command.run([("hvp", "nothing")], [], command.cores()[:1])
    assert found == []
    assert "hvp, nothing: the process ended with 2" in wrong[0]


def test_problems_are_the_same_on_every_call_and_leave_the_random_state():
    state = torch.get_rng_state()
    for name in MODELS:
        one, two = (problem(name, 2, small=True) for _ in range(2))
        assert torch.equal(one.vectors, two.vectors)
        assert torch.equal(one.x, two.x)
        assert all(map(torch.equal, one.params.values(), two.params.values()))
    assert torch.equal(torch.get_rng_state(), state)
