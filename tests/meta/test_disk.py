"""MAML with states of inner loops in files: against the stored graph, interrupted, and without space."""

import itertools
import json
import os
import resource
import signal
from math import isqrt, log2

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from experiments.benchmarks.memory import peak_bytes
from hoglib.meta import checkpoints
from tests.long_tail import all_but
from tests.oracles import relative
from tests.several_processes import exit_code_of, found_by_each
from tests.tensors import F64, randn

SCHEDULES = ["sqrt", "log"]
STEPS = 7


def network(norm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(5) if norm else nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), middle, nn.Linear(5, 2)).double()


def tasks(count=3):
    support = randn(count, 6, 3, seed=1), randn(count, 6, 2, seed=2)
    return support, (randn(count, 4, 3, seed=3), randn(count, 4, 2, seed=4))


def of_different_sizes():
    (x, y), (u, v) = tasks()
    return [((x[i][: 4 + i], y[i][: 4 + i]), (u[i], v[i])) for i in range(3)]


class LearnedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=F64))

    def forward(self, outputs, y):
        return (self.scale * outputs - y).square().mean()


def maml_of(model, **options):
    given = {"inner_lr": 0.1, "inner_steps": STEPS, "over_tasks": "loop", **options}
    return hog.MAML(model, F.mse_loss, **given)


def result(maml, given):
    """The loss and the gradients by all that is learned."""
    for p in maml.parameters():
        p.grad = None
    torch.manual_seed(5)
    value = maml.loss(given)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in maml.parameters() if p.grad is not None)]


WEIGHTS = [0.0, 0.2, 0.0, 0.3, 0.1, 0.0, 0.4]
OPTIONS = {
    "sgd": {},
    "adam": {"rule": "adam", "rule_options": {"eps": 0.1}},
    "losses after steps": {"step_weights": WEIGHTS},
    "learned rates": {"learn_lr": "parameter", "lr_per_step": True, "step_weights": WEIGHTS},
    "a learned loss": {"inner_loss": LearnedLoss()},
    "first order": {"first_order": True},
    "truncated": {"truncate": 3},
    "of the head": {"inner_params": ["3"]},
}


# What differs between options is in each stored state, whichever steps a schedule stores.
@pytest.mark.parametrize(
    ("name", "schedule"),
    all_but(
        lambda name, schedule: schedule == "log" or name in ("adam", "learned rates"),
        itertools.product(OPTIONS, SCHEDULES),
    ),
)
def test_losses_are_those_of_the_stored_graph(name, schedule, tmp_path):
    options = OPTIONS[name]
    for given, norm in ((tasks(), False), (of_different_sizes(), True)):
        expected = result(maml_of(network(norm), **options), given)
        maml = maml_of(
            network(norm), memory="disk", schedule=schedule, directory=tmp_path, **options
        )
        for _ in range(2):  # the second replaces what the first left
            found = result(maml, given)
            assert len(found) == len(expected)
            assert all(relative(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))
        left = {path.name for path in (tmp_path / "loss").iterdir()}
        assert left == {"manifest.json", "lock"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_adapted_parameters_are_differentiable_twice(schedule, tmp_path):
    """Of two tasks at once, whose files replace each other's."""
    found = []
    for memory in ({}, {"memory": "disk", "schedule": schedule, "directory": tmp_path}):
        model = network()
        maml = maml_of(model, learn_lr="model", **memory)
        inputs = list(maml.parameters())
        torch.manual_seed(6)
        (x, y), _ = tasks()
        adapted = [maml.adapt((x[i], y[i])) for i in range(2)]
        value = sum(p.sin().sum() for part in adapted for p in part.values())
        first = torch.autograd.grad(value, inputs, retain_graph=True)
        again = torch.autograd.grad(value, inputs, create_graph=True)
        product = torch.autograd.grad(sum(g.square().sum() for g in again), inputs)
        found.append([*adapted[0].values(), *adapted[1].values(), *first, *again, *product])
    assert all(relative(a, b) < 1e-12 for a, b in zip(found[1], found[0], strict=True))


def test_dropout_is_drawn_anew_by_each_adaptation_and_loss(tmp_path):
    maml = maml_of(network(), memory="disk", directory=tmp_path)
    (x, y), _ = tasks()
    torch.manual_seed(0)
    with torch.no_grad():
        first, second = (maml.adapt((x[0], y[0])) for _ in range(2))
        losses = [maml.loss(tasks()) for _ in range(2)]
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert losses[0] != losses[1]


# Space


def test_files_and_memory_are_bounded(tmp_path, monkeypatch):
    most, put = {}, checkpoints.OnDisk.put

    def counting(self, *args):
        put(self, *args)
        size = sum(path.stat().st_size for path in tmp_path.rglob("*.pt"))
        most["files"] = max(most.get("files", 0), size)

    monkeypatch.setattr(checkpoints.OnDisk, "put", counting)
    width, found = 48, {}
    for schedule, steps in itertools.product(SCHEDULES, (16, 64)):
        most.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, width), nn.Tanh()).double()
        maml = maml_of(
            model, memory="disk", schedule=schedule, directory=tmp_path, inner_steps=steps
        )
        given = [((randn(2, width), randn(2, width)),) * 2]
        peak = peak_bytes(lambda: maml.loss(given), torch.device("cpu"))  # noqa: B023
        found[schedule, steps] = most["files"] / (8 * width**2), peak / (8 * width**2)
    for steps in (16, 64):  # copies of the parameters: states, and those of backward and a result
        assert found["sqrt", steps][0] < isqrt(steps) + 5
        assert found["log", steps][0] < log2(steps) + 6.5
    assert found["sqrt", 64][1] < found["sqrt", 16][1] + 5
    assert found["log", 64][1] < found["log", 16][1] + 0.5


