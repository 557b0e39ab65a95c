"""Gradients through long trainings: replays against a loop by hand, resumption, and what is refused."""

import errno
import itertools
import json
import os
import random
import signal
from math import isqrt
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import hoglib as hog
from hoglib.meta import checkpoints
from hoglib.meta.hypergradient import spearman
from hoglib.meta.training import make_batches
from tests.memory import peak_bytes
from tests.meta.test_hypergradient import WAYS, kept
from tests.oracles import relative
from tests.rows import rows
from tests.several_processes import exit_code_of
from tests.tensors import F32, F64, randn

REPLAYS = [name for name in WAYS if name != "store"]
X, Y = randn(24, 3), randn(24, 2)
VX, VY = randn(7, 3, seed=1), randn(7, 2, seed=1)


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2)).double()


def problem(model):
    """Weights of all examples, learning rates of all steps, and the initial parameters."""
    of = hog.functional_loss(model, lambda outputs, y: (outputs - y).square().sum(1))
    start = {name: p.detach() for name, p in hog.trainable_params(model).items()}
    log_lr = torch.tensor(-3.0, dtype=F64)
    hyper = {"weights": torch.ones(24, dtype=F64), "log_lr": log_lr, "start": start}

    def inner(params, hyper, rows=None):
        rows = torch.arange(24) if rows is None else rows[0] if isinstance(rows, list) else rows
        errors = (of.call(params, X[rows]) - Y[rows]).square().sum(1)
        return (hyper["weights"][rows] * errors).mean()

    def outer(params, hyper):
        return (of.call(params, VX) - VY).square().sum() + hyper["weights"].square().sum() / 100

    return outer, inner, lambda hyper: hyper["start"], hyper


RULES = {
    "sgd": lambda hyper: hog.meta.sgd(hyper["log_lr"].exp(), momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda hyper: hog.meta.adamw(hyper["log_lr"].exp(), eps=0.05),
}  # fmt: skip


def loader():
    order = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.arange(24)), batch_size=5, shuffle=True, generator=order)


class Augmented(TensorDataset):
    """Its examples are drawn anew by the global generators of torch, Python and NumPy's absence."""

    def __getitem__(self, index):
        return torch.tensor((index + int(torch.randint(3, ())) + random.randrange(2)) % 24)


SOURCES = {
    "none": lambda: None,
    "list": lambda: [torch.arange(i % 5, 24 - i % 7) for i in range(11)],
    "function": lambda: lambda i: torch.arange(i % 5, 24 - i % 7),
    "loader": loader,
    "augmented": lambda: DataLoader(Augmented(torch.arange(24)), batch_size=7, shuffle=True),
}


def run(way, rule="adam", source="list", steps=11, dropout=0.0, path=None, **options):
    torch.manual_seed(2)
    random.seed(2)
    return hog.meta.hypergradient(
        *problem(network(dropout)), rule=RULES[rule], steps=steps, batches=SOURCES[source](),
        **kept(way, path), **options,
    )  # fmt: skip


PAIRS = [
    ("sgd", "none", {}), ("sgd", "loader", {"dropout": 0.3}), ("adam", "augmented", {"dropout": 0.3}),
    ("adam", "function", {"truncate": 4}), ("sgd", "list", {"steps": 1}), ("adam", "list", {"steps": 2}),
]  # fmt: skip


@pytest.mark.parametrize("way", REPLAYS)
@pytest.mark.parametrize(("rule", "source", "options"), PAIRS, ids=str)
def test_replays_against_the_whole_graph(way, rule, source, options, tmp_path):
    expected = run("store", rule, source, **options)
    found = run(way, rule, source, path=tmp_path, **options)
    assert torch.equal(found.value, expected.value)
    assert relative(found.gradient, expected.gradient) < 1e-12


