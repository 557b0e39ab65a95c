"""What every experiment does: it reports, goes on bit for bit, and is judged as it was trained."""

import fcntl
import os
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.testing import assert_close

from experiments.autoencoder import Race
from experiments.command.checkpoint import LastCheckpoint
from experiments.forces.experiment import Potentials
from experiments.logs import RunLogger
from experiments.mean_flow.experiment import MeanFlow
from experiments.reweight import Reweighting
from experiments.robust.experiment import Robustness
from experiments.shared.stream import Stream
from hoglib.errors import ArgumentValueError
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    ROOT,
    assert_same_run,
    checkpoint,
    metrics,
    run,
    smoke,
)
from tests.long_tail import FULL, all_but
from tests.rows import rows

pytestmark = COMMAND_LINE
OF_EVERY_RUN = {"config.yaml", "last.ckpt", "metrics.csv", "table.txt"}


class Experiment(NamedTuple):
    """What is expected of a smoke run.

    Attributes:
        reports: What a fit leaves beside OF_EVERY_RUN.
        steps: At its end.
        stop: Where an interrupted run ends, beyond the checkpoint that it goes on from; the step of that.
        told: Columns of metrics.csv whose last value is in the table, and how it is written there.
        verify: Options with which it is verified, as what is audited grows with them.
        seldom: Whether it is verified in full tests alone, as it takes minutes.
        timed: Whether seconds are reported.
        like: Another row, of whose class it is: its formulas are tested, and it runs in full tests alone.
        special: Whether checkpoints hold more than a network and its optimizer, so that each test resumes it.
    """

    reports: set[str]
    steps: int
    stop: tuple[int, int]
    told: dict[str, str] = {}  # noqa: RUF012
    verify: tuple[str, ...] = ()
    seldom: bool = False
    timed: bool = False
    like: str = ""
    special: bool = False


PINN = {"val/newton_cg": "{:.1e}", "val/adam": "{:.1e}"}
LEAST_SQUARES = {f"val/{name}": "{:.1e}" for name in ("levenberg_marquardt", "lbfgs", "adam")}
FEWER = ("--data.batch", "8")
SHORT = ("--model.length", "8", "--data.length", "8")
EXPERIMENTS = {
    "curvature/digits": Experiment(  # measurements
        {"summary.json", "spectrum_over_training.png"}, 20, (17, 10),
        {"curvature/largest": "{:.2f}", "val/accuracy": "{:.1%}"}, special=True,
    ),
    "curvature/influence": Experiment({"influence.png"}, 50, (30, 30)),
    "curvature/kfac": Experiment(
        {"race.png"}, 4, (2, 2), {"val/newton_kfac": "{:.4f}", "val/kfac": "{:.4f}"}, timed=True,
        like="curvature/newton_cg",
    ),
    "curvature/lm": Experiment(
        {"directions.png", "summary.json"}, 8, (6, 4), {"test/perplexity": "{:.2f}"},
        ("--model.layers", "1", *SHORT),
    ),
    "curvature/newton_cg": Experiment(  # seconds
        {"race.png"}, 6, (3, 2), {"val/newton_cg": "{:.4f}", "val/adam": "{:.4f}"}, timed=True,
        special=True,
    ),
    "flow/meanflow": Experiment(
        {"summary.json", "samples.png"}, 20, (13, 10), {"test/distance/MeanFlow, 1 step": "{:.3f}"}, FEWER
    ),
    "gan/mixture": Experiment(  # two optimizers
        {"points.png", "summary.json", "training_curve.png"}, 40, (34, 20), {"test/wasserstein": "{:.3f}"},
        ("--model.hidden", "[8]", "--data.batch", "16"),
    ),
    "gan/mnist": Experiment(
        {"digits.png", "grids", "summary.json"}, 32, (26, 20), {"test/frechet": "{:.3f}"}
    ),
    "maml/glyphs_5w1s": Experiment(
        {"summary.json", "episode.png", "training_curve.png"}, 12, (6, 4), {"test/accuracy": "{:.1%}"},
        seldom=True,
    ),
    "maml/lm_adapt": Experiment({"perplexity.png"}, 4, (3, 2), verify=SHORT),
    # stopped before a row of metrics.csv that the interrupted run has written
    "maml/sinusoid": Experiment({"tasks.png", "training_curve.png"}, 20, (15, 10), special=True),
    "meta/data_values": Experiment({"values.png"}, 20, (15, 10)),
    "meta/reweight_digits": Experiment(
        {"weights.png"}, 20, (15, 10), {"val/clean": "{:.1%}", "test/accuracy_reweighted": "{:.1%}"}
    ),
    "penalty/digits_robust": Experiment(
        {"robust.png"}, 20, (13, 10), {"test/plain/PGD/0.2": "{:.1%}"}
    ),
    "penalty/forces": Experiment({"forces.png"}, 20, (13, 10), {"test/force/both": "{:.4f}"}),
    "pinn/allen_cahn": Experiment({"pinn.png"}, 4, (3, 2), PINN, FEWER, seldom=True, timed=True),
    "pinn/heat": Experiment(
        {"pinn.png"}, 4, (3, 2), LEAST_SQUARES, FEWER, timed=True, like="pinn/least_squares"
    ),
    "pinn/helium": Experiment(  # walkers
        {"helium.png"}, 6, (5, 4), {"test/energy": "{:.5f}", "test/error": "{:.5f}"},
        ("--model.hidden", "[3]", "--model.walkers", "2"), seldom=True, timed=True, special=True,
    ),
    "pinn/least_squares": Experiment({"pinn.png"}, 4, (3, 2), LEAST_SQUARES, FEWER, timed=True),
    "pinn/plate": Experiment({"pinn.png"}, 4, (3, 2), PINN, FEWER, timed=True, like="pinn/poisson"),
    "pinn/poisson": Experiment({"pinn.png"}, 4, (3, 2), PINN, FEWER, timed=True),
}  # fmt: skip


