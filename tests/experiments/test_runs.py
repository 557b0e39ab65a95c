"""What every experiment does: it reports, goes on bit for bit, and is judged as it was trained."""

import re
from typing import Any, NamedTuple

import pytest

from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    ROOT,
    assert_same_run,
    checkpoint,
    run,
    smoke,
)
from tests.long_tail import FULL

pytestmark = COMMAND_LINE
OF_EVERY_RUN = {"config.yaml", "last.ckpt", "metrics.csv", "table.txt"}


class Experiment(NamedTuple):
    """reports: what a fit leaves beside OF_EVERY_RUN. steps: at its end. stop: where an interrupted
    run ends, beyond the checkpoint that it goes on from, and the step of that. validated: what
    `validate` prints. others: options that its checkpoint was not trained with, and the refusal.
    timed: seconds are reported."""

    reports: set[str]
    steps: int
    stop: tuple[int, int]
    validated: str = ""
    others: tuple[tuple[tuple[Any, ...], str], ...] = ()
    timed: bool = False


EXPERIMENTS = {
    "curvature/digits": Experiment(
        {"summary.json", "spectrum_over_training.png"}, 20, (17, 10),
        others=((("--model.lr", "0.05"), "trained with lr 0.05, as the config says, got"),),
    ),
    "curvature/influence": Experiment({"influence.png"}, 50, (30, 30)),
    "curvature/kfac": Experiment({"race.png"}, 4, (2, 2), timed=True),
    "curvature/lm": Experiment({"directions.png", "summary.json"}, 8, (6, 4)),
    "curvature/newton_cg": Experiment(
        {"race.png"}, 6, (3, 2), timed=True,
        others=(
            (("--model.damping", "0.2"), "with damping 0.2, .* got one trained with damping 0.1"),
            (("--data.train", "1000"), "trained with data.train 1000"),
        ),
    ),
    "flow/meanflow": Experiment(
        {"summary.json", "samples.png"}, 20, (13, 10), "val/MeanFlow, 1 step",
        (
            (("--model.instant", "0.25"), "trained with instant 0.25"),
            (
                ("--data.kind", "swiss_roll"),
                "trained with data.kind Swiss roll, .* data.kind 25 Gaussians",
            ),
        ),
    ),
    "gan/mixture": Experiment(
        {"points.png", "summary.json", "training_curve.png"}, 40, (14, 10),  # two optimizers
    ),
    "gan/mnist": Experiment(
        {"digits.png", "grids", "summary.json"}, 32, (13, 10),
        others=(
            (("--model.channels", "8"), "config.yaml that lies beside"),
            (("--data.train", "300"), "config.yaml that lies beside"),
        ),
    ),
    "maml/glyphs_5w1s": Experiment(
        {"summary.json", "episode.png", "training_curve.png"}, 12, (6, 4), "val/accuracy",
        (
            (("--model.channels", "4"), "trained with channels 4"),
            (("--model.inner_lr", "0.1"), "trained with inner_lr 0.1, .* inner_lr 0.4"),
        ),
    ),
    "maml/lm_adapt": Experiment({"perplexity.png"}, 4, (3, 2)),
    "maml/sinusoid": Experiment({"tasks.png", "training_curve.png"}, 20, (15, 10)),
    "meta/data_values": Experiment({"values.png"}, 20, (15, 10)),
    "meta/reweight_digits": Experiment({"weights.png"}, 20, (15, 10)),
    "penalty/digits_robust": Experiment(
        {"robust.png"}, 20, (13, 10), "val/jacobian_0",
        (
            (("--model.weights", "{jacobian: [2]}"), "trained with weights {'jacobian': .2.0.}"),
            (("--data.val", "60"), "trained with data.val 60, .* one trained with data.val 50"),
        ),
    ),
    "penalty/forces": Experiment(
        {"forces.png"}, 20, (13, 10), "val/force/both",
        (
            (("--model.weight", "2"), "trained with weight 2"),
            (
                ("--data.temperature", "0.4"),
                "trained with data.temperature 0.4, .* data.temperature 0.3",
            ),
        ),
    ),
    "pinn/allen_cahn": Experiment({"pinn.png"}, 4, (3, 2), timed=True),
    "pinn/helium": Experiment({"helium.png"}, 6, (5, 4), timed=True),
    "pinn/plate": Experiment({"pinn.png"}, 4, (3, 2), timed=True),
    "pinn/poisson": Experiment({"pinn.png"}, 4, (3, 2), timed=True),
}  # fmt: skip


def test_every_smoke_config_has_its_row():
    folder = ROOT / "configs/smoke"
    names = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")}
    assert names - {"maml/glyphs_20w5s", "maml/sinusoid_joint"} == EXPERIMENTS.keys()  # as others


@DRAWN
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_fit_ends_with_its_reports_and_a_checkpoint(name, trained):
    config, _, folder = smoke(name)
    printed, found = trained(config), folder()
    assert {p.name for p in found.iterdir()} == OF_EVERY_RUN | EXPERIMENTS[name].reports
    assert (found / "table.txt").read_text() in printed
    assert checkpoint(found)["global_step"] == EXPERIMENTS[name].steps
    for picture in found.glob("*.png"):
        assert str(picture) in printed
        assert picture.stat().st_size > 5000


