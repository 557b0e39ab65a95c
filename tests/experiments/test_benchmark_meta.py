"""The benchmark of meta-gradients: its methods agree, what is wrong is not timed, its tables and picture."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments import plots
from experiments.benchmarks.meta import __main__ as command
from experiments.benchmarks.meta import report, with_jax, with_peers, with_torch
from experiments.benchmarks.meta.measure import chosen, flat, measure
from experiments.benchmarks.meta.methods import (
    CHOSEN,
    FORCED,
    JAX,
    LOOP,
    MANY_STEPS,
    META_GRADIENT,
)
from experiments.benchmarks.meta.tasks import LEARNERS, Learner, checked, learner
from experiments.benchmarks.workload import Missing

PEERS = ["higher", "TorchOpt", JAX]
WITH_NORMS = ["transformer", "conv4-32"]
SMALL = [name for name in LEARNERS if name != "conv4-64"]  # which is conv4-32 where it is small


@pytest.fixture
def without_peers(monkeypatch):
    def missing(name):
        raise Missing(f"missing: {name} is not installed")

    for module in (with_peers, with_jax):
        monkeypatch.setattr(module, "peer", missing)


def off_by(error):
    def made(point):
        call = with_torch.by_hand(point)

        def run():
            value, *grads = call()
            return value, *(g * (1 + error) for g in grads)

        return run

    return made


def raising(point):
    raise ValueError("first | line\nsecond")


@pytest.fixture
def rows():
    methods = {
        "by hand": with_torch.by_hand,
        "hoglib, wrong": off_by(3e-3),
        "not a number": off_by(torch.nan),
        "raising": raising,
        "short": lambda point: lambda: with_torch.by_hand(point)()[:-1],
    }
    return measure(learner("meta-gradient", "sinusoid", small=True), methods, 2, 60)


def test_only_what_is_right_has_a_time(rows):
    assert [row["status"] for row in rows.values()] == ["ok", "wrong", "wrong", "raises", "raises"]
    assert [name for name, row in rows.items() if "seconds" in row] == ["by hand"]
    said = [report.cell(row, report._time) for row in rows.values()]
    assert said[0].endswith(" ms")
    assert said[1:4] == ["wrong by 3e-3", "wrong by inf", "raises: ValueError: first / line"]
    assert said[4].startswith("raises: ValueError: expected a result of shape")
    assert rows["hoglib, wrong"]["ours"]


def test_a_wrong_meta_loss_is_wrong_too():
    point = learner("meta-gradient", "sinusoid", small=True)

    def made(point):
        call = with_torch.by_hand(point)
        return lambda: (lambda value, *grads: (value * 1.01, *grads))(*call())

    rows = measure(point, {"by hand": with_torch.by_hand, "loss": made}, 1, 60)
    assert rows["loss"]["message"] == "wrong by 1e-2"


@pytest.mark.parametrize("name", SMALL)
def test_smoke(name, without_peers):
    rows = measure(learner("meta-gradient", name, small=True), META_GRADIENT, 1, 60)
    statuses = {method: row["status"] for method, row in rows.items()}
    usual = "wrong" if name in WITH_NORMS else "ok"  # what torch gets wrong through normalisation
    assert statuses == dict.fromkeys(META_GRADIENT, "ok") | {"grad(vmap) by hand": usual} | (
        dict.fromkeys(PEERS, "missing")
    )
    assert report.cell(rows["higher"], report._time) == "not installed"
    assert rows[CHOSEN]["choice"]["better"] in FORCED


@pytest.mark.parametrize(
    ("package", "method"), [("higher", "higher"), ("torchopt", "TorchOpt"), ("jax", JAX)]
)
def test_smoke_of_a_peer(package, method):
    pytest.importorskip(package)
    point = learner("meta-gradient", "sinusoid", small=True)
    rows = measure(point, {LOOP: META_GRADIENT[LOOP], method: META_GRADIENT[method]}, 1, 60)
    assert rows[method]["status"] == "ok", rows[method]["message"]
    assert ("first" in rows[method]) == (method == JAX)


def test_inner_loops_of_many_steps(without_peers):
    point, exact = learner("steps", "5", small=True), checked("steps", "5")
    assert (point.count, point.inner_steps) == (1, 2)
    assert (exact.count, exact.inner_steps, exact.support[0].dtype) == (1, 5, torch.float64)
    longer = replace(point, inner_steps=9)
    rows = measure(longer, MANY_STEPS, 1, 60, memory=True, checked=exact)
    assert {name: row["message"] for name, row in rows.items() if row["status"] != "ok"} == {}
    assert all(row["error"] < 1e-9 for row in rows.values())
    peaks = {name: row["peak_bytes"] for name, row in rows.items()}
    stored = peaks.pop("store by hand")
    for name, peak in peaks.items():
        assert peak > 0
        assert "store" in name or peak < 0.7 * stored, name


def test_the_meta_gradient_by_hand_is_that_of_the_formula():
    """One linear task: theta' = theta - alpha X'(X theta - y) 2 / K, and the chain rule."""
    torch.manual_seed(0)
    X, y, Z, t = (torch.randn(1, 6, n, dtype=torch.float64) for n in (3, 1, 3, 1))
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    point = Learner("linear", model, F.mse_loss, (X, y), (Z, t), 0.1, 1)
    theta = model.weight.detach().T
    A = torch.eye(3, dtype=torch.float64) - 0.1 * 2 / 6 * X[0].T @ X[0]
    residual = Z[0] @ (A @ theta + 0.1 * 2 / 6 * X[0].T @ y[0]) - t[0]
    value, gradient = flat(with_torch.by_hand(point)())
    torch.testing.assert_close(value, residual.square().mean().reshape(1, 1))
    torch.testing.assert_close(gradient, A.T @ Z[0].T @ residual * 2 / 6)


def test_learners_are_the_same_on_every_call_and_leave_the_random_state():
    state = torch.get_rng_state()
    one, two = (learner("meta-gradient", "conv4-32", small=True) for _ in range(2))
    assert torch.equal(one.support[0], two.support[0])
    assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)


def test_no_method_leaves_a_gradient():
    point = learner("meta-gradient", "sinusoid", small=True)
    for make in (META_GRADIENT[LOOP], META_GRADIENT[CHOSEN], META_GRADIENT["grad(vmap) by hand"]):
        call = make(point)
        first, second = flat(call()), flat(call())
        assert all(map(torch.equal, first, second))
    assert all(p.grad is None for p in point.model.parameters())


def test_the_choice_is_held_against_the_better_of_both_ways():
    pairs = {
        CHOSEN: [(1.0, 2.0), (1.0, 2.4)],
        FORCED["loop"]: [(1.0, 2.0), (1.0, 2.0)],
        FORCED["vmap"]: [(1.0, 4.0), (1.0, 4.0)],
    }
    choice = chosen(pairs)
    assert choice["better"] == "loop"
    assert choice["median"] == pytest.approx(1.1)
    del pairs[FORCED["loop"]]
    assert chosen(pairs)["better"] == "vmap"
    del pairs[FORCED["vmap"]]
    assert chosen(pairs) is None


def test_the_command(tmp_path, capsys):
    options = ["--smoke", "--workload", "steps", "--problem", "5", "--output", str(tmp_path)]
    assert command.main(options) == 0
    assert "| one task, conv4-32; inner steps: | 5 |" in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found["machine"]["peers"]) == {"higher", "torchopt", "jax"}
    (measured,) = found["workloads"]
    assert list(measured["methods"]) == list(MANY_STEPS)
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json", "tables.md", "meta-memory.png",
    }  # fmt: skip
    (tmp_path / "tables.md").unlink()
    assert command.main(["--render", "--output", str(tmp_path)]) == 0
    assert "store by hand, peak" in (tmp_path / "tables.md").read_text()


def test_the_page_takes_the_tables_between_its_marks(rows, tmp_path):
    said = ("date", "processor", "cores", "system", "python", "torch", "hoglib")
    machine = dict.fromkeys(said, "x") | {"peers": {"jax": None}}
    measured = {
        "workload": "meta-gradient",
        "problem": "sinusoid",
        "methods": {LOOP: rows["by hand"]},
    }
    page = tmp_path / "page.md"
    start, end = report.MARKS
    page.write_text(f"before\n\n{start}\n\nold\n\n{end}\n\nafter\n")
    report.write(page, {"machine": machine, "workloads": [measured]})
    text = page.read_text()
    assert "old" not in text
    assert "| time of a meta-gradient, to the loop by hand | sinusoid |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    real = command.PAGE.read_text()
    assert start in real
    assert end in real


def test_the_picture_is_drawn(tmp_path):
    curves = {
        "store by hand": {5: (80.0, 1.0), 10: (160.0, 1.0)},
        'hoglib, memory="remat"': {5: (20.0, 1.4), 10: (21.0, 1.5)},
    }
    file = plots.meta_memory(curves, tmp_path / "memory.png")
    assert file.stat().st_size > 1000