def test_every_smoke_config_has_its_row():
    folder = ROOT / "configs/smoke"
    names = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")}
    assert names - {"maml/glyphs_20w5s", "maml/sinusoid_joint"} == EXPERIMENTS.keys()  # as others


@DRAWN
@pytest.mark.parametrize("name", all_but(lambda name: not EXPERIMENTS[name].like, EXPERIMENTS))
def test_a_fit_ends_with_its_reports_and_a_checkpoint(name, trained):
    config, _, folder = smoke(name)
    printed, found = trained(config), folder()
    assert {p.name for p in found.iterdir()} == OF_EVERY_RUN | EXPERIMENTS[name].reports
    table = (found / "table.txt").read_text()
    assert table in printed
    assert max(map(len, table.splitlines())) <= 80
    assert checkpoint(found)["global_step"] == EXPERIMENTS[name].steps
    assert_taken_home(found / "last.ckpt")
    for picture in found.glob("*.png"):
        assert str(picture) in printed
        assert picture.stat().st_size > 5000
    for column, how in EXPERIMENTS[name].told.items():
        *_, last = (row[column] for row in metrics(found) if row[column])
        assert how.format(float(last)) in printed, column


def assert_taken_home(last):
    """The module of a checkpoint has its options and parameters, without a Trainer."""
    saved = torch.load(last, weights_only=True)
    given = saved["config.yaml"]["model"]
    package, _, kind = given["class_path"].rpartition(".")
    module = getattr(import_module(package), kind).load_from_checkpoint(last)
    assert_close(dict(module.state_dict()), dict(saved["state_dict"]), rtol=0, atol=0)
    for name, value in getattr(module, "options", {}).items():
        assert saved["trained_with"][name] == value
    assert getattr(module, "lr", None) == given.get("init_args", {}).get("lr")
    with pytest.raises(ArgumentValueError, match=f"got one of {kind}"):
        (Race if kind != "Race" else Potentials).load_from_checkpoint(last)


LAZY_GRAPHS = ("--model.penalty.every", "4", "--model.compile", "eager")
# Of a GAN's two steps a batch, which never make nine
EVERY_9 = ("--checkpoint_every", "9", "--trainer.max_steps", "18")
RESUMED = [
    *((name, (), one.stop, () if one.special else FULL) for name, one in EXPERIMENTS.items()
      if name != "meta/data_values"),
    ("gan/mnist", (*LAZY_GRAPHS, *EVERY_9), (13, 10), ()),
    ("maml/sinusoid", ("--trainer.accelerator", "gpu"), (15, 10), (FULL, pytest.mark.gpu)),
]  # fmt: skip


