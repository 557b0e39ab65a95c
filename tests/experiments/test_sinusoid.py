"""The sinusoid experiment end to end: smoke runs, resume, test, Ctrl-C, bad input."""

import os
import re
import signal
import subprocess
import sys
import time
from math import pi
from pathlib import Path

import pytest
import torch
import yaml
from torch.testing import assert_close

from experiments import runs
from experiments.__main__ import main
from experiments.data.sinusoid import SinusoidTasks, WaveStream, sample_waves
from experiments.maml import JointRegression, MAMLRegression, errors_after
from experiments.tables.few_shot import summarize_errors
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    ROOT,
    assert_refused,
    assert_same_run,
    checkpoint,
    metrics,
    run,
    smoke,
)

SMOKE, fit, folder = smoke("maml/sinusoid")
JOINT = smoke("maml/sinusoid_joint")
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))

pytestmark = COMMAND_LINE


@DRAWN
def test_the_curve_and_the_config_are_kept(trained):
    trained(SMOKE)
    rows = metrics(folder())
    assert [int(r["step"]) for r in rows if r["train/loss"]] == [4, 9, 14, 19]
    assert rows[-1]["test/mse_after_10"] != ""
    assert (
        yaml.safe_load((folder() / "config.yaml").read_text())["data"]["init_args"]["shots"] == 10
    )


def test_the_table_has_the_baseline_beside_it(capsys):
    JOINT.fit()
    fit("--model.baseline", "runs/smoke/maml/sinusoid_joint")
    table = (folder() / "table.txt").read_text()
    alone = (JOINT.folder() / "table.txt").read_text()
    assert "MAML  diverged  joint training  diverged" in table
    # the baseline's column is what its own run printed
    for line in alone.splitlines()[4:8]:
        assert line.split()[1] in table


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--trainer.default_root_dir", "other"], "other"),
        (["--trainer.default_root_dir", "other", "--trainer.logger.save_dir", "third"], "third"),
    ],
)
def test_the_folder_of_all_runs(options, expected):
    fit(*options, "--trainer.max_steps", "1", "--test_after_fit", "false")
    assert [path.name for path in Path().iterdir()] == [expected]
    assert Path(expected, "smoke/maml/sinusoid/version_0/config.yaml").exists()


def test_a_run_goes_on_from_a_checkpoint_that_is_named(trained):
    trained(SMOKE, into="whole")
    fit("--trainer.max_steps", "10", "--test_after_fit", "false")
    fit("--ckpt_path", folder() / "last.ckpt")
    assert not folder(1).exists()
    assert_same_run(folder(), folder(root="whole"))


def test_the_same_seed_is_the_same_run_and_another_is_not():
    for version, seed in enumerate((0, 0, 1)):
        fit("--seed_everything", seed, "--test_after_fit", "false")
        assert folder(version).exists()
    assert_same_run(folder(), folder(1))
    first, other = (checkpoint(folder(v))["state_dict"] for v in (0, 2))
    assert any(not torch.equal(first[n], other[n]) for n in first)
    assert metrics(folder())[0]["train/loss"] != metrics(folder(2))[0]["train/loss"]


def test_test_and_validate_judge_the_checkpoint_in_its_own_folder(trained, capsys):
    trained(SMOKE)
    table, config = ((folder() / name).read_bytes() for name in ("table.txt", "config.yaml"))
    (folder() / "table.txt").unlink()
    capsys.readouterr()
    assert run("test", "--config", SMOKE) == 0  # the newest, when none is named
    assert (folder() / "table.txt").read_bytes() == table
    assert table.decode() in capsys.readouterr().out
    assert run("validate", "--config", SMOKE, "--ckpt_path", folder() / "last.ckpt") == 0
    assert "val/mse_after_10" in capsys.readouterr().out
    assert (folder() / "config.yaml").read_bytes() == config
    assert len([r for r in metrics(folder()) if r["train/loss"]]) == 4
    assert not folder(1).exists()


