"""The benchmark of meta-gradients: its methods agree, what is wrong is not timed, its tables and picture."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.benchmarks import __main__ as command
from experiments.benchmarks import method_check, pictures
from experiments.benchmarks.measure import measure, result
from experiments.benchmarks.meta import report, with_jax, with_peers, with_torch
from experiments.benchmarks.meta.tasks import LEARNERS, Learner, checked, learner, long_loop
from experiments.benchmarks.meta.workloads import (
    CHOSEN,
    FORCED,
    LOOP,
    MANY_STEPS,
    META_GRADIENT,
    WORKLOADS,
)
from experiments.benchmarks.timing import environment
from experiments.benchmarks.truths import leaves_of
from experiments.benchmarks.workload import Method, Missing
from tests.long_tail import all_but, only

pytestmark = pytest.mark.usefixtures("own_caches")
JAX = "JAX jit(vmap(grad))"
PEERS = ["higher", "TorchOpt", JAX]
WAIT = ['hoglib.MAML, compile="inductor"']  # for a compiler
WITH_NORMS = ["transformer", "conv4-32"]
SMALL = [name for name in LEARNERS if name != "conv4-64"]  # which is conv4-32 where it is small


@pytest.fixture
def without_peers(monkeypatch):
    def missing(name):
        raise Missing(f"missing: {name} is not installed")

    for module in (method_check, with_peers, with_jax):
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


def measured(point, methods, repeats=1):
    workload = replace(WORKLOADS["meta-gradient"], methods=methods, by_hand=next(iter(methods)))
    return measure(workload, point, repeats, 60)[1]


def method(make, **options):
    return Method(make, truth="meta-gradient", **options)


@pytest.fixture
def rows():
    methods = {
        "by hand": method(with_torch.by_hand),
        "wrong": method(off_by(3e-3), ours=True),
        "not a number": method(off_by(torch.nan)),
        "raising": method(raising),
        "short": method(lambda point: lambda: with_torch.by_hand(point)()[:-1]),
    }
    return measured(learner("sinusoid", small=True), methods, 2)


def test_only_what_is_right_has_a_time(rows):
    assert [row["status"] for row in rows.values()] == ["ok", "wrong", "wrong", "raises", "raises"]
    assert [name for name, row in rows.items() if "seconds" in row] == ["by hand"]
    said = [report.cell(row, report._time) for row in rows.values()]
    assert said[0].endswith(" ms")
    assert said[1:4] == ["wrong by 3e-3", "wrong by inf", "raises: ValueError: first / line"]
    assert said[4].startswith("raises: expected a result of shape")
    assert rows["wrong"]["ours"]


def test_a_wrong_meta_loss_is_wrong_too():
    point = learner("sinusoid", small=True)

    def made(point):
        call = with_torch.by_hand(point)
        return lambda: (lambda value, *grads: (value * 1.01, *grads))(*call())

    rows = measured(point, {"by hand": method(with_torch.by_hand), "loss": method(made)})
    assert rows["loss"]["message"] == "wrong by 1e-2"


@pytest.mark.parametrize("name", all_but(only("MLP"), SMALL))
def test_smoke(name, without_peers):
    methods = {
        method: of
        for method, of in WORKLOADS["meta-gradient"].on(name).methods.items()
        if name == "sinusoid" or method not in WAIT
    }
    rows = measured(learner(name, small=True), methods)
    statuses = {method: row["status"] for method, row in rows.items()}
    usual = "wrong" if name in WITH_NORMS else "ok"  # what torch gets wrong through normalisation
    assert statuses == dict.fromkeys(methods, "ok") | {"grad(vmap) by hand": usual} | (
        dict.fromkeys(PEERS, "missing")
    )
    for method, row in rows.items():
        if row["status"] == "ok":
            assert (row["first_seconds"] is not None) == methods[method].compiled, method
    assert report.cell(rows["higher"], report._time) == "not installed"
    assert rows[CHOSEN]["beside"]["name"] in FORCED.values()


@pytest.mark.parametrize(
    ("package", "method"), [("higher", "higher"), ("torchopt", "TorchOpt"), ("jax", JAX)]
)
def test_smoke_of_a_peer(package, method):
    pytest.importorskip(package)
    point = learner("sinusoid", small=True)
    rows = measured(point, {LOOP: META_GRADIENT[LOOP], method: META_GRADIENT[method]})
    assert rows[method]["status"] == "ok", rows[method]["message"]
    assert (rows[method]["first_seconds"] is not None) == (method == JAX)


def test_inner_loops_of_many_steps(without_peers):
    point, exact = long_loop("5", small=True), checked("5")
    assert (point.count, point.inner_steps) == (1, 2)
    assert (exact.count, exact.inner_steps, exact.support[0].dtype) == (1, 5, torch.float64)
    longer = replace(point, inner_steps=9)
    rows = measure(WORKLOADS["steps"], longer, 1, 60, checked=exact)[1]
    assert list(rows) == list(MANY_STEPS)
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
    value, gradient = leaves_of(with_torch.by_hand(point)()).split((1, 3))
    torch.testing.assert_close(value, residual.square().mean().reshape(1, 1))
    torch.testing.assert_close(gradient, A.T @ Z[0].T @ residual * 2 / 6)


def test_learners_are_the_same_on_every_call_and_leave_the_random_state():
    state = torch.get_rng_state()
    one, two = (learner("conv4-32", small=True) for _ in range(2))
    assert torch.equal(one.support[0], two.support[0])
    assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)


def test_no_method_leaves_a_gradient():
    point = learner("sinusoid", small=True)
    for name in (LOOP, CHOSEN, "grad(vmap) by hand"):
        call = META_GRADIENT[name].make(point)
        assert torch.equal(leaves_of(call()), leaves_of(call()))
    assert all(p.grad is None for p in point.model.parameters())


def test_the_choice_is_compared_with_the_better_of_both_ways(monkeypatch):
    seconds = {CHOSEN: 2.2, FORCED["loop"]: 2.0, FORCED["vmap"]: 4.0}

    def beside(unit, functions, repeats, budget, clock):
        return [1.0], {name: [(seconds[name], seconds[name])] for name in functions}

    monkeypatch.setattr("experiments.benchmarks.measure.beside", beside)

    def choice(*ways):
        methods = {LOOP: META_GRADIENT[LOOP], **{name: META_GRADIENT[name] for name in ways}}
        return measured(learner("sinusoid", small=True), methods)[CHOSEN].get("beside")

    found = choice(*seconds)
    assert found["name"] == FORCED["loop"]
    assert found["median"] == pytest.approx(1.1)
    assert choice(CHOSEN, FORCED["vmap"])["name"] == FORCED["vmap"]
    assert choice(CHOSEN) is None


def test_the_pages_of_many_steps(without_peers, tmp_path):
    found = result("steps", "5", "cpu", small=True, repeats=1, budget=None)
    results = {"machine": environment([]) | {"clock": "wall"}, "smoke": True, "workloads": [found]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert command.main(["--render", "--output", str(tmp_path)]) == 0
    assert "| one task, conv4-32; inner steps: | 5 |" in (tmp_path / "details.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json", "table.md", "details.md", "benchmarks.png", "meta-memory.png",
    }  # fmt: skip


def test_the_table_has_a_column_for_each_learner(rows):
    found = {"methods": rows, "workload": "meta-gradient", "device": "cpu"}
    workloads = [found | {"problem": "one"}, found | {"problem": "two"}]
    workloads.append(found | {"problem": "one", "device": "cuda"})
    (table,) = report.parts({"workloads": workloads})
    lines = table.splitlines()
    assert lines[0] == "| time of a meta-gradient, to the loop by hand | one | two |"
    assert "| **wrong** | wrong by 3e-3 | wrong by 3e-3 |" not in lines
    assert "| wrong | wrong by 3e-3 | wrong by 3e-3 |" in lines


def test_the_picture_is_drawn(tmp_path):
    curves = {
        "store by hand": {5: (80.0, 1.0), 10: (160.0, 1.0)},
        'hoglib, memory="remat"': {5: (20.0, 1.4), 10: (21.0, 1.5)},
    }
    file = pictures.plot_meta_memory(tmp_path / "memory.png", curves)
    assert file.stat().st_size > 1000
