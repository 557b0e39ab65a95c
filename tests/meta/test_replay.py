"""Gradients through long trainings: replays against a loop by hand, resumption, and what is refused."""

import os
import random
import signal
import subprocess
import sys
import textwrap
from math import isqrt
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import hoglib as hog
from experiments.benchmarks.memory import peak_bytes
from hoglib.meta import checkpoints
from tests.oracles import relative
from tests.tensors import F32, F64, randn

WAYS = {
    "store": {"memory": "store"},
    "remat": {"memory": "remat"},
    "checkpoint": {"memory": "checkpoint"},
    "checkpoint, log": {"memory": "checkpoint", "schedule": "log"},
    "disk": {"memory": "disk"},
    "disk, log": {"memory": "disk", "schedule": "log"},
}
REPLAYS = [name for name in WAYS if name != "store"]
X, Y = randn(24, 3), randn(24, 2)
VX, VY = randn(7, 3, seed=1), randn(7, 2, seed=1)


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2)).double()


def problem(model, whole=False):
    """Weights of all examples, learning rates of all steps, and the initial parameters."""
    of = hog.functional_loss(model, lambda outputs, y: (outputs - y).square().sum(1))
    start = {name: p.detach() for name, p in hog.trainable_params(model).items()}
    hyper = {
        "weights": torch.ones(24, dtype=F64),
        "log_lr": torch.tensor(-3.0, dtype=F64),
        "start": start,
    }

    def per_example(params, rows):
        return (of.call(params, X[rows]) - Y[rows]).square().sum(1)

    def inner(params, hyper, rows=None):
        rows = torch.arange(24) if rows is None else rows[0] if isinstance(rows, list) else rows
        return (hyper["weights"][rows] * per_example(params, rows)).mean()

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
    memory = {**WAYS[way], **({"directory": path} if "disk" in way else {})}
    return hog.meta.hypergradient(
        *problem(network(dropout)), rule=RULES[rule], steps=steps, batches=SOURCES[source](),
        **memory, **options,
    )  # fmt: skip


def by_hand(steps, batches):
    """The same training with AdamW written out, and autograd through all of it."""
    model = network()
    outer, inner, _, hyper = problem(model)
    leaves = [hyper["weights"], hyper["log_lr"], *hyper["start"].values()]
    own = [x.detach().clone().requires_grad_() for x in leaves]
    at = {
        "weights": own[0],
        "log_lr": own[1],
        "start": dict(zip(hyper["start"], own[2:], strict=True)),
    }
    params = at["start"]
    m = {n: torch.zeros_like(p) for n, p in params.items()}
    v = {n: torch.zeros_like(p) for n, p in params.items()}
    lr = own[1].exp()
    for t in range(1, steps + 1):
        value = inner(params, at, batches[t - 1])
        grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
        new = {}
        for (n, p), g in zip(params.items(), grads, strict=True):
            m[n] = 0.9 * m[n] + 0.1 * g
            v[n] = 0.999 * v[n] + 0.001 * g**2
            step = (m[n] / (1 - 0.9**t)) / ((v[n] / (1 - 0.999**t)).sqrt() + 0.05)
            new[n] = p * (1 - lr * 0.01) - lr * step
        params = new
    grads = torch.autograd.grad(outer(params, at), own)
    return params, {
        "weights": grads[0],
        "log_lr": grads[1],
        "start": dict(zip(params, grads[2:], strict=True)),
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_training_by_hand(way, tmp_path):
    params, expected = by_hand(11, SOURCES["list"]())
    found = run(way, path=tmp_path)
    assert relative(found.params, params) < 1e-13
    assert relative(found.gradient, expected) < 1e-12


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


@pytest.mark.parametrize("way", REPLAYS)
def test_micro_batches(way, tmp_path):
    expected = run("store", source="loader")
    found = run(way, source="loader", micro_batch=2, path=tmp_path)  # pieces of 2, 2 and 1
    assert relative(found.params, expected.params) < 1e-13
    assert relative(found.gradient, expected.gradient) < 1e-12


def test_micro_batches_with_dropout_are_the_graph_of_their_sum():
    """Each piece draws in its turn, forward and backward."""
    model = network(0.4)
    outer, inner, start, hyper = problem(model)

    def pieces(params, hyper, rows):
        return sum(len(part) / len(rows) * inner(params, hyper, part) for part in rows.split(4))

    found = []
    batches = [torch.arange(i, i + 9) for i in range(6)]
    for loss, options in ((pieces, {}), (inner, {"memory": "checkpoint", "micro_batch": 4})):
        torch.manual_seed(1)
        found.append(
            hog.meta.hypergradient(
                outer, loss, start, hyper, rule=RULES["sgd"], batches=batches, **options
            )
        )
    assert relative(found[1].gradient, found[0].gradient) < 1e-12


def test_a_graph_is_held_of_a_piece_only():
    def peak(**options):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )
        of = hog.functional_loss(model, F.mse_loss)
        x, y = randn(4096, 3, dtype=F32), randn(4096, 1, dtype=F32)
        inner = lambda p, h, batch: h * of(p, batch)  # noqa: E731
        given = hog.trainable_params(model), torch.tensor(1.0)
        return peak_bytes(
            lambda: hog.meta.hypergradient(
                lambda p, h: p["0.weight"].square().sum(), inner, *given, rule=hog.meta.sgd(0.1),
                batches=lambda i: (x, y), steps=4, memory="checkpoint", **options,
            ), torch.device("cpu"),
        )  # fmt: skip

    assert peak(micro_batch=256) < 0.2 * peak()


