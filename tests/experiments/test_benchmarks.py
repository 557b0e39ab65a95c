"""The benchmarks: every method against its truth, what is done with one that is wrong, the long tables."""

import json
import time
from dataclasses import replace
from itertools import chain, repeat

import pytest
import torch

from experiments.benchmarks import __main__ as command
from experiments.benchmarks import method_check, timing, with_torch
from experiments.benchmarks.critics import CRITICS, critics
from experiments.benchmarks.measure import measure
from experiments.benchmarks.meta import report, with_jax, with_peers
from experiments.benchmarks.meta import with_torch as meta_with_torch
from experiments.benchmarks.meta.tasks import LEARNERS, checked, learner, long_loop
from experiments.benchmarks.meta.workloads import CHOSEN, FORCED, LOOP, MANY_STEPS, META_GRADIENT
from experiments.benchmarks.problems import MODELS, problem
from experiments.benchmarks.workload import Method, Missing, Unit, Workload, peer
from experiments.benchmarks.workloads import WORKLOADS, chosen
from tests.long_tail import all_but, only

pytestmark = pytest.mark.usefixtures("own_caches")


def double_backward_off_by(error):
    def made(point):
        call = with_torch.double_backward(point)
        return lambda: tuple(part * (1 + error) for part in call())

    return made


def raising(error):
    def made(point):
        raise error

    return made


GRADIENT = Unit("plain gradients of the same network", with_torch.gradient)


def workload(methods, **options):
    return Workload("behaviours", ("MLP",), methods, problem, "right", unit=GRADIENT, **options)


BEHAVIOURS = workload(
    {
        "right": Method(with_torch.double_backward),
        "nearly right": Method(double_backward_off_by(5e-5)),
        "wrong": Method(double_backward_off_by(3e-3)),
        "not a number": Method(double_backward_off_by(torch.nan)),
        "raising": Method(raising(ValueError("first | line\nsecond"))),
        "missing": Method(raising(Missing("missing: no hoglib.thing"))),
        "unlike": Method(with_torch.double_backward, beside=("right", "missing")),
    }
)


@pytest.fixture(scope="module")
def behaviours():
    return measure(BEHAVIOURS, problem("MLP", 1, small=True), repeats=2, budget=60)[1]


def test_only_what_is_right_has_a_time(behaviours):
    statuses = [row["status"] for row in behaviours.values()]
    assert statuses == ["ok", "ok", "wrong", "wrong", "raises", "missing", "ok"]
    for row in behaviours.values():
        assert ("seconds" in row) == ("ratio" in row) == (row["status"] == "ok")
    assert behaviours["wrong"]["message"] == "wrong by 3e-3"
    assert behaviours["wrong"]["error"] == pytest.approx(3e-3, rel=1e-3)
    assert behaviours["raising"]["message"] == "raises: ValueError: first | line"
    assert behaviours["unlike"]["beside"]["name"] == "right"


CURVATURE = {name: w for name, w in WORKLOADS.items() if w.page == "curvature"}
# All of them on one problem, and one of a kind on every network.
SMOKE = [
    *((name, "MLP") for name, w in CURVATURE.items() if "MLP" in w.problems),
    *((name, w.problems[0]) for name, w in CURVATURE.items() if "MLP" not in w.problems),
    *(("hvp", name) for name in CURVATURE["hvp"].problems if name != "MLP"),
    *(("r1", name) for name in CRITICS),
    ("wgan_gp", "CNN"),
]


# The workload "compiled" compiles seven graphs by inductor; of products with a transformer others show the parts.
@pytest.mark.parametrize(
    ("name", "network"),
    all_but(lambda name, network: name != "compiled" and network != "TRF", SMOKE),
    ids=lambda text: text,
)
def test_smoke(name, network):
    workload = WORKLOADS[name].on(network)
    unit, rows = measure(workload, workload.make(network, workload.vectors, True), 1, 60)
    assert list(rows) == list(workload.methods)
    assert unit["seconds"]["median"] > 0
    for method, row in rows.items():
        assert row["status"] in ("ok", "wrong", "raises", "missing")
        if not row["ours"] and row["status"] != "missing" and "by hand" in method:
            assert row["status"] == "ok", (method, row["message"])
        assert not row["ours"] or row["status"] == "ok", (method, row["message"])
        if row["status"] == "ok":
            compiled = workload.methods[method].compiled
            assert (row["first_seconds"] or 0) > 0 if compiled else row["first_seconds"] is None
            if workload.memory == "allocated" and not method.startswith("JAX"):
                assert row["peak_bytes"] > 0