@pytest.mark.parametrize("schedule", ["sqrt", "log"])
def test_files_and_memory_are_bounded(schedule, tmp_path):
    """Tensors alive at once, in copies of the parameters, are of a few steps by "log", of sqrt(steps)
    by "sqrt"."""
    width, files = 64, []
    params = {"w": randn(width, width, seed=3)}
    inner = lambda p, h, x: (p["w"] @ x).tanh().square().mean() * h  # noqa: E731

    def peak(steps):
        files.clear()

        def batch(i):
            files.append(len(list((tmp_path / str(steps)).glob("step-*.pt"))))
            return randn(width, seed=i)

        found = peak_bytes(
            lambda: hog.meta.hypergradient(
                lambda p, h: p["w"].square().sum(), inner, params, torch.tensor(1.0, dtype=F64),
                rule=hog.meta.sgd(0.1), steps=steps, batches=batch,
                memory="disk", schedule=schedule, directory=tmp_path / str(steps),
            ), torch.device("cpu"),
        )  # fmt: skip
        assert max(files) <= (steps.bit_length() + 2 if schedule == "log" else isqrt(steps) + 1)
        return found / (8 * width**2)

    few, many = peak(25), peak(100)
    assert many < few + 0.5 if schedule == "log" else few + 4 < many < few + 7, (few, many)


# Interruptions


def whole(way, path):
    return run(way, "adam", "augmented", 30, dropout=0.2, path=path)


def killed_at(kill_at, path, way):
    """Ends this process by a signal in the call of a linear layer with this number."""
    torch.set_num_threads(1)
    calls, forward = itertools.count(1), nn.Linear.forward

    def counted(self, x):
        if next(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, x)

    nn.Linear.forward = counted
    whole(way, path)


# two linear layers a call: 60 in the forward part, where each fifth step is kept, then the replay; a
# resumed process saves so many at least
KILLED = [("disk", 41, 38), ("disk, log", 29, 30), ("disk, log", 150, 20)]


@pytest.mark.parametrize(("way", "kill_at", "done"), KILLED, ids=str)
def test_a_killed_process_is_resumed_bit_for_bit(way, kill_at, done, tmp_path, monkeypatch):
    expected = whole(way, tmp_path / "uninterrupted")
    assert exit_code_of(killed_at, kill_at, tmp_path / "killed", way) == -signal.SIGKILL
    calls, forward = [0], nn.Linear.forward

    def counted(self, x):
        calls[0] += 1
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    counts = []
    for directory in ("afresh", "killed", "killed"):  # which the third time is complete
        calls[0] = 0
        assert_close(whole(way, tmp_path / directory), expected, rtol=0, atol=0)
        counts.append(calls[0])
    assert counts[1] <= counts[0] - done  # what was done is not done again
    assert counts[2] < 10