def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on():
    long = ["--data.iterations", "200", "--trainer.val_check_interval", "50"]
    long += ["--test_after_fit", "false"]
    command = [sys.executable, "-m", "experiments", "fit", "--config", str(SMOKE), *long]
    process = subprocess.Popen(
        [*command, "--checkpoint_every", "100", "--trainer.enable_progress_bar", "false"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    # metrics.csv is flushed late; the folder appears when training starts
    while not (folder() / "config.yaml").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    stopped = checkpoint(folder())["global_step"]
    assert 0 < stopped < 200
    assert f"--ckpt_path {folder() / 'last.ckpt'}" in printed
    end = min(stopped // 10 * 10 + 20, 200)
    some = [*long, "--checkpoint_every", "10", "--trainer.max_steps", end]
    fit(*some, "--ckpt_path", "last")
    fit(*some, "--trainer.logger.save_dir", "whole")
    assert checkpoint(folder())["global_step"] == end
    assert_same_run(folder(), folder(root="whole"))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(capsys, monkeypatch):
    honest = WaveStream.__iter__

    def poisoned(self):
        for number, (support, (x, y)) in enumerate(honest(self)):
            yield support, (x, y * (float("nan") if number == 15 else 1))

    monkeypatch.setattr(WaveStream, "__iter__", poisoned)
    assert run("fit", "--config", SMOKE) == 2
    error = capsys.readouterr().err
    assert "meta-loss: expected a finite number, got nan" in error
    assert checkpoint(folder())["global_step"] == 10


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(capsys, monkeypatch):
    save = __import__("lightning.pytorch").pytorch.Trainer.save_checkpoint

    def full(self, path, *args, **kwargs):
        if self.global_step == 20:
            Path(path).write_bytes(b"half a checkpoint")
            raise OSError(28, "No space left on device")
        save(self, path, *args, **kwargs)

    monkeypatch.setattr("lightning.pytorch.Trainer.save_checkpoint", full)
    assert run("fit", "--config", SMOKE) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "step 10 is intact" in error
    assert checkpoint(folder())["global_step"] == 10
    assert not list(folder().glob("*.part"))


def test_a_folder_that_cannot_be_written(capsys):
    assert run("fit", "--config", SMOKE, "--trainer.logger.save_dir", "/proc/nowhere") == 2
    assert "choose another folder" in capsys.readouterr().err


BAD = {
    "unknown key": (
        ["--model.inner_stepz", "3"],
        "no option 'inner_stepz'.*Did you mean 'inner_steps'",
    ),
    "unknown key of the run": (["--modle.x", "3"], "unrecognized arguments: --modle.x"),
    "wrong type": (["--model.inner_steps", "many"], "inner_steps: expected int, got 'many'"),
    "half a shot": (["--data.shots", "2.5"], "shots: expected int, got '2.5'"),
    "no inner step": (
        ["--model.inner_steps", "0"],
        "inner_steps: expected a whole number of at least 1, got 0",
    ),
    "negative learning rate": (["--model.lr", "-1"], "lr: expected a finite number greater than 0"),
    "inner rate of zero": (
        ["--model.inner_lr", "0"],
        "inner_lr: expected a finite number greater than 0",
    ),
    "empty support set": (["--data.shots", "0"], "shots: expected a whole number of at least 1"),
    "no units": (["--model.hidden", "[40, 0]"], "hidden: .*at least 1"),
    "unknown activation": (["--model.act", "gelu"], "act: expected one of relu"),
    "steps out of order": (
        ["--model.eval_steps", "[5, 1]"],
        r"ascending numbers of steps.*write \[1, 5\]",
    ),
    "no threads": (["--num_threads", "0"], "num_threads: .*at least 1"),
    "baseline that is not there": (
        ["--model.baseline", "runs/none"],
        "'runs/none', where there is none",
    ),
    "checkpoint that is not there": (["--ckpt_path", "no.ckpt"], "checkpoint: expected a file"),
    "checkpoint that is none": (["--ckpt_path", str(SMOKE)], "cannot be read as one"),
    "nothing to go on from": (["--ckpt_path", "last"], "where there is none; give another one"),
    "unknown accelerator": (["--trainer.accelerator", "3d"], "invalid accelerator name"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_paragraph_before_training(case, capsys):
    assert_refused(SMOKE, *BAD[case], capsys)


@pytest.mark.parametrize(
    "args", [[], ["fit"], ["fit", "--config", "no.yaml"], ["train"]], ids=" ".join
)
def test_bad_commands(args, capsys):
    assert main(args) == 2
    assert re.search("^error: .*experiments list", capsys.readouterr().err, re.M)


def test_a_baseline_of_another_size_is_refused_before_training(capsys):
    JOINT.fit("--model.hidden", "[3]")
    assert run("fit", "--config", SMOKE, "--model.baseline", "runs/smoke/maml/sinusoid_joint") == 2
    assert "checkpoint of the same network" in capsys.readouterr().err
    assert not folder().joinpath("last.ckpt").exists()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT / "configs")))
def test_every_config_is_read(path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(path), "--print_config"])
    assert stopped.value.code == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["trainer"]["accelerator"] == "auto"
    name = content["trainer"]["logger"]["init_args"]["name"]
    assert path == ROOT / "configs" / f"{name}.yaml"
    assert "--config" in path.read_text() or "smoke" in name


def test_the_configs_are_those_of_the_paper():
    read = lambda name: yaml.safe_load((ROOT / f"configs/maml/{name}.yaml").read_text())  # noqa: E731
    for name in ("sinusoid", "sinusoid_paper"):
        model, data = (read(name)[key]["init_args"] for key in ("model", "data"))
        assert (model["hidden"], model["inner_lr"], model["inner_steps"]) == ([40, 40], 0.01, 1)
        assert (model["lr"], data["tasks"], data["shots"]) == (0.001, 25, 10)
    assert read("sinusoid_paper")["data"]["init_args"]["iterations"] == 70000
    assert read("sinusoid_paper")["model"]["init_args"]["act"] == "relu"


def test_waves_are_sine_waves_in_the_ranges_of_the_paper():
    waves = sample_waves(2000, 10, 7, seed=3)
    for x, y in (waves.support, waves.query):
        assert_close(y, waves.amplitude * torch.sin(x - waves.phase))
        assert -5 <= x.min() < -4.9
        assert 4.9 < x.max() <= 5
    assert 0.1 <= waves.amplitude.min() < 0.2
    assert 4.9 < waves.amplitude.max() <= 5
    assert 0 <= waves.phase.min() < 0.05
    assert pi - 0.05 < waves.phase.max() <= pi
    assert waves.support[0].shape == (2000, 10, 1)
    assert waves.query[0].shape == (2000, 7, 1)


def test_the_stream_goes_on_where_it_was_and_never_repeats():
    stream = WaveStream(5, 2, 3, 3, seed=1)
    whole = [support[0] for support, _ in stream]
    assert len(whole) == 5
    assert len({tuple(x.flatten().tolist()) for x in whole}) == 5
    again, resumed = WaveStream(5, 2, 3, 3, seed=1), WaveStream(5, 2, 3, 3, seed=9)
    iterator = iter(again)
    next(iterator), next(iterator)
    resumed.load_state_dict(again.state_dict())
    rest = [support[0] for support, _ in resumed]
    assert_close(rest, whole[2:], rtol=0, atol=0)
    second_epoch = [support[0] for support, _ in stream]
    assert len(second_epoch) == 5
    assert not torch.equal(second_epoch[0], whole[0])


def test_held_out_tasks_do_not_depend_on_the_seed():
    a, b = SinusoidTasks(seed=0), SinusoidTasks(seed=1)
    assert_close(a.test_waves(), b.test_waves(), rtol=0, atol=0)
    (validation,) = a.val_dataloader()
    assert not torch.equal(validation[0][0][:100], a.test_waves().support[0][:100])


@pytest.mark.parametrize("kind", [MAMLRegression, JointRegression])
def test_errors_after_each_number_of_steps(kind):
    model = kind(hidden=[5], inner_lr=0.05)
    waves = sample_waves(4, 6, 8, seed=0)
    errors = errors_after(model.maml, (waves.support, waves.query), [0, 2, 3])
    assert errors.shape == (3, 4)
    for task in range(4):
        (sx, sy), (qx, qy) = (tuple(part[task] for part in pair) for pair in waves[:2])
        for row, steps in enumerate([0, 2, 3]):
            params = model.maml.adapt((sx, sy), steps=steps)
            expected = (model.maml(qx, params=params) - qy).square().mean()
            assert_close(errors[row, task], expected.detach())


def test_the_summary_leaves_diverged_tasks_out_and_counts_them():
    errors = torch.tensor([1.0, 2.0, 3.0, float("nan"), float("inf"), 1e6])
    mean, interval, diverged = summarize_errors(errors)
    assert (mean, diverged) == (2.0, 3)
    assert interval == pytest.approx(1.96 / 3**0.5)
    assert summarize_errors(torch.full((3,), float("nan"))).diverged == 3


def test_the_newest_version_is_found(tmp_path):
    for version in (2, 10, 9):
        (tmp_path / f"version_{version}").mkdir()
        (tmp_path / f"version_{version}" / "last.ckpt").touch()
    (tmp_path / "version_11").mkdir()  # nothing in it yet
    assert runs.find_checkpoint(tmp_path).parent.name == "version_10"
