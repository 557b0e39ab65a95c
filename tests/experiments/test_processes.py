"""Every experiment with two processes: it ends with the reports of one, or is refused before it starts."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from experiments.shared.processes import UNUSED, choose_strategy, part_of
from experiments.shared.stream import Stream
from hoglib.errors import ArgumentValueError
from tests.experiments.command import (
    COMMAND_LINE,
    ROOT,
    assert_same_run,
    checkpoint,
    metrics,
    options_of,
    run,
    smoke,
)
from tests.experiments.test_runs import EXPERIMENTS, OF_EVERY_RUN
from tests.long_tail import FULL, all_but, only
from tests.several_processes import exit_code_of, found_by_each

pytestmark = COMMAND_LINE
TWO = ("--trainer.strategy", "ddp", "--trainer.devices", "2", "--trainer.accelerator", "cpu")


def shares(name):
    """Whether several processes may train it."""
    package, _, kind = options_of(name)["model"]["class_path"].rpartition(".")
    return bool(getattr(import_module(package), kind).shared)


SHARED = sorted(filter(shares, EXPERIMENTS))


def start(config, *options, folder):
    """A run in processes of its own, as Lightning starts them."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", "fit", "--config", config, *TWO, *options,
         "--trainer.enable_progress_bar", "false"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def fit(config, *options, folder):
    """What a run printed."""
    process = start(config, *options, folder=folder)
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return printed


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gan/mixture" else FULL) for name in SHARED]
)
def test_two_processes_train_together(name, tmp_path):
    """In processes that are there, as torchrun starts them; the runs below are started by Lightning."""
    _, _, folder = smoke(name)
    ranks = found_by_each(partial(in_a_process, name), tmp_path)
    found = tmp_path / folder()
    assert {p.name for p in found.iterdir()} == OF_EVERY_RUN | EXPERIMENTS[name].reports
    assert [rank["status"] for rank in ranks] == [0, 0]
    table = (found / "table.txt").read_text()
    assert [rank["printed"].count(table) for rank in ranks] == [1, 0]
    assert checkpoint(found)["global_step"] == EXPERIMENTS[name].steps


def in_a_process(name, rank, folder, found, *options):
    os.chdir(folder)
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        found["status"] = run("fit", "--config", smoke(name).config, *TWO, *options)
    found |= {"printed": printed.getvalue(), "errors": errors.getvalue()}


def shorter(rank, folder, found):
    in_a_process("gan/mixture", rank, folder, found, "--data.iterations", 20 - 10 * rank)


def test_processes_with_other_options_end_before_they_train(tmp_path):
    for found in found_by_each(shorter, tmp_path):
        assert found["status"] == 2
        told = "error: data.iterations: expected the same in all processes, got 10 in process 1 and 20 in"
        assert told in found["errors"]


def test_ctrl_c_in_one_process_ends_both_after_the_same_step(tmp_path):
    ranks = found_by_each(interrupted, tmp_path)
    assert [rank["status"] for rank in ranks] == [130, 130]
    assert [rank["printed"].count("resume it with: ") for rank in ranks] == [1, 0]
    assert 20 < checkpoint(tmp_path / smoke("gan/mixture").folder())["global_step"] < 40


def interrupted(rank, folder, found):
    honest = Stream.__iter__

    def stream(self):
        for number, batch in enumerate(honest(self)):
            if (rank, number) == (1, 12):
                signal.raise_signal(signal.SIGINT)
            yield batch

    Stream.__iter__ = stream
    in_a_process("gan/mixture", rank, folder, found)


@FULL
def test_two_processes_equal_one(trained, tmp_path):
    """Full batches of an odd number of images, and no random numbers."""
    config, _, folder = smoke("curvature/digits")
    trained(config)
    own = folder()
    fit(config, folder=tmp_path)
    there = tmp_path / folder(root="runs")
    for a, b in zip(metrics(own), metrics(there), strict=True):
        for key, value in a.items():
            assert bool(value) == bool(b[key]), key
            assert not value or float(value) == pytest.approx(float(b[key]), rel=1e-3), key