def states_and_files(monkeypatch, schedule, steps, path):
    """The most states in memory, and the most files, during a gradient."""
    most = {"memory": 0, "files": 0}
    save, put = checkpoints.InMemory.save, checkpoints.OnDisk.put

    def counting_save(self, *args):
        save(self, *args)
        most["memory"] = max(most["memory"], len(self._states))

    def counting_put(self, *args):
        put(self, *args)
        most["files"] = max(most["files"], len(self.positions()))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.InMemory, "save", counting_save)
        patch.setattr(checkpoints.OnDisk, "put", counting_put)
        run(f"disk{schedule}", "sgd", "none", steps, path=path)
    return most


def test_space_is_bounded(monkeypatch, tmp_path):
    for steps in (16, 64):
        root = isqrt(steps)
        found = states_and_files(monkeypatch, "", steps, tmp_path / f"sqrt-{steps}")
        assert found["memory"] <= root
        assert found["files"] <= root + 1
        found = states_and_files(monkeypatch, ", log", steps, tmp_path / f"log-{steps}")
        assert found["memory"] == 0
        assert found["files"] <= steps.bit_length() + 2


@pytest.mark.parametrize("schedule", ["sqrt", "log"])
def test_memory_does_not_grow_with_the_steps(schedule, tmp_path):
    """Tensors alive at once, with states on disk: of a few steps by "log", of sqrt(steps) by "sqrt"."""
    width = 64
    params = {"w": randn(width, width, seed=3)}
    inner = lambda p, h, x: (p["w"] @ x).tanh().square().mean() * h  # noqa: E731

    def peak(steps):
        return peak_bytes(
            lambda: hog.meta.hypergradient(
                lambda p, h: p["w"].square().sum(), inner, params, torch.tensor(1.0, dtype=F64),
                rule=hog.meta.sgd(0.1), steps=steps, batches=lambda i: randn(width, seed=i),
                memory="disk", schedule=schedule, directory=tmp_path / str(steps),
            ), torch.device("cpu"),
        )  # fmt: skip

    growth = (peak(100) - peak(25)) / (8 * width**2)  # in copies of the parameters
    assert growth < 0.5 if schedule == "log" else 4 < growth < 7


# Interruptions

SCRIPT = """
    import os, signal, sys
    import torch
    from tests.meta import test_replay as here

    kill_at, path, way, entry = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    calls = 0
    forward = here.nn.Linear.forward

    def counted(self, x):
        global calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, x)

    here.nn.Linear.forward = counted
    getattr(here, entry)(way, path)
    print(calls)
"""


def whole(way, path):
    return run(way, "adam", "augmented", 30, dropout=0.2, path=path)


def adapted(way, path):
    torch.manual_seed(4)
    model = network(0.2)
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    options = {**WAYS[way], **({"directory": path} if "disk" in way else {})}
    x = X.clone().requires_grad_()
    found = hog.meta.adapt(loss, params, (x, Y), hog.meta.adam(0.05, eps=0.1), steps=30, **options)
    value = sum(p.square().sum() for p in found.values())
    return [*found.values()], torch.autograd.grad(value, [*params.values(), x])


def killed(kill_at, path, way, entry):
    arguments = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(kill_at), str(path), way, entry]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        arguments, cwd=Path(__file__).parents[2], env=environment, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.parametrize(
    ("entry", "way", "kill_at"),
    # two linear layers a call: 60 in the forward part, then the replay
    [
        (whole, "disk", 41),
        (whole, "disk, log", 150),
        (adapted, "disk", 130),
        (adapted, "disk, log", 55),
    ],
    ids=["forward", "backward", "adapt, backward", "adapt, forward"],
)
def test_a_killed_process_is_resumed_bit_for_bit(entry, way, kill_at, tmp_path, monkeypatch):
    expected = entry(way, tmp_path / "uninterrupted")
    killed(kill_at, tmp_path / "killed", way, entry.__name__)
    calls, forward = [0], nn.Linear.forward

    def counted(self, x):
        calls[0] += 1
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    counts, found = [], []
    for directory in ("resumed", "killed"):
        calls[0] = 0
        found.append(entry(way, tmp_path / directory))
        counts.append(calls[0])
    assert counts[1] < counts[0] - 20  # what was done is not done again
    for other in found:
        assert_close(other, expected, rtol=0, atol=0)
    calls[0] = 0
    assert_close(entry(way, tmp_path / "killed"), expected, rtol=0, atol=0)  # after its end
    assert calls[0] < 10