def test_every_workload_is_tried_above_or_by_the_tests_of_meta_gradients():
    assert {name for name, _ in SMOKE} | {"meta-gradient", "steps"} == set(WORKLOADS)


def test_the_registry_names_what_is_there():
    for name, workload in WORKLOADS.items():
        columns = [m.column for m in workload.methods.values()]
        assert workload.by_hand in workload.methods, name
        assert not workload.methods[workload.by_hand].ours
        assert set(workload.quick) <= set(workload.problems)
        assert not workload.brief or {"hoglib", "compiled"} <= set(columns), name
        for method in workload.methods.values():
            assert set(method.beside) <= set(workload.methods)
            assert method.ours == (method.column in ("hoglib", "compiled")) or not method.column
            assert method.called or method.column != "other"
            assert method.compiled or method.column not in ("compiled", "jax")


def test_what_is_measured_is_what_is_asked_for():
    quick, full = chosen(None, None, False), chosen(None, None, True)
    assert set(quick) < set(full)
    assert ("hvp", "TRF") not in quick
    assert chosen(["hvp"], None, False) == [("hvp", p) for p in ("MLP", "CNN", "TRF", "MLP-128")]
    assert chosen(["hvp", "steps"], ["5", "CNN"], False) == [("hvp", "CNN"), ("steps", "5")]


def test_times_of_several_products_are_per_vector():
    for few, vectors in ((False, 5), (True, 2)):
        method = Method(with_torch.double_backward, few=few)
        several = workload({"all": method}, vectors=5, per_vector=True)
        assert method_check.vectors_of(method, several) == vectors
        assert method_check.vectors_of(method, workload({"all": method}, vectors=5)) == 1


def test_a_peer_that_is_not_here_or_does_not_import_says_why(tmp_path, monkeypatch):
    with pytest.raises(Missing, match=r"^missing: no_such_library is not installed$"):
        peer("no_such_library")
    (tmp_path / "broken_peer.py").write_text("raise RuntimeError('needs more\\nthan this')")
    monkeypatch.syspath_prepend(tmp_path)
    said = r"^broken_peer does not import: RuntimeError: needs more$"
    with pytest.raises(Missing, match=said.replace("broken_peer ", "")):
        peer("broken_peer")


def test_a_ratio_is_one_of_neighbours_and_time_is_limited(monkeypatch):
    seconds = chain([0.0, 0.0, 0.5, 0.6], repeat(2.0))
    monkeypatch.setattr(timing.time, "monotonic", seconds.__next__)
    clock, order = {"unit": iter([1.0, 2.0, 4.0, 8.0] * 10), "call": iter([10.0] * 40)}, []
    monkeypatch.setattr(timing, "once", lambda name: order.append(name) or next(clock[name]))

    class Named(str):
        def __call__(self):
            pass

    def rounds_of_ten_seconds(budget):
        monkeypatch.setattr(timing.time, "perf_counter", iter(range(0, 1000, 10)).__next__)
        return timing.beside(Named("unit"), {"a": Named("call")}, repeats=10, budget=budget)

    units, pairs = rounds_of_ten_seconds(45)
    assert units[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pairs["a"][:2] == [(10.0, 10.0 / 2**0.5), (10.0, 10.0 / 8**0.5)]
    assert order[:5] == ["unit", "call", "unit", "call", "unit"]  # each follows the other
    assert len(pairs["a"]) == 4  # a fifth would end beyond 45 s
    assert [len(rounds_of_ten_seconds(budget)[1]["a"]) for budget in (15, 5, 1000)] == [3, 1, 10]


def test_a_call_is_timed_until_a_gpu_has_done_its_work(monkeypatch):
    happened = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("waited"))
    timing.once(lambda: happened.append("called"))
    assert happened == ["waited", "called", "waited"]


def test_the_clock_of_the_process_does_not_count_what_it_waits_for():
    assert timing.once(lambda: time.sleep(0.2), time.perf_counter) > 0.19
    assert timing.once(lambda: time.sleep(0.2), time.process_time) < 0.1


