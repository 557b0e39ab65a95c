"""Every experiment with two processes: it ends with the reports of one, or is refused before it starts."""

import os
import subprocess
import sys

import pytest
import torch

from experiments.training.processes import UNUSED, choose_strategy, part_of
from hoglib.errors import ArgumentValueError
from tests.experiments.command import COMMAND_LINE, ROOT, checkpoint, metrics, run, smoke
from tests.experiments.test_runs import EXPERIMENTS, OF_EVERY_RUN
from tests.long_tail import FULL

pytestmark = COMMAND_LINE
TWO = ("--trainer.strategy", "ddp", "--trainer.devices", "2", "--trainer.accelerator", "cpu")
OF_ONE_PROCESS = {
    "curvature/influence", "curvature/kfac", "curvature/newton_cg", "meta/data_values",
    "meta/reweight_digits", "pinn/allen_cahn", "pinn/helium", "pinn/plate", "pinn/poisson",
}  # fmt: skip
SHARED = sorted(EXPERIMENTS.keys() - OF_ONE_PROCESS)


def fit(config, *options, folder):
    """A run in processes of its own, as Lightning starts them; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments", "fit", "--config", config, *TWO, *options,
         "--trainer.enable_progress_bar", "false"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


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
