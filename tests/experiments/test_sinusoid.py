"""The sinusoid experiment end to end: smoke runs, resume, test, Ctrl-C, bad input."""

import csv
import locale
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from math import pi
from pathlib import Path

import pytest
import torch
import yaml
from torch.testing import assert_close

from experiments import runs
from experiments.__main__ import main
from experiments.few_shot.maml import JointRegression, MAMLRegression
from experiments.few_shot.sinusoid import sample_waves
from experiments.few_shot.table import summarize_errors
from experiments.logs import Rows
from experiments.shared.learners import errors_after
from tests.experiments.command import (
    COMMAND_LINE,
    ROOT,
    assert_refused,
    assert_same_run,
    checkpoint,
    metrics,
    run,
    smoke,
)
from tests.rows import rows

SMOKE, fit, folder = smoke("maml/sinusoid")
JOINT = smoke("maml/sinusoid_joint")
CONFIGS = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if "smoke" not in path.parts]

pytestmark = COMMAND_LINE


def test_the_table_has_the_baseline_beside_it(capsys):
    JOINT.fit()
    fit("--model.baseline", "runs/smoke/maml/sinusoid_joint")
    table = (folder() / "table.txt").read_text()
    alone = (JOINT.folder() / "table.txt").read_text()
    assert "MAML  diverged  joint training  diverged" in table
    # the baseline's column is what its own run printed
    for line in alone.splitlines()[4:8]:
        assert line.split()[1] in table


def test_the_folder_of_all_runs():
    few = ("--data.iterations", "8", "--trainer.max_steps", "2", "--test_after_fit", "false")
    fit("--trainer.default_root_dir", "other", *few)  # fewer than val_check_interval
    assert [path.name for path in Path().iterdir()] == ["other"]
    assert checkpoint(Path("other/smoke/maml/sinusoid/version_0"))["global_step"] == 2


STOPPED = {  # where signals arrive, which, the exit status, and the steps of the checkpoint
    "Ctrl-C": ("training", (signal.SIGINT,), 130, 13),
    "timeout, which sends it twice": ("training", (signal.SIGTERM, signal.SIGTERM), 143, 13),
    "a terminal that is closed": ("training", (signal.SIGHUP,), 129, 13),
    "in the last validation": ("validation", (signal.SIGTERM,), 143, 20),
    "in the test": ("test", (signal.SIGTERM,), 143, 20),
}


@pytest.mark.parametrize("where", STOPPED)
def test_a_signal_leaves_a_checkpoint_from_which_the_run_goes_on(
    where, trained, monkeypatch, capsys
):
    stage, signals, status, steps = STOPPED[where]
    trained(SMOKE, into="whole")
    honest = getattr(MAMLRegression, f"{stage}_step")

    def stopped(self, batch, batch_idx):
        if self.trainer.global_step == {"training": 12, "validation": 20, "test": 20}[stage]:
            for each in signals:
                signal.raise_signal(each)
        return honest(self, batch, batch_idx)

    # a job under nohup, or in a shell's background, ignores these from the start
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(MAMLRegression, f"{stage}_step", stopped)
        assert run("fit", "--config", SMOKE, "--trainer.logger.save_dir", "my runs") == status
    signal.signal(signal.SIGINT, handlers[0])  # Lightning ignores it from then on
    assert signal.getsignal(signal.SIGTERM) == handlers[1]
    assert checkpoint(folder(root="my runs"))["global_step"] == steps
    assert not (folder(root="my runs") / "table.txt").exists()
    _, command = capsys.readouterr().out.split("resume it with: " + runs.command())
    assert run(*shlex.split(command)) == 0  # the config beside the checkpoint is read
    assert_same_run(folder(root="my runs"), folder(root="whole"))