@pytest.mark.parametrize(
    "point",
    [problem("CNN", 2, True), critics("CNN", tiny=True), learner("sinusoid", small=True)],
    ids=lambda p: type(p).__name__,
)
def test_a_problem_moves_with_all_it_has(point):
    moved = point.to(torch.device("meta"))
    assert (point.device.type, moved.device.type) == ("cpu", "meta")
    values = [value if isinstance(value, tuple) else (value,) for value in vars(moved).values()]
    tensors = [x for value in values for x in value if isinstance(x, torch.Tensor)]
    tensors += moved.model.parameters()
    assert {t.device.type for t in tensors} == {"meta"}
    assert all(p.device.type == "cpu" for p in point.model.parameters())


def test_on_a_gpu_hoglib_runs_beside_the_method_by_hand():
    for name, workload in WORKLOADS.items():
        methods = workload.on(workload.problems[0], "cuda").methods
        kept = [method for method in methods if not methods[method].ours]
        assert kept == [workload.by_hand], name


def test_the_command(tmp_path, capsys):
    options = ["--smoke", "--workload", "micro", "--problem", "MLP", "--output", str(tmp_path)]
    assert command.main(options) == 0
    capsys.readouterr()
    details = (tmp_path / "details.md").read_text()
    assert "| **one product, in four micro-batches** | **MLP** |" in details
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found["machine"]) == {
        "processor", "cores", "threads", "system", "python", "torch", "hoglib", "gpu", "peers", "date",
    }  # fmt: skip
    (measured,) = found["workloads"]
    assert measured["workload"] == "micro"
    row = measured["methods"]["by hand"]
    assert row["status"] == "ok"
    assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    assert row["peak_bytes"] > 0
    assert row["error"] < 1e-4
    (tmp_path / "details.md").unlink()
    assert command.main(["--render", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "details.md").read_text() == details


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(capsys):
    assert command.devices("auto") == ["cpu"]
    with pytest.raises(SystemExit, match="expected a GPU that torch sees, got none"):
        command.main(["--device", "cuda"])


def test_a_choice_of_nothing_is_told():
    with pytest.raises(
        SystemExit, match=r"expected workloads that run on what --problem names, got none for TRF"
    ):
        command.main(["--workload", "steps", "--problem", "TRF"])


def test_a_process_that_dies_is_told_of_and_the_others_count():
    found, wrong = command.run([("hvp", "nothing")], {}, command.cores()[:1])
    assert found == []
    assert "hvp, nothing: the process ended with 1" in wrong[0]


def test_problems_are_the_same_on_every_call_and_leave_the_random_state():
    state = torch.get_rng_state()
    for name in MODELS:
        one, two = (problem(name, 2, small=True) for _ in range(2))
        assert torch.equal(one.vectors, two.vectors)
        assert torch.equal(one.x, two.x)
        assert all(map(torch.equal, one.params.values(), two.params.values()))
    assert torch.equal(torch.get_rng_state(), state)


JAX = "JAX jit(vmap(grad))"
PEERS = ["higher", "TorchOpt", JAX]
INDUCTOR = 'hoglib.MAML, compile="inductor"'
WITH_NORMS = ["transformer", "conv4-32"]
SMALL = [name for name in LEARNERS if name != "conv4-64"]  # which is conv4-32 where it is small


@pytest.fixture
def without_peers(monkeypatch):
    def missing(name):
        raise Missing(f"missing: {name} is not installed")

    for module in (method_check, with_peers, with_jax):
        monkeypatch.setattr(module, "peer", missing)


def measured(point, methods, repeats=1):
    workload = replace(WORKLOADS["meta-gradient"], methods=methods, by_hand=next(iter(methods)))
    return measure(workload, point, repeats, 60)[1]


def test_a_wrong_meta_loss_is_wrong_too():
    def made(point):
        call = meta_with_torch.by_hand(point)
        return lambda: (lambda value, *grads: (value * 1.01, *grads))(*call())

    by_hand, wrong = (
        Method(make, truth="meta-gradient") for make in (meta_with_torch.by_hand, made)
    )
    rows = measured(learner("sinusoid", small=True), {"by hand": by_hand, "loss": wrong})
    assert rows["loss"]["message"] == "wrong by 1e-2"


@pytest.mark.parametrize("name", all_but(only("MLP"), SMALL))
def test_smoke_of_meta_gradients(name, without_peers):
    methods = {
        method: of
        for method, of in WORKLOADS["meta-gradient"].on(name).methods.items()
        if name == "sinusoid" or method != INDUCTOR  # which one waits for
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
    assert report.cell(rows["higher"], report._time) == "missing"
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