@DRAWN
@pytest.mark.parametrize(
    ("name", "options", "stop"),
    [
        pytest.param(*case, marks=marks, id=" ".join((case[0], *case[1])))
        for *case, marks in RESUMED
    ],
)
def test_resume_is_bit_for_bit_the_uninterrupted_run(name, options, stop, trained, monkeypatch):
    config, fit, folder = smoke(name)
    trained(config, *options, into="whole")
    with monkeypatch.context() as killed:  # no checkpoint where it ends
        killed.setattr(LastCheckpoint, "_is_last", lambda self, trainer: trainer.is_last_batch)
        fit(*options, "--trainer.max_steps", stop[0], "--test_after_fit", "false")
    assert checkpoint(folder())["global_step"] == stop[1]
    fit(*options, "--ckpt_path", "last")
    assert not folder(1).exists()  # it went on in the same folder
    ours, whole = folder(), folder(root="whole")
    assert_same_run(ours, whole)
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(ours) for file in ours.rglob("*") if file.is_file())
    for file in files:
        told = file.suffix in (".txt", ".json", ".png") and not EXPERIMENTS[name].timed
        assert not told or (ours / file).read_bytes() == (whole / file).read_bytes(), file


@DRAWN
@pytest.mark.parametrize("name", ["meta/reweight_digits", "maml/sinusoid"])
def test_pictures_of_a_training_in_half_precision_are_drawn(name):
    _, fit, folder = smoke(name)
    fit("--trainer.precision", "bf16-mixed")
    assert EXPERIMENTS[name].reports <= {p.name for p in folder().iterdir()}


def test_a_picture_that_cannot_be_drawn_loses_no_table(monkeypatch):
    config, _, folder = smoke("maml/sinusoid")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", None)
    with pytest.raises(TypeError):
        run("fit", "--config", config)
    assert "MAML  diverged" in (folder() / "table.txt").read_text()


JUDGED = {  # what `validate` prints
    "curvature/digits": "val/accuracy",
    "gan/mixture": "val/penalty",
    "maml/sinusoid": "val/mse_after_10",
    "penalty/digits_robust": "val/jacobian_0",
}


@DRAWN
@pytest.mark.parametrize("name", JUDGED)
def test_a_checkpoint_is_judged_in_its_own_folder(name, trained, capsys):
    config, _, folder = smoke(name)
    trained(config)
    reports = [folder() / "table.txt", *folder().glob("*.png")]
    before = [report.read_bytes() for report in reports]
    for report in reports:
        report.unlink()
    assert run("test", "--config", folder() / "config.yaml") == 0  # the newest, when none is named
    assert [report.read_bytes() for report in reports] == before
    assert before[0].decode() in capsys.readouterr().out
    assert run("validate", "--config", config, "--ckpt_path", folder() / "last.ckpt") == 0
    assert JUDGED[name] in capsys.readouterr().out
    assert not folder(1).exists()