def until(happened):
    end = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def runs(pid):
    """Whether a process runs: a zombie, whose new parent has not looked at it yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


STOPPED, LOST = "Detected KeyboardInterrupt", "error: expected all processes to run to the end"
ENDS = {  # what is sent to which processes, the exit code of the first, and the only message
    "Ctrl-C in a terminal": (signal.SIGINT, (0, 1), 130, STOPPED),
    "the first is killed": (signal.SIGKILL, (0,), -signal.SIGKILL, LOST),
    "the second is killed": (signal.SIGKILL, (1,), 2, LOST),
}
LONG = "--data.iterations", "400"


def ended(folder, sent, ranks, code, message):
    """The folder of a run that ended early, in some of whose processes something happened."""
    config, _, own = smoke("gan/mixture")
    process = start(config, *LONG, folder=folder)
    try:
        found = folder / own()
        until((found / "last.ckpt").exists)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        (other,) = [int(pid) for pid, command in commands.items() if "experiments" in command]
        for rank in ranks:
            os.kill((process.pid, other)[rank], sent)
        printed, errors = process.communicate(timeout=600)  # the other one writes there too
        until(lambda: not runs(other))
    finally:
        process.kill()
    assert process.returncode == code, errors
    assert errors.count(message) == 1, errors
    assert errors.count("error:") == (message == LOST), errors
    assert "Traceback" not in errors
    assert printed.count("resume it with: ") == (code >= 0)
    assert checkpoint(found)["global_step"] < 800
    return found


@pytest.mark.parametrize("name", all_but(only("the second is killed"), ENDS))
def test_the_end_of_one_process_is_the_end_of_both(name, tmp_path):
    ended(tmp_path, *ENDS[name])


def test_what_is_left_is_killed_where_it_does_not_end():
    """As where it waits on a GPU for the process that ended."""
    code = """
import os, pathlib, subprocess, sys, time
from types import SimpleNamespace
from experiments.shared import processes
os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), 2)
processes.GRACE_SECONDS = 0.1
started = [subprocess.Popen([sys.executable, "-c", f"import sys, time; {body}"]) for body in
           ("sys.exit(3)", "time.sleep(1000)")]
launcher = SimpleNamespace(procs=started)
trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))
pathlib.Path("pid").write_text(str(started[1].pid))
for _ in "fit", "test":
    processes.ProcessWatch().setup(trainer, None, "")
assert not started and len(launcher.procs) == 2
time.sleep(1000)
"""
    assert exit_code_of(exec, code, {}) == 2
    assert Path("errors").read_text().count(LOST) == 1
    until(lambda: not runs(Path("pid").read_text()))


@FULL
def test_a_run_of_two_processes_resumes(tmp_path):
    config, _, folder = smoke("gan/mixture")
    found = ended(tmp_path, *ENDS["the second is killed"])
    fit(config, *LONG, "--ckpt_path", "last", folder=tmp_path)
    fit(config, *LONG, folder=tmp_path)
    assert_same_run(found, tmp_path / folder(1))


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - {*SHARED}))
def test_experiments_of_one_process_are_refused(name, capsys):
    config, _, _ = smoke(name)
    assert run("fit", "--config", config, *TWO) == 2
    error = capsys.readouterr().err
    assert "trainer: expected one process for" in error
    assert "use --trainer.devices 1" in error


def test_the_parts_of_processes_are_the_batch():
    batch = {"x": torch.arange(7), "y": [torch.arange(7.0)[:, None]]}
    parts = [part_of(batch, rank, 3) for rank in range(3)]
    assert [len(part["x"]) for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([part["x"] for part in parts]).sort().values, batch["x"])
    with pytest.raises(ArgumentValueError, match="expected at least 8 examples"):
        part_of(batch, 0, 8)


def test_ddp_of_alternating_steps_looks_for_unused_parameters():
    class Module:
        automatic_optimization = False

    assert choose_strategy("ddp", Module()) == UNUSED
    assert choose_strategy("auto", Module()) == "auto"