def out_of_space(at):
    """A disk that takes so many files, and half of the next one."""
    left = [at]
    write = checkpoints.write_bytes

    def limited(path, content):
        left[0] -= 1
        if left[0] < 0:
            write(path, bytes(content)[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    return limited


@pytest.mark.parametrize("files", [0, 4, 12])
def test_a_full_disk_is_told_and_leaves_whole_files(files, tmp_path, monkeypatch):
    expected = whole("checkpoint", None)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_bytes", out_of_space(files))
        with pytest.raises(hog.errors.OutputError) as caught:
            whole("disk", tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert "schedule='log'" in str(caught.value)
    assert not list(tmp_path.glob("*.tmp"))
    assert_close(whole("disk", tmp_path), expected, rtol=0, atol=0)


def test_damaged_files_are_computed_again(tmp_path):
    expected = whole("disk", tmp_path)
    path = tmp_path / "step-000000030.pt"
    whole_file = path.read_bytes()
    middle = len(whole_file) // 2
    for damaged in (b"", whole_file[:middle], whole_file[:100] + b"\x00" * 400 + whole_file[500:]):
        path.write_bytes(damaged)
        (tmp_path / checkpoints.BACKWARD).write_bytes(damaged)
        assert_close(whole("disk", tmp_path), expected, rtol=0, atol=0)


class Harmful:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_files_cannot_execute_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = whole("disk", tmp_path / "files")
    for path in (tmp_path / "files").glob("*.pt"):
        torch.save({"value": Harmful(), "leaves": Harmful(), "of": Harmful()}, path)
    found = whole("disk", tmp_path / "files")
    assert not (tmp_path / "executed").exists()
    assert_close(found, expected, rtol=0, atol=0)


OTHERS = {
    "steps": ({"steps": 10}, "its steps 11, here 10"),
    "schedule": ({"way": "disk, log"}, "its schedule 'sqrt', here 'log'"),
    "truncate": ({"truncate": 3}, "its truncate None, here 3"),
    "another rule": ({"rule": "sgd"}, "its (shapes|initial parameters)"),
    "other data": ({"source": "function"}, None),  # the same batches: the same call
    "data in another order": ({"source": "loader"}, "its first step has the loss"),
}


@pytest.mark.parametrize(("options", "message"), OTHERS.values(), ids=OTHERS)
def test_another_call_in_the_directory_is_refused_by_name(options, message, tmp_path):
    found = run("disk", path=tmp_path)
    if message is None:
        assert_close(run(**{"way": "disk", "path": tmp_path, **options}), found, rtol=0, atol=0)
        return
    with pytest.raises(ValueError, match=f"directory: .*{message}"):
        run(**{"way": "disk", "path": tmp_path, **options})


def test_other_values_in_the_directory_are_refused(tmp_path):
    problem = lambda start, rate, slope=2.0, first=1.0: hog.meta.hypergradient(  # noqa: E731
        lambda p, h: p.square(), lambda p, h: slope * h * (p - 1).square(), torch.tensor(start),
        torch.tensor(first), rule=hog.meta.sgd(rate), steps=9, memory="disk", directory=tmp_path,
    )  # fmt: skip
    problem(0.0, 0.1)
    for other, message in (
        ((0.5, 0.1), "initial parameters"), ((0.0, 0.1, 2.0, 1.5), "arguments"),
        ((0.0, 0.1, 2.5), "its first step has the loss 2.0, here 2.5.*on another processor"), ((0.0, 0.2), "and another update"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            problem(*other)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="holds another one"):
        problem(0.0, 0.1)


def test_a_bar_counts_the_steps(capsys):
    run("checkpoint", steps=11, progress=True)
    shown = capsys.readouterr().err
    assert "hypergradient steps, forward and backward" in shown
    assert "step/s" in shown or "s/step" in shown


@rows("way, calls", [("remat", 22), ("checkpoint", 29)])
def test_how_often_the_loss_of_a_step_runs(way, calls):
    """In each of 11 steps, and in its replay; "remat" keeps all parameters, so that no step runs again for them."""
    count, (outer, inner, start, hyper) = [0], problem(network())

    def counted(*args):
        count[0] += 1
        return inner(*args)

    hog.meta.hypergradient(
        outer, counted, start, hyper, rule=RULES["sgd"], steps=11, **kept(way, None)
    )
    assert count[0] == calls


def test_a_directory_with_other_files_or_of_another_process_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match=r"which holds thesis\.txt"):
        run("disk", path=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    locked = tmp_path / "locked"
    run("disk", path=locked)
    call = json.loads((locked / "manifest.json").read_text())
    half_written = locked / "step-000000005.pt.tmp"
    with checkpoints.OnDisk(locked, call).held():
        half_written.touch()  # by the process that holds it
        with pytest.raises(ValueError, match="no other process works in"):
            run("disk", path=locked)
        assert half_written.exists()
    run("disk", path=locked)  # of a process that was killed: its lock is gone, its file is removed
    assert not half_written.exists()
    unwritable = tmp_path / "thesis.txt" / "below"
    with pytest.raises(OSError, match="expected to write the manifest"):
        run("disk", path=unwritable)


def refused(**options):
    return lambda path: run("store", path=path, **options)


GROWS = hog.meta.GradientTransformation(lambda p: (), lambda p, g, state: (p - g, (p, *state)))
ARGUMENTS = {
    "disk without a directory": (lambda p: run("disk", path=None), ValueError, "memory='disk' without"),
    "a directory without disk": (refused(directory="x"), ValueError, "memory='store' with x"),
    "a directory that is a number": (lambda p: run("disk", path=3), TypeError, "directory: expected a path"),
    "a file": (lambda p: run("disk", path=Path(__file__)), ValueError, "expected a directory, got the file"),
    "log, with store": (refused(schedule="log"), ValueError, "schedule: expected memory='checkpoint' or 'disk'"),
    "a bar, with store": (refused(progress=True), ValueError, "progress: expected"),
    "an unknown schedule": (lambda p: run("checkpoint", schedule="all"), ValueError, "expected one of sqrt, log|sqrt, log"),
    "disk, by the implicit theorem": (lambda p: run("disk", path=p, method="cg"), ValueError, "differentiates no steps"),
    "an iterator": (lambda p: by_batches(iter([1])), TypeError, "which can be read once"),
    "a number of batches": (lambda p: by_batches(3), TypeError, "batches: expected a sequence"),
    "no batches": (lambda p: by_batches([]), ValueError, "one for each of 2 steps, got 0"),
    "an iterable that is empty": (lambda p: by_batches(Empty()), ValueError, "gave none"),
    "a schedule of momentum": (lambda p: hog.meta.scheduled(0.1, lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, 9), steps=3), ValueError, "cycle_momentum=False"),
    "a rule whose state grows": (lambda p: hog.meta.hypergradient(lambda p, h: p * h, lambda p, h: p * h, X.sum(), X.sum(), rule=GROWS, steps=2, memory="remat"), ValueError, "make all slots of the state in init"),
}  # fmt: skip


class Empty:
    def __iter__(self):
        return iter(())


def by_batches(batches):
    return hog.meta.hypergradient(
        lambda p, h: p * h, lambda p, h, batch: p * h, torch.tensor(1.0), torch.tensor(1.0),
        rule=hog.meta.sgd(0.1), steps=2, batches=batches,
    )  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_cannot_be_meant(call, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        call(tmp_path)


# Trainings that are not the same twice


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self):
        self.calls += 1
        return 1 + self.calls / 100


COUNTER, CHANGED = Counter(), torch.ones(3)
DIFFERENT = {
    "random numbers of Python": lambda x: x * (1 + random.random()),
    "a module that counts": lambda x: x * COUNTER(),
    "data changed in place": lambda x: x * CHANGED.mul_(1.01),
}


@pytest.mark.parametrize("memory", ["remat", "checkpoint"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_training_that_is_not_repeated_is_refused(name, memory):
    change = DIFFERENT[name]
    with pytest.raises(
        hog.errors.NondeterministicError, match=r"after step 9 of 9, by up to .*\[0\]\.w"
    ):
        hog.meta.hypergradient(
            lambda p, h: p["w"].sum(), lambda p, h: (h * (change(p["w"]) - 1).square()).sum(),
            {"w": torch.zeros(3) + 0.5}, torch.ones(3), rule=hog.meta.sgd(0.1), steps=9, memory=memory,
        )  # fmt: skip


# Batches, rounding


def test_a_loader_gives_the_same_batches_again_and_those_of_a_loop():
    torch.manual_seed(7)
    expected = [batch for _ in range(3) for (batch,) in loader_of_global()]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    batches = make_batches(loader_of_global(), 15)
    asked = [*range(15), *range(14, -1, -1), 3, 11, 0]
    for i in asked:
        (batch,) = batches.at(i)
        torch.rand(1)  # of the training
        assert torch.equal(batch, expected[i])
    torch.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), before)


def loader_of_global():
    return DataLoader(TensorDataset(torch.arange(24)), batch_size=5, shuffle=True)


def logistic(rate, dtype=F32):
    """w <- rate w (1 - w), by gradient descent: chaotic for rates near 4."""
    return hog.meta.hypergradient(
        lambda p, h: p["w"].sum(), lambda p, h: (p["w"].square() / 2 - h * (p["w"].square() / 2 - p["w"] ** 3 / 3)).sum(),
        {"w": torch.full((2,), 0.3, dtype=dtype)}, torch.tensor(rate, dtype=dtype), rule=hog.meta.sgd(1.0),
        steps=25, memory="checkpoint",
    )  # fmt: skip


def test_rounding_that_decides_the_loss_is_told_with_its_size():
    with pytest.warns(UserWarning, match="moves the outer loss by about .* of its value") as told:
        chaotic = logistic(3.99)
    size = float(str(told[0].message).partition("by about ")[2].split()[0])
    exact = logistic(3.99, dtype=F64)  # no warning
    # what float32 does to the result is of the size that was estimated
    error = float(abs(chaotic.value - exact.value) / exact.value)
    assert size / 50 < error < size * 50
    logistic(2.5)  # no warning


def test_leaving_out_is_predicted_as_scipy_and_a_training_by_hand_say():
    from scipy.stats import spearmanr

    outer, inner, start, hyper = problem(network())
    training = {"rule": RULES["sgd"], "steps": 20}
    found = hog.meta.hypergradient(outer, inner, start, hyper, memory="remat", **training)
    options = {"k": 2, "subsets": 12, "weights": "weights", **training}
    check = hog.meta.leave_k_out(found, outer, inner, start, hyper, factor=1 + 1e-4, **options)
    assert_close(check.actual, check.predicted, rtol=1e-2, atol=1e-7)
    left = hog.meta.leave_k_out(found, outer, inner, start, hyper, **options)
    weights = hyper["weights"].clone()
    weights[left.subsets[3]] = 0
    again = hog.meta.hypergradient(outer, inner, start, {**hyper, "weights": weights}, **training)
    assert_close(left.actual[3], again.value - found.value)
    slope = found.gradient["weights"]
    assert_close(left.predicted[3], -slope[left.subsets[3]].sum())
    assert left.correlation == pytest.approx(spearmanr(left.predicted, left.actual).statistic)
    assert "leave 2 out, 12 random subsets" in str(left)
    ties = torch.tensor([1.0, 2.0, 2.0, 0.0]), torch.tensor([3.0, 1.0, 1.0, 1.0])
    assert spearman(*ties) == pytest.approx(spearmanr(*ties).statistic)
    with pytest.raises(ValueError, match="weights: expected the name of a leaf"):
        hog.meta.leave_k_out(found, outer, inner, start, hyper, k=2, **training)
    with pytest.raises(ValueError, match="k: expected at most the number of weights, 24"):
        hog.meta.leave_k_out(found, outer, inner, start, hyper, **{**options, "k": 25})


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9, eta_min=1e-3),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.2, total_steps=13, cycle_momentum=False
    ),
}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, hog.meta.sgd, {}),
    "momentum": (torch.optim.SGD, hog.meta.sgd, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, hog.meta.adam, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, hog.meta.adamw, {"weight_decay": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_schedules_are_those_of_torch_step_for_step(kind, scheduler):
    theirs, ours, options = kind
    rate = hog.meta.scheduled(0.05, scheduler, steps=12)
    learned = torch.tensor(0.05, dtype=F64, requires_grad=True)
    of_learned = hog.meta.scheduled(learned, scheduler, steps=12)
    for i in range(12):
        assert_close(of_learned(i).item(), rate(i), rtol=1e-12, atol=0)
        (slope,) = torch.autograd.grad(of_learned(i), learned)
        assert_close(slope.item(), rate(i) / 0.05, rtol=1e-12, atol=0)
    rule = ours(rate, **options)
    leaf = randn(5).requires_grad_()
    params = {"w": leaf.detach().clone()}
    state = rule.init(params)
    optimizer = theirs([leaf], lr=0.05, **options)
    stepped = scheduler(optimizer)
    for _ in range(12):
        params, state = rule.update(params, {"w": params["w"].sin()}, state)
        leaf.grad = leaf.detach().sin()
        optimizer.step()
        stepped.step()
        assert relative(params, {"w": leaf.detach()}) < 1e-13
    with pytest.raises(ValueError, match="expected a step of 0 to 11, got 12"):
        rule.update(params, params, state)


@pytest.mark.parametrize("way", WAYS)
def test_each_step_has_a_learned_rate(way, tmp_path):
    rates = torch.linspace(0.1, 0.3, 7, dtype=F64)

    def found(rates, **options):
        return hog.meta.hypergradient(
            lambda p, h: (p - 1).square().sum(), lambda p, h: p.square().sum() / 2, randn(3), rates,
            rule=lambda h: hog.meta.sgd(lambda i: h[i]), steps=7, **options,
        )  # fmt: skip

    ours = found(rates, **kept(way, tmp_path)).gradient
    for i in range(7):  # p_7 = prod (1 - a_j) p_0
        shrunk = (1 - rates).prod() * randn(3)
        expected = (2 * (shrunk - 1) * -shrunk / (1 - rates[i])).sum()
        assert_close(ours[i], expected, rtol=1e-12, atol=1e-14)