# Interruptions


def interrupted(path, schedule="sqrt"):
    options = {"memory": "disk", "schedule": schedule, "directory": path, "step_weights": WEIGHTS}
    return result(maml_of(network(), rule="adam", rule_options={"eps": 0.1}, **options), tasks())


def ends_in_call(number, end):
    """A linear layer that ends in its call of this number, and how many calls there were."""
    calls, forward = itertools.count(1), nn.Linear.forward

    def counted(self, x):
        if next(calls) == number:
            end()
        return forward(self, x)

    return counted, lambda: next(calls)


def killed(number, path, schedule):
    torch.set_num_threads(1)
    nn.Linear.forward, _ = ends_in_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    interrupted(path, schedule)


@pytest.mark.parametrize(
    ("number", "schedule", "saved"),
    [(20, "sqrt", 2), (60, "log", 30), (90, "sqrt", 60), (170, "log", 130)],
    ids=["first task", "its backward", "second task", "last task"],
)
def test_a_killed_process_is_resumed_bit_for_bit(number, schedule, saved, tmp_path, monkeypatch):
    whole, left = tmp_path / "whole", tmp_path / "left"
    counting, calls_of_whole = ends_in_call(0, None)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", counting)
        expected = interrupted(whole, schedule)
    assert exit_code_of(killed, number, left, schedule) == -signal.SIGKILL
    torch.manual_seed(99)  # the random numbers are those of the first process
    counting, calls_of_rest = ends_in_call(0, None)
    monkeypatch.setattr(nn.Linear, "forward", counting)
    assert_close(interrupted(left, schedule), expected, rtol=0, atol=0)
    assert calls_of_rest() < calls_of_whole() - saved  # what was done is not done again
    assert {path.name for path in (left / "loss").iterdir()} == {"manifest.json", "lock"}


def stop():
    raise KeyboardInterrupt


@pytest.mark.parametrize("number", [30, 90])
def test_after_ctrl_c_the_same_loss_goes_on_and_another_one_begins(number, tmp_path, monkeypatch):
    expected = interrupted(tmp_path / "whole")
    left = tmp_path / "left"
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", ends_in_call(number, stop)[0])
        with pytest.raises(KeyboardInterrupt):
            interrupted(left)
    assert list(left.rglob("*.pt"))
    assert not list(left.rglob("*.tmp"))
    other = maml_of(network(), memory="disk", directory=left)
    assert_close(result(other, tasks(2)), result(maml_of(network()), tasks(2)))
    assert_close(interrupted(left), expected, rtol=0, atol=0)