# An option that the checkpoint of a smoke run was not trained with, and the refusal.
OTHERS = {
    "curvature/newton_cg": ("--model.damping", "0.2", "damping 0.2, .* trained with damping 0.1"),
    "flow/meanflow": ("--data.kind", "swiss_roll", "kind Swiss roll, .* data.kind 25 Gaussians"),
    "gan/mixture": ("--model.loss", "wasserstein", "with loss wasserstein, .* loss relativistic"),
    "maml/glyphs_5w1s": ("--model.inner_lr", "0.1", "trained with inner_lr 0.1, .* inner_lr 0.4"),
    "meta/reweight_digits": ("--seed_everything", "1", "data.seed 1, .* trained with data.seed 0"),
    "penalty/digits_robust": ("--model.weights", "{jacobian: [2]}", "weights {'jacobian': .2.0.}"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_that_was_trained_otherwise_is_refused(name, trained, capsys):
    config, _, folder = smoke(name)
    trained(config)
    before = contents(folder())
    *other, message = OTHERS[name]
    option = other[0].removeprefix("--")
    for command, words in {"test": message, "fit": f"run began with, got {option}"}.items():
        assert run(command, "--config", config, *other, "--ckpt_path", "last") == 2
        error = capsys.readouterr().err
        assert re.search(words, error)
        assert re.search("config(.yaml that lies)? beside", error)
    assert contents(folder()) == before


def contents(version):
    return {file: file.read_bytes() for file in version.parent.rglob("*") if file.is_file()}


CONTRADICTED = {  # what is given beside a checkpoint, and the refusal
    "of the model and the seed": (
        ("--model.act", "relu", "--seed_everything=3"), "got seed_everything 3 for 0; model.act relu for tanh"
    ),
    "of the data": (("--data.shots", "5"), "got data.shots 5 for 10"),
    "none, the run in its folder": (  # of the two paths the last counts
        ("--ckpt_path=null", "--trainer.logger.version=0"), "got 0 of the run in (.*version_0); .* --ckpt_path .*version_0/last.ckpt"
    ),
    "of a run that has ended": (("--model.inner_lr", "0.03", "--trainer.max_steps", "1"), "got model.inner_lr 0.03 for"),
    "another network": (("--model.hidden", "[30, 30]"), r"got model.hidden \[30, 30\] for \[40, 40\]"),
}  # fmt: skip


def test_options_that_contradict_the_config_beside_a_checkpoint_are_refused(trained, capsys):
    config, _, folder = smoke("maml/sinusoid")
    trained(config)
    before = contents(folder())
    for options, message in CONTRADICTED.values():
        assert run("fit", "--ckpt_path", folder() / "last.ckpt", *options) == 2
        assert re.search(message, capsys.readouterr().err)
        assert contents(folder()) == before
    elsewhere = (folder() / "last.ckpt").rename("elsewhere.ckpt")
    assert run("fit", "--config", config, "--ckpt_path", elsewhere, *options) == 2
    assert run("spectrum", "--config", config, "--ckpt_path", elsewhere, "--k", 0) == 2
    assert not folder(1).exists()
    elsewhere.rename(folder() / "last.ckpt")
    assert run("spectrum", "--ckpt_path", folder() / "last.ckpt", "--model.hidden", "[30, 30]") == 2
    mismatch = "got one of another .size mismatch for .*0.weight"
    assert re.search(mismatch, capsys.readouterr().err)
    # what differs from the checkpoint's own record, not from a file that can be edited
    written = (folder() / "config.yaml").read_text()
    (folder() / "config.yaml").write_text(written.replace(" lr: 0.001", " lr: 0.01"))
    assert run("fit", "--ckpt_path", folder() / "last.ckpt") == 2
    assert "got model.lr 0.01 for 0.001" in capsys.readouterr().err
    (folder() / "config.yaml").write_text(written)
    rounding = "--model.compile", "eager", "--trainer.max_steps", 21, "--test_after_fit", "false"
    assert run("fit", "--ckpt_path", folder() / "last.ckpt", *rounding) == 0


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path):
    first, second, refused = (RunLogger("x", tmp_path) for _ in range(3))
    assert first.log_dir == second.log_dir == refused.log_dir
    for logger in (first, second):
        assert Path(logger.experiment.log_dir) == Path(logger.log_dir)
    assert [Path(logger.log_dir).name for logger in (first, second)] == ["version_0", "version_1"]
    refused.discard()  # of a run that ended before it had a folder
    assert Path(first.log_dir).is_dir()
    second.discard()
    assert not Path(second.log_dir).exists()


def test_a_run_that_another_process_writes_is_refused(trained, capsys):
    config, _, folder = smoke("maml/sinusoid")
    trained(config)
    before = contents(folder())
    handle = os.open(folder(), os.O_RDONLY)
    fcntl.flock(
        handle, fcntl.LOCK_EX
    )  # held until it is closed, by its process's end at the latest
    for command in ("fit", "test"):
        assert run(command, "--ckpt_path", folder() / "last.ckpt") == 2
        assert "in which no other process writes" in capsys.readouterr().err
    assert contents(folder()) == before
    os.close(handle)
    assert run("test", "--ckpt_path", folder() / "last.ckpt") == 0


def test_a_bit_that_flipped_in_a_checkpoint_is_found(trained, capsys):
    config, _, folder = smoke("maml/sinusoid")
    trained(config)
    last = folder() / "last.ckpt"
    with ZipFile(last) as archive:
        (first, *_) = (info for info in archive.infolist() if "/data/" in info.filename)
    content = bytearray(last.read_bytes())
    content[first.header_offset + 30 + len(first.filename) + 64] ^= 64
    last.write_bytes(content)
    with ZipFile(last) as archive:
        assert archive.testzip() == first.filename
    for command in ("fit", "test", "spectrum"):
        assert run(command, "--ckpt_path", last) == 2
        assert f"the checksum of {first.filename} is wrong" in capsys.readouterr().err


def rewritten(**parts):
    def change(last):
        content = torch.load(last, weights_only=True)
        torch.save({k: v for k, v in {**content, **parts}.items() if v is not None}, last)

    return change


def linked(last):
    last.unlink()
    last.symlink_to(last.name)


def emptied(last):
    last.unlink()
    last.mkdir()


DAMAGED = {  # last.ckpt, and the refusal
    "nothing in it": (lambda last: last.write_bytes(b""), "cannot be read as one"),
    "cut off": (lambda last: os.truncate(last, 5000), "cannot be read as one"),
    "a list": (lambda last: torch.save([1], last), "cannot be read as one"),
    "no position": (rewritten(loops=None), "cannot be read as one"),
    "no version": (rewritten(**{"pytorch-lightning_version": None}), "cannot be read as one"),
    "parameters in a list": (rewritten(state_dict=[1]), "cannot be read as one"),
    "options that are none": (rewritten(**{"config.yaml": "text"}), "cannot be read as one"),
    "a folder": (emptied, "where there is none"),
    "a link to itself": (linked, "where there is none"),
}


@rows("how", DAMAGED)
def test_a_damaged_checkpoint_is_refused(how, trained, capsys):
    shutil.rmtree("runs", ignore_errors=True)
    config, _, folder = smoke("maml/sinusoid")
    trained(config)
    change, message = DAMAGED[how]
    change(folder() / "last.ckpt")
    before = contents(folder())
    for command in ("fit", "test"):
        assert run(command, "--config", config, "--ckpt_path", folder() / "last.ckpt") == 2
        assert re.search(f"^error: checkpoint: .*{message}", capsys.readouterr().err, re.M)
        assert contents(folder()) == before


def test_a_run_that_begins_anew_in_a_folder_is_no_resumed_one(tmp_path):
    config = smoke("maml/sinusoid")[0]
    options = "--trainer.logger", "false", "--trainer.default_root_dir", tmp_path
    for rate in (0.01, 0.02):
        rest = "--model.inner_lr", rate, "--test_after_fit", "false"
        assert run("fit", "--config", config, *options, *rest) == 0


@DRAWN
def test_another_logger_gets_the_numbers_and_pictures_too(capsys):
    _, fit, folder = smoke("maml/sinusoid")
    tensorboard = "lightning.pytorch.loggers.TensorBoardLogger"
    fit("--trainer.fast_dev_run", "true", "--trainer.callbacks", "LearningRateMonitor")
    assert not [*Path().iterdir()]
    fit("--trainer.logger", tensorboard, "--trainer.logger.save_dir", "other")
    pictures = {picture.stem for picture in folder().glob("*.png")}
    assert pictures == {"tasks", "training_curve"}
    (logged,) = (path.parent for path in Path("other").rglob("hparams.yaml"))
    found = EventAccumulator(str(logged)).Reload().Tags()
    assert pictures == {*found["images"]}
    assert {"train/loss", "test/mse_after_1"} <= {*found["scalars"]}


TOO_LARGE = {
    "curvature/newton_cg": (("--model.adam_lr", "1e30"), "Lower adam_lr"),
    "penalty/digits_robust": (
        ("--model.lr", "1e30", "--model.weights", "{jacobian: [1e30]}"),
        "Lower lr, or the weights",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_rate_that_is_too_large_stops_the_run(name, capsys):
    args, message = TOO_LARGE[name]
    assert run("fit", "--config", smoke(name).config, *args) == 2
    assert message in capsys.readouterr().err


def spoilt(batch):
    return batch * float("nan") if isinstance(batch, torch.Tensor) else tuple(map(spoilt, batch))


@pytest.mark.parametrize(
    ("name", "loss", "step"),
    [("maml/sinusoid", "inner loss", 10), ("gan/mixture", "critic loss", 20)],
)
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(
    name, loss, step, capsys, monkeypatch
):
    honest = Stream.__iter__

    def poisoned(self):
        for number, batch in enumerate(honest(self)):
            yield spoilt(batch) if number == 15 else batch

    monkeypatch.setattr(Stream, "__iter__", poisoned)
    config, _, folder = smoke(name)
    assert run("fit", "--config", config) == 2
    assert f"{loss}: expected a finite number, got nan" in capsys.readouterr().err
    assert checkpoint(folder())["global_step"] == step


NETWORKS = {
    "race": lambda: Race(hidden=[8]).networks,
    "potentials": lambda: Potentials(hidden=[8]).potentials,
    "flows": lambda: MeanFlow(width=8, layers=1, heads=2).networks,
    "weighted": lambda: Reweighting(hidden=[8]).networks,
    "robust": lambda: Robustness({"jacobian": [0.5]}, hidden=[8]).networks,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_that_are_compared_start_alike(name):
    first, *others = (network.state_dict() for network in NETWORKS[name]().values())
    assert others
    for other in others:
        assert_close(other, first, rtol=0, atol=0)
