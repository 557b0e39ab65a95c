"""Every experiment with two processes: it ends with the reports of one, or is refused before it starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from experiments.training.processes import UNUSED, choose_strategy, part_of
from hoglib.errors import ArgumentValueError
from tests.experiments.command import (
    COMMAND_LINE,
    ROOT,
    assert_same_run,
    checkpoint,
    metrics,
    run,
    smoke,
)
from tests.experiments.test_runs import EXPERIMENTS, OF_EVERY_RUN
from tests.long_tail import FULL

pytestmark = COMMAND_LINE
TWO = ("--trainer.strategy", "ddp", "--trainer.devices", "2", "--trainer.accelerator", "cpu")
OF_ONE_PROCESS = {
    "curvature/influence", "curvature/kfac", "curvature/newton_cg", "meta/data_values",
    "meta/reweight_digits", "pinn/allen_cahn", "pinn/helium", "pinn/plate", "pinn/poisson",
}  # fmt: skip
SHARED = sorted(EXPERIMENTS.keys() - OF_ONE_PROCESS)


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
    config, _, folder = smoke(name)
    printed, found = fit(config, folder=tmp_path), tmp_path / folder()
    assert {p.name for p in found.iterdir()} == OF_EVERY_RUN | EXPERIMENTS[name].reports
    assert printed.count((found / "table.txt").read_text()) == 1  # the first process alone prints
    assert checkpoint(found)["global_step"] == EXPERIMENTS[name].steps


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


def until(happened, seconds):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


ENDS = {
    "Ctrl-C in one": (signal.SIGINT, 0, 130, "Detected KeyboardInterrupt"),
    "one is killed": (signal.SIGKILL, 1, 2, "error: expected all processes to run to the end"),
}


LONG = "--data.iterations", "400"


def ended(folder, sent, rank, code, message):
    """The folder of a run that ended early, in one of whose processes something happened."""
    config, _, own = smoke("gan/mixture")
    process = start(config, *LONG, folder=folder)
    try:
        found = folder / own()
        until((found / "last.ckpt").exists, 120)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        (other,) = [int(pid) for pid, command in commands.items() if "experiments" in command]
        os.kill((process.pid, other)[rank], sent)
        printed, errors = process.communicate(timeout=120)
        until(lambda: not Path(f"/proc/{other}").exists(), 60)
    finally:
        process.kill()
    assert process.returncode == code, errors
    assert message in errors
    assert "Traceback" not in errors
    assert "resume it with --ckpt_path" in printed
    assert checkpoint(found)["global_step"] < 800
    return found


@pytest.mark.parametrize("what", ENDS.values(), ids=ENDS)
def test_the_end_of_one_process_is_the_end_of_both(what, tmp_path):
    ended(tmp_path, *what)


@FULL
def test_a_run_of_two_processes_resumes(tmp_path):
    config, _, folder = smoke("gan/mixture")
    found = ended(tmp_path, *ENDS["one is killed"])
    fit(config, *LONG, "--ckpt_path", "last", folder=tmp_path)
    fit(config, *LONG, folder=tmp_path)
    assert_same_run(found, tmp_path / folder(1))


@pytest.mark.parametrize("name", sorted(OF_ONE_PROCESS))
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