def without_space(path, found):
    """Files are at most so long that a step's fits, and a result does not."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (300, 4000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            interrupted(path)
            raised = "nothing"
        except OSError as error:
            raised = f"{type(error).__name__}: {error}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        broken = [
            x.name for x in path.rglob("*.pt") if checkpoints.OnDisk(x.parent, {}, []).get(x.name) is None
        ]  # fmt: skip
        with found.open("a") as stream:
            print(json.dumps([raised, broken, [x.name for x in path.rglob("*.tmp")]]), file=stream)


def test_a_full_disk_is_told_and_leaves_whole_files(tmp_path):
    assert exit_code_of(without_space, tmp_path / "files", tmp_path / "found") == 0
    expected = interrupted(tmp_path / "whole")
    lines = (tmp_path / "found").read_text().splitlines()
    assert len(lines) == 2
    for raised, broken, temporary in map(json.loads, lines):
        assert "OutputError" in raised
        assert "Give it space, name another directory" in raised
        assert not broken
        assert not temporary
    assert_close(interrupted(tmp_path / "files"), expected, rtol=0, atol=0)


def test_damaged_results_are_computed_again(tmp_path, monkeypatch):
    expected = interrupted(tmp_path / "whole")
    left = tmp_path / "left"
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", ends_in_call(130, stop)[0])
        with pytest.raises(KeyboardInterrupt):
            interrupted(left)
    first = left / "loss" / "result-000000.pt"
    first.write_bytes(first.read_bytes()[:100])
    assert_close(interrupted(left), expected, rtol=0, atol=0)


# Several processes


def of_each(rank, folder, found):
    given = tasks(2)
    mine, weight = hog.meta.shard(given)
    maml = maml_of(network(), memory="disk", directory=folder / "files")
    grads = result(maml, mine)[1:]
    alone = result(maml_of(network()), mine)[1:]
    found["equal"] = all(relative(a, b) < 1e-12 for a, b in zip(grads, alone, strict=True))
    found["weight"] = weight


def test_each_process_has_a_directory_of_its_own(tmp_path):
    assert found_by_each(of_each, tmp_path) == [{"equal": True, "weight": 1.0}] * 2
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [
        "process-000000", "process-000001",
    ]  # fmt: skip


# What cannot be meant


def test_the_directory_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "thesis.txt").write_text("x")
    maml = maml_of(network(), memory="disk", directory=tmp_path)
    with pytest.raises(ValueError, match=r"which holds thesis\.txt"):
        maml.loss(tasks())
    assert (tmp_path / "loss" / "thesis.txt").exists()


OTHERS = {
    "shapes": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2)).double(), F.mse_loss),
    "dtypes": (lambda: network().float(), F.mse_loss),
    "loss": (network, F.l1_loss),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_unfinished_loss_of_another_model_is_refused(name, tmp_path, monkeypatch):
    expected = interrupted(tmp_path / "whole")
    left = tmp_path / "left"
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", ends_in_call(90, stop)[0])
        with pytest.raises(KeyboardInterrupt):
            interrupted(left)
    model, criterion = OTHERS[name]
    model = model()
    dtype = next(model.parameters()).dtype
    other = hog.MAML(model, criterion, inner_steps=STEPS, memory="disk", directory=left)
    given = [tuple((x.to(dtype), y.to(dtype)) for x, y in task) for task in of_different_sizes()]
    with pytest.raises(ValueError, match=f"of the same model, got .*its {name} .*Name another"):
        other.loss(given)
    assert_close(
        interrupted(left), expected, rtol=0, atol=0
    )  # nothing was lost, and then it is done
    assert torch.isfinite(other.loss(given))


@pytest.mark.parametrize("of", ["layers", "buffers", "mode", "inner loss"])
def test_results_of_tasks_are_those_of_the_same_layers_and_buffers(of, tmp_path, monkeypatch):
    def changed():
        model, options = network(norm=True), {}
        if of == "layers":
            model[1] = nn.ReLU()
        elif of == "mode":
            model.eval()
        elif of == "buffers":
            model[2].running_mean.fill_(0.5)
            options["batch_norm"] = "frozen"
        else:
            options["inner_loss"] = F.l1_loss
        return model, options

    options = {"batch_norm": "frozen"} if of == "buffers" else {}
    first = maml_of(network(norm=True), memory="disk", directory=tmp_path, **options)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", ends_in_call(90, stop)[0])
        with pytest.raises(KeyboardInterrupt):
            result(first, tasks())
    assert list(tmp_path.rglob("result-*.pt"))
    model, options = changed()
    found = result(maml_of(model, memory="disk", directory=tmp_path, **options), tasks())
    model, options = changed()
    expected = result(maml_of(model, **options), tasks())
    assert all(relative(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))


REFUSED = {
    "no directory": ({"directory": None}, "directory: expected one with memory='disk'"),
    "a directory without": ({"memory": "remat"}, "directory: expected one with memory='disk'"),
    "all tasks at once": ({"over_tasks": "vmap"}, "over_tasks='vmap', got 'disk'; use 'loop'"),
    "a whole graph": ({"compile": True}, "compile=True, got 'disk'; add remat="),
    "statistics of each step": ({"batch_norm": "per_step"}, "batch_norm='per_step', got 'disk'"),
    "a schedule": ({"schedule": "all"}, "schedule: expected"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_go_together(options, message, tmp_path):
    given = {"memory": "disk", "directory": tmp_path, **options}
    with pytest.raises(ValueError, match=message):
        maml_of(network(), **given)


def test_options_may_be_changed_later(tmp_path):
    maml = maml_of(network())
    expected = result(maml, tasks())
    with pytest.raises(ValueError, match="name where its files go"):
        maml.memory = "disk"
    maml.directory, maml.memory = tmp_path, "disk"
    assert_close(result(maml, tasks()), expected)
    with pytest.raises(ValueError, match="compile=True, got 'disk'"):
        maml.compiled = True
    maml.over_tasks = "vmap"
    with pytest.raises(ValueError, match="over_tasks='vmap', got 'disk'"):
        maml.loss(tasks())
    maml.memory = "store"
    assert torch.isfinite(maml.loss(tasks()))