WGAN = (
    "--model.penalty.kind", "wgan_gp", "--model.loss", "wasserstein", "--model.critic_steps", "3",
    "--checkpoint_every", "5",
)  # fmt: skip
EVERY_9 = ("--checkpoint_every", "9")  # of a GAN's two steps a batch, which never make nine
LAZY = ("--model.penalty.every", "4")
GRAPHS = ("--model.compile", "eager")
# Options, and where such a run is stopped: of GANs between two steps of the generator, or between two
# lazy penalties and two grids, and before a row of metrics.csv that the interrupted run has written.
RESUMED = [
    *((name, (), one.stop, ()) for name, one in EXPERIMENTS.items() if name not in (
        "gan/mixture", "gan/mnist", "maml/glyphs_5w1s", "meta/data_values", "pinn/allen_cahn",
        "pinn/plate")),
    ("flow/meanflow", GRAPHS, (13, 10), FULL),
    ("gan/mixture", EVERY_9, (14, 10), FULL),
    ("gan/mixture", (*WGAN, "--model.penalty.weight", "1"), (9, 5), FULL),
    ("gan/mixture", LAZY, (24, 20), FULL),
    ("gan/mixture", (*LAZY, *GRAPHS, *EVERY_9), (14, 10), FULL),
    ("gan/mnist", EVERY_9, (13, 10), FULL),
    ("gan/mnist", (*WGAN, "--model.penalty.every", "1"), (8, 5), FULL),
    ("gan/mnist", (*LAZY, *GRAPHS, *EVERY_9), (13, 10), ()),
    ("maml/glyphs_5w1s", (), (6, 4), FULL),
    ("maml/glyphs_5w1s", ("--model.algorithm", "prototypes"), (6, 4), ()),
]  # fmt: skip


@DRAWN
@pytest.mark.parametrize(
    ("name", "options", "stop"),
    [
        pytest.param(*case, marks=marks, id=" ".join((case[0], *case[1])))
        for *case, marks in RESUMED
    ],
)
def test_resume_is_bit_for_bit_the_uninterrupted_run(name, options, stop, trained):
    config, fit, folder = smoke(name)
    trained(config, *options, into="whole")
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
@pytest.mark.parametrize("name", [name for name, one in EXPERIMENTS.items() if one.validated])
def test_a_checkpoint_is_judged_in_its_own_folder(name, trained, capsys):
    config, _, folder = smoke(name)
    trained(config)
    table, own = (folder() / "table.txt").read_bytes(), folder() / "config.yaml"
    for report in (folder() / "table.txt", *folder().glob("*.png")):
        report.unlink()
    assert run("test", "--config", own) == 0
    assert (folder() / "table.txt").read_bytes() == table
    assert {p.name for p in folder().iterdir()} == OF_EVERY_RUN | EXPERIMENTS[name].reports
    capsys.readouterr()
    assert run("validate", "--config", own) == 0
    assert EXPERIMENTS[name].validated in capsys.readouterr().out
    assert not folder(1).exists()


@pytest.mark.parametrize("name", [name for name, one in EXPERIMENTS.items() if one.others])
def test_a_checkpoint_that_was_trained_otherwise_is_refused(name, trained, capsys):
    config, _, folder = smoke(name)
    trained(config)
    before = sorted(folder().parent.rglob("*"))
    for args, message in EXPERIMENTS[name].others:
        for command in ("test", "fit"):
            assert run(command, "--config", config, *args, "--ckpt_path", "last") == 2
            error = capsys.readouterr().err
            assert re.search(message, error)
            assert "config.yaml that lies beside" in error
    assert sorted(folder().parent.rglob("*")) == before


@DRAWN
@pytest.mark.parametrize(
    "name", ["curvature/newton_cg", "gan/mnist", "penalty/digits_robust", "penalty/forces"]
)
def test_the_spectrum_is_drawn(name, trained, capsys):
    config, _, folder = smoke(name)
    trained(config)
    assert (
        run("spectrum", "--config", config, "--k", "1", "--num_samples", "2", "--steps", "9") == 0
    )
    assert "largest" in capsys.readouterr().out
    assert (folder() / "spectrum.png").exists()


TOO_LARGE = {
    "curvature/newton_cg": (("--model.adam_lr", "1e30"), "Lower adam_lr"),
    "flow/meanflow": (("--model.lr", "1e30"), "Lower lr"),
    "penalty/digits_robust": (
        ("--model.lr", "1e30", "--model.weights", "{jacobian: [1e30]}"),
        "Lower lr, or the weights",
    ),
    "penalty/forces": (("--model.lr", "1e30"), "Lower lr"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_rate_that_is_too_large_stops_the_run(name, capsys):
    args, message = TOO_LARGE[name]
    assert run("fit", "--config", smoke(name).config, *args) == 2
    assert message in capsys.readouterr().err
