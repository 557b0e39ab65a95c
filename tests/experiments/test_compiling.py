"""`--model.compile`: which way a run takes, that it says so, and that all are the same run."""

import re
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from experiments.data.sinusoid import SinusoidTasks
from experiments.maml import JointRegression, MAMLRegression
from experiments.training import compile_choice
from hoglib.stand_ins import mode as stand_in_mode
from tests.experiments.command import (
    COMMAND_LINE,
    ROOT,
    assert_same_run,
    checkpoint,
    metrics,
    run,
)
from tests.experiments.test_sinusoid import JOINT, SMOKE, fit, folder
from tests.long_tail import FULL

REWEIGHT = ROOT / "configs/smoke/meta/reweight_digits.yaml"

pytestmark = COMMAND_LINE


@pytest.fixture
def many(monkeypatch):
    """The losses of a smoke run are enough for a graph to pay."""
    monkeypatch.setattr(compile_choice, "LOSSES_THAT_PAY", 15)


def test_a_run_as_a_graph_is_the_run_without_to_the_bit(many, capsys):
    for version, (given, way) in enumerate(
        {"false": False, "eager": "eager", "null": "eager"}.items()
    ):
        fit("--model.compile", given)
        out = capsys.readouterr().out
        assert checkpoint(folder(version))["compiled"] == way
        said = "compile: 'eager', for 20 losses are too few for compiling to pay\n"
        assert out.count("compile: ") == out.count(said) == (given == "null")
        assert_same_run(folder(version), folder())
        table = (folder(version) / "table.txt").read_bytes()
        assert table == (folder() / "table.txt").read_bytes()


def test_a_short_run_has_no_graph_and_says_so(capsys):
    fit("--test_after_fit", "false")
    said = capsys.readouterr().out
    assert "compile: False, for 20 losses are too few for a graph to pay\n" in said
    assert checkpoint(folder())["compiled"] is False


@pytest.mark.parametrize("stopped_at", [10, 15])
def test_a_resumed_run_goes_on_in_the_way_that_it_began_in(stopped_at, many, capsys):
    """Also where the steps that it was given at first were too few for a graph."""
    fit("--trainer.max_steps", stopped_at, "--test_after_fit", "false")
    began = checkpoint(folder())["compiled"]
    assert began == (False if stopped_at == 10 else "eager")
    capsys.readouterr()
    fit("--ckpt_path", "last")
    assert f"compile: {began!r}, as the run began\n" in capsys.readouterr().out
    assert checkpoint(folder())["compiled"] == began


@FULL
def test_a_compiled_run_that_is_resumed_is_the_same_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path / "compiled"))
    inductor = ["--model.compile", "inductor"]
    fit(*inductor, "--trainer.logger.save_dir", "whole")
    fit(*inductor, "--trainer.max_steps", "10", "--test_after_fit", "false")
    fit("--ckpt_path", "last")  # which leaves it open
    assert "compile: 'inductor', as the run began\n" in capsys.readouterr().out
    assert_same_run(folder(), folder(root="whole"))
    fit("--model.compile", "false", "--test_after_fit", "false")
    for ours, theirs in zip(metrics(folder())[:4], metrics(folder(1)), strict=False):
        if ours["train/loss"]:
            assert float(ours["train/loss"]) == pytest.approx(float(theirs["train/loss"]), rel=1e-4)


LIMITS = {
    "epochs": ({"max_epochs": 3}, 18),
    "steps": ({"max_epochs": 3, "max_steps": 7}, 7),
    "fewer batches": ({"max_epochs": 3, "limit_train_batches": 2}, 6),
    "accumulated": ({"max_epochs": 2, "accumulate_grad_batches": 3}, 12),
    "accumulated steps": ({"max_epochs": 2, "max_steps": 3, "accumulate_grad_batches": 2}, 6),
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_losses_that_it_decides_by_are_those_that_are_computed(case, monkeypatch):
    limits, expected = LIMITS[case]
    model, called, decided = MAMLRegression(hidden=[3]), [], []
    # after each loss with gradients a learner keeps what training leaves; there is no public hook
    monkeypatch.setattr(model.maml, "_after_loss", lambda loop, found: called.append(found))
    monkeypatch.setattr(
        model.compile_choice, "_choose", lambda losses: (decided.append(losses), (False, ""))[1]
    )
    trainer = pl.Trainer(
        **limits, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, SinusoidTasks(iterations=6, tasks=2, shots=3))
    assert decided == [len(called)] == [expected]


DECISIONS = {1: False, 199: False, 200: "eager", 9_999: "eager", 10_000: True, float("inf"): True}


@pytest.mark.parametrize("losses", DECISIONS)
def test_the_decision_is_a_function_of_the_number_of_losses(losses):
    model = MAMLRegression(hidden=[3])
    model.compile_choice.apply(trainer_of(losses))
    assert model.maml.compiled == DECISIONS[losses]


def trainer_of(steps, accumulated=1):
    return SimpleNamespace(
        estimated_stepping_batches=steps, accumulate_grad_batches=accumulated, is_global_zero=True
    )


def test_what_is_asked_for_is_what_is_done():
    for wanted in (False, "eager", "inductor", True):
        model = MAMLRegression(hidden=[3], compile=wanted)
        model.compile_choice.load({"compiled": "eager"})
        model.compile_choice.apply(trainer_of(10**6))
        assert model.maml.compiled == wanted


def test_where_there_is_no_graph_to_be_had_null_and_false_are_fine():
    for model in (
        JointRegression(compile=False), JointRegression(), MAMLRegression(algorithm="reptile"),
        MAMLRegression(algorithm="imaml", compile=False),
    ):  # fmt: skip
        content = {}
        model.compile_choice.save(content)
        model.compile_choice.load(content)
        model.compile_choice.apply(trainer_of(10**6))
        assert content == {}


BAD = {
    "a way that is none": (
        SMOKE, ["--model.compile", "fast"],
        "compile: expected one of inductor, eager; got 'fast'",
    ),
    "joint training": (
        JOINT.config, ["--model.compile", "true"],
        "compile: expected null or false for joint training, which has no second derivatives",
    ),
    "Reptile": (
        SMOKE, ["--model.algorithm", "reptile", "--model.compile", "eager"],
        "compile: expected null or false for Reptile, .* got 'eager'; leave it out",
    ),
    "reweighting": (REWEIGHT, ["--model.compile", "true"], "null or false for hypergradient"),
    "among the options": (
        SMOKE, ["--model.options", "{compile: true}"],
        "options: expected arguments of MAML, .* got inner_lr, inner_steps, compile",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compiled_is_told_before_training(case, capsys):
    config, args, message = BAD[case]
    assert run("fit", "--config", config, *args) == 2
    error = capsys.readouterr().err
    assert re.search(message, " ".join(error.split()))


def test_the_operations_of_a_graph_are_not_looked_up_among_the_stand_ins(monkeypatch):
    """They are in it already, and to look up each would take as long as to run it."""
    model = MAMLRegression(hidden=[3], compile="eager")
    batch = SinusoidTasks(iterations=1, tasks=2, shots=3).train_dataloader().batch_of(0)
    model.maml.loss(batch)
    looked_up = []
    original = stand_in_mode._SecondOrder.__torch_function__

    def noting(self, func, *rest):
        looked_up.append(func)
        return original(self, func, *rest)

    monkeypatch.setattr(stand_in_mode._SecondOrder, "__torch_function__", noting)
    model.maml.loss(batch)
    assert not looked_up
    model.maml.compiled = False
    model.maml.loss(batch)
    assert looked_up
