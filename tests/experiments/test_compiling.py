"""`--model.compile`: which way a run takes, that it says so, and that all are the same run."""

from types import SimpleNamespace

import pytest

from experiments.few_shot.maml import JointRegression, MAMLRegression
from experiments.few_shot.sinusoid import SinusoidTasks
from experiments.shared import compile_choice
from experiments.shared.compile_choice import LOSSES_THAT_PAY, LOSSES_THAT_PAY_FOR_COMPILING
from tests.experiments.command import COMMAND_LINE, assert_same_run, checkpoint
from tests.experiments.test_sinusoid import SMOKE, fit, folder
from tests.lightning.trainers import trainer

pytestmark = COMMAND_LINE


def test_a_run_as_a_graph_is_the_run_without_to_the_bit(trained, monkeypatch, capsys):
    printed, whole = trained(SMOKE, into="whole"), folder(root="whole")
    assert "compile: False, for 20 losses are too few for a graph to pay\n" in printed
    assert checkpoint(whole)["compiled"] is False
    monkeypatch.setattr(compile_choice, "LOSSES_THAT_PAY", 15)
    fit()
    assert (
        "compile: 'eager', for 20 losses are too few for compiling to pay\n"
        in capsys.readouterr().out
    )
    assert checkpoint(folder())["compiled"] == "eager"
    assert_same_run(folder(), whole)
    assert (folder() / "table.txt").read_bytes() == (whole / "table.txt").read_bytes()


def test_a_resumed_run_goes_on_in_the_way_that_it_began_in(monkeypatch, capsys):
    """Also where the steps that it was given at first were too few for a graph."""
    monkeypatch.setattr(compile_choice, "LOSSES_THAT_PAY", 15)
    fit("--trainer.max_steps", "10", "--test_after_fit", "false")
    assert checkpoint(folder())["compiled"] is False
    fit("--ckpt_path", "last", "--test_after_fit", "false")
    assert "compile: False, as the run began\n" in capsys.readouterr().out
    assert checkpoint(folder())["compiled"] is False


LIMITS = {
    "epochs": ({"max_epochs": 3}, 18),
    "steps": ({"max_epochs": 3, "max_steps": 7}, 7),
    "fewer batches": ({"max_epochs": 3, "limit_train_batches": 2}, 6),
    "accumulated steps": ({"max_epochs": 2, "max_steps": 3, "accumulate_grad_batches": 2}, 6),
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_losses_that_it_decides_by_are_those_that_are_computed(case, monkeypatch):
    limits, expected = LIMITS[case]
    model, called, decided_by = MAMLRegression(hidden=[3]), [], []
    loss, choose = model.maml.loss, model.compile_choice._choose
    monkeypatch.setattr(model.maml, "loss", lambda tasks: called.append(1) or loss(tasks))
    monkeypatch.setattr(
        model.compile_choice, "_choose", lambda losses: decided_by.append(losses) or choose(losses)
    )
    own = trainer(None, **limits, num_sanity_val_steps=0, limit_val_batches=0)
    own.fit(model, SinusoidTasks(iterations=6, tasks=2, shots=3))
    assert decided_by == [len(called)] == [expected]


def trainer_of(steps):
    return SimpleNamespace(
        estimated_stepping_batches=steps, accumulate_grad_batches=1, is_global_zero=True
    )


@pytest.mark.parametrize(
    ("option", "losses", "resumed", "way"),
    [
        (None, LOSSES_THAT_PAY - 1, None, False),
        (None, LOSSES_THAT_PAY, None, "eager"),
        (None, LOSSES_THAT_PAY_FOR_COMPILING - 1, None, "eager"),
        (None, LOSSES_THAT_PAY_FOR_COMPILING, None, True),
        (None, float("inf"), None, True),
        (None, 10**6, {}, False),  # from before there was a choice
        (None, 10**6, {"compiled": "inductor"}, "inductor"),
        (True, 10**6, {"compiled": "eager"}, True),
        ("eager", 1, {"compiled": False}, "eager"),
        (False, 10**6, {"compiled": "eager"}, False),
    ],
)
def test_the_way_of_a_run(option, losses, resumed, way):
    model, content = MAMLRegression(hidden=[3], compile=option), {}
    if resumed is not None:
        model.compile_choice.load(resumed)
    model.compile_choice.apply(trainer_of(losses))
    model.compile_choice.save(content)
    assert model.maml.compiled == content["compiled"] == way


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