@pytest.mark.parametrize("command", ["fit", "list"])
def test_an_output_that_nobody_reads(command):
    reads, writes = os.pipe()
    os.close(reads)
    words = [sys.executable, "-m", "experiments", command]
    if command == "fit":
        words += ["--config", SMOKE, "--trainer.default_root_dir", Path.cwd()]
    done = subprocess.run(words, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert done.returncode == 141
    assert done.stderr.endswith("error: the reader of the output has ended, and so has the run.\n")


KILLED = {  # the step that the run is killed in, of which kind, and the options of both runs
    "in the validation of a step with a checkpoint": ("validation", 10, ("--checkpoint_every", 5)),
    "after its end": (None, 0, ()),
    "after its last step, without a validation": (None, 0, ("--trainer.max_steps", 17)),
    "after its last epoch, without a validation": (None, 0, ("--data.iterations", 17)),
}


@pytest.mark.parametrize("when", KILLED)
def test_a_killed_run_goes_on_without_a_row_lost(when, trained, monkeypatch):
    stage, at, options = KILLED[when]
    trained(SMOKE, *options, into="whole")

    def killed(self, batch, batch_idx):
        if self.trainer.global_step == at:
            raise RuntimeError("killed")
        return honest(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        if stage is not None:
            honest = getattr(MAMLRegression, f"{stage}_step")
            patch.setattr(MAMLRegression, f"{stage}_step", killed)
            with pytest.raises(RuntimeError, match="killed"):
                fit(*options)
        else:
            fit(*options)
    fit(*options, "--ckpt_path", "last")
    assert_same_run(folder(), folder(root="whole"))


def test_a_row_without_its_end_is_dropped(trained, capsys):
    trained(SMOKE)
    file = folder() / "metrics.csv"
    rows, whole = metrics(folder()), file.read_bytes()
    *before, _ = whole.splitlines(keepends=True)
    for end in (b"0", b"0,", b"0,1", b"epo"):
        file.write_bytes((b"" if end == b"epo" else b"".join(before)) + end)
        assert run("test", "--ckpt_path", folder() / "last.ckpt") == 0
        assert f"has no end, and is left out: {end.decode()!r}" in capsys.readouterr().err
        assert metrics(folder())[-1]["test/mse_after_1"] == rows[-1]["test/mse_after_1"]
        assert metrics(folder())[:-1] == rows[:-1] or end == b"epo"


EDITED = {  # metrics.csv, by which command, and the refusal
    "a mark of the encoding": ("fit", lambda rows: b"\xef\xbb\xbf" + rows, None),
    "the rows deleted": ("fit", lambda rows: b"", None),
    "another encoding": ("fit", lambda rows: rows.decode().encode("utf-16"), "codec can't decode"),
    "a step that is no number": ("test", lambda rows: rows + b"x,y,z\n", "invalid literal for int"),
    "a row cut in the middle": ("fit", lambda rows: rows.replace(b"\n", b"\n0\n", 1), "NoneType"),
}


@rows("how", EDITED)
def test_an_edited_file_of_rows(how, trained, capsys):
    shutil.rmtree("runs", ignore_errors=True)
    trained(SMOKE)
    command, change, message = EDITED[how]
    file = folder() / "metrics.csv"
    before = metrics(folder())
    file.write_bytes(change(file.read_bytes()))
    given = file.read_bytes()
    status = run(command, "--ckpt_path", folder() / "last.ckpt", *LONGER[: 2 * (command == "fit")])
    if message is None:
        assert status == 0
        assert "step" in metrics(folder())[0]
        assert not given or metrics(folder())[0]["epoch"] == before[0]["epoch"]
        assert {"epoch", "step"} <= {*metrics(folder())[0]} <= {*before[0]}
    else:
        assert status == 2
        assert re.search(
            f"expected rows with the numbers of their steps.*{message}", capsys.readouterr().err
        )
        assert file.read_bytes() == given


LONGER = "--trainer.max_epochs", "2"


def test_a_full_disk_loses_no_row(tmp_path, monkeypatch):
    """Of a run with a new column, and of one that is resumed."""
    file, write = tmp_path / "metrics.csv", csv.DictWriter.writerows

    def full(self, rows):
        write(self, [*rows][:1])
        raise OSError(28, "No space left on device")

    def replaced(*_):
        raise OSError(28, "No space left on device")

    for kept in (None, [{"step": 0, "a": 1}, {"step": 1, "a": 2}]):
        writer = Rows(str(tmp_path), kept)
        for step in (0, 1):
            writer.log_metrics({"a": step + 1}, step)
        if kept is None:
            writer.save()
        before = file.read_bytes()
        writer.log_metrics({"b": 3}, 2)
        for of, name, fails in ((csv.DictWriter, "writerows", full), (os, "replace", replaced)):
            with monkeypatch.context() as patch:
                patch.setattr(of, name, fails)
                with pytest.raises(OSError, match="No space"):
                    writer.save()
            assert file.read_bytes() == before
        writer.save()
        assert metrics(tmp_path)[-1] == {"step": "2", "a": "", "b": "3"}
        assert [*tmp_path.iterdir()] == [file]


def test_a_table_is_written_whatever_the_terminal_has(tmp_path):
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        runs.write_report(tmp_path, "1 ± 2")
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert (tmp_path / "table.txt").read_text("utf-8") == "1 ± 2\n"


def test_a_damaged_summary_of_another_run_is_left_out(tmp_path, capsys):
    for version, text in enumerate(('{"a": 1}', '{"a": ', "[1]", "")):
        (tmp_path / f"x/version_{version}").mkdir(parents=True)
        (tmp_path / f"x/version_{version}/summary.json").write_text(text)
    assert runs.summaries(tmp_path / "x/version_0") == [{"a": 1}]
    assert capsys.readouterr().err.count("no summary of a run, and is left out") == 3


def no_memory(self):
    raise MemoryError


def no_memory_of_torch(self):
    torch.empty(10**15)


def folder_deleted(self):
    shutil.rmtree(folder())


def broken_disk(self):
    raise OSError(5, "Input/output error", "metrics.csv")


ENDED = {  # what happens after the first checkpoint, what is told, and whether the checkpoint is left
    "no memory": (no_memory, "expected memory for the run, got none", True),
    "no memory for a tensor": (no_memory_of_torch, "expected memory for the run, got none", True),
    "a broken disk": (broken_disk, "Input/output error", True),
    "a deleted folder": (folder_deleted, "No such file or directory", False),
}


@rows("how", ENDED)
def test_what_ends_a_run_is_told_in_a_sentence(how, capsys, monkeypatch):
    shutil.rmtree("runs", ignore_errors=True)
    act, message, left = ENDED[how]
    honest = MAMLRegression.training_step

    def step(self, batch, batch_idx):
        if self.trainer.global_step == 12:
            act(self)
        return honest(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(MAMLRegression, "training_step", step)
        assert run("fit", "--config", SMOKE) == 2
    printed, errors = capsys.readouterr()
    assert re.search(f"^error: .*{message}", errors, re.M)
    assert ("resume it with" in printed) == left == (folder() / "last.ckpt").exists()


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


def test_a_run_in_a_folder_that_is_read_only(trained, capsys, monkeypatch):
    trained(SMOKE)
    access = os.access  # which allows root everything
    read_only = lambda path, mode: access(path, mode) and (path, mode) != (folder(), os.W_OK)  # noqa: E731
    monkeypatch.setattr("os.access", read_only)
    assert run("fit", "--ckpt_path", folder() / "last.ckpt", *LONGER) == 2
    assert re.search("Permission denied: '.*version_0'", capsys.readouterr().err)


def test_a_folder_that_cannot_be_written(capsys):
    assert run("fit", "--config", SMOKE, "--trainer.logger.save_dir", "/proc/nowhere") == 2
    error = capsys.readouterr().err
    assert "choose another folder" in error
    assert "intact" not in error  # there is no checkpoint


BAD = {
    "unknown key": (["--model.inner_stepz", "3"], "no option 'inner_stepz'.*did you mean 'inner_steps'"),
    "unknown key of the run": (["--modle.x", "3"], "unrecognized arguments: --modle.x.*did you mean 'model'"),
    "an option of the trainer by its own name": (["--max_steps", "3"], "unrecognized arguments: --max_steps 3; did you mean 'trainer.max_steps'"),
    "an option of the model by its own name": (["--inner_steps", "3"], "did you mean 'model.inner_steps' or 'data.inner_steps'"),
    "an abbreviated option of the trainer": (["--trainer.max_step", "3"], "did you mean 'trainer.max_steps'"),
    "an abbreviated option": (["--seed", "3"], "did you mean 'seed_everything'"),
    "unknown part of a config": (["--config", "trianer: {devices: 1}"], "'trianer.devices'. did you mean 'trainer'"),
    "unknown key in a config": (["--config", "trainer: {max_epoch: 1}"], "did you mean 'trainer.max_epochs'"),
    "unknown key of a class": (["--config", "data: {class_path: experiments.few_shot.SinusoidTasks, init_arg: {shots: 1}}"], "did you mean 'init_args'"),
    "a key twice": (["--config", "data: {init_args: {shots: 1, tasks: 2, shots: 3}}"], "expected shots once, got it again in line 1"),
    "a config that holds itself": (["--config", "data: &data {init_args: *data}"], "part that holds itself"),
    "unknown class": (["--model", "experiments.few_shot.MAMLRegresion"], "did you mean 'MAMLRegression'"),
    "unknown package": (["--model", "experiments.fewshot.MAMLRegression"], "did you mean 'few_shot'"),
    "a config that is no YAML": (["--config", str(ROOT / "Makefile")], r"Makefile\", line \d+"),
    "wrong type": (["--model.inner_steps", "many"], "inner_steps: expected int, got 'many'"),
    "a list for a number": (["--model.inner_steps", "[1, 2]"], "inner_steps: expected int, got '.1, 2.'"),
    "a config that is no text": (["--config", str(ROOT / "docs/images/poisson.png")], "is no text"),
    "a seed that is too large": (["--seed_everything", "99999999999"], r"less than 2\*\*32, got 99999999999"),
    "out of bounds": (["--data.shots", "0"], "shots: expected an integer of at least 1"),
    "no threads": (["--num_threads", "0"], "num_threads: .*at least 1"),
    "no baseline there": (["--model.baseline", "runs/none"], "'runs/none', where there is none"),
    "no checkpoint there": (["--ckpt_path", "no.ckpt"], "checkpoint: expected a file"),
    "checkpoint that is none": (["--ckpt_path", str(SMOKE)], "cannot be read as one"),
    "nothing to go on from": (["--ckpt_path", "last"], "where there is none; give another one"),
    "a logger that is not installed": (["--trainer.logger", "lightning.pytorch.loggers.CometLogger"], "Requirement 'comet"),
    "unknown accelerator": (["--trainer.accelerator", "3d"], "invalid accelerator name"),
    **({} if torch.accelerator.is_available() else {"no GPU there": (["--trainer.accelerator", "gpu"], "accelerator cpu, or auto")}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_paragraph_before_training(case, capsys):
    assert_refused(SMOKE, *BAD[case], capsys)


@pytest.mark.parametrize(
    "args",
    [[], ["fit"], ["fit", "no.yaml"], ["fit", "--config", "no.yaml"], ["train"]],
    ids=" ".join,
)
def test_bad_commands(args, capsys):
    assert main(args) == 2
    assert re.search("^error: .*experiments list", capsys.readouterr().err, re.M)


def test_a_baseline_of_another_size_is_refused_before_training(capsys):
    JOINT.fit("--model.hidden", "[3]")
    assert run("fit", "--config", SMOKE, "--model.baseline", "runs/smoke/maml/sinusoid_joint") == 2
    assert "checkpoint of the same network" in capsys.readouterr().err
    assert not folder().joinpath("last.ckpt").exists()


# those of configs/smoke are run
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT / "configs")))
def test_every_config_is_read(path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(path), "--print_config"])
    assert stopped.value.code == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["trainer"]["accelerator"] == "auto"
    name = content["trainer"]["logger"]["init_args"]["name"]
    assert path == ROOT / "configs" / f"{name}.yaml"


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
