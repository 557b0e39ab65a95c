"""`python -m experiments verify`: every config is right; what is wrong, or says nothing, is told."""

import json
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from experiments.few_shot.maml import MAMLRegression
from experiments.gan.experiment import GAN
from experiments.reweight import Reweighting
from experiments.shared import networks
from experiments.shared.learners import ALGORITHMS
from experiments.shared.stream import HeldOut
from experiments.shared.weights import even_weights
from tests.experiments.command import COMMAND_LINE, ROOT, checkpoint, options_of, run, smoke
from tests.experiments.test_reweight import examples
from tests.experiments.test_runs import EXPERIMENTS
from tests.lightning.test_audit import poison
from tests.long_tail import all_but

MAML = ROOT / "configs/smoke/maml/sinusoid.yaml"
GAN_CONFIG = ROOT / "configs/smoke/gan/mixture.yaml"
pytestmark = COMMAND_LINE


def verify(config, *args):
    return run("verify", "--config", config, *args)


@pytest.fixture
def poisoned(monkeypatch):
    """Every network of the experiments with a Function in it that loses its second derivative."""
    mlp = networks.mlp

    def with_poison(widths, act):
        *layers, last = mlp(widths, act)
        return nn.Sequential(*layers, poison(), last)

    for module in ("few_shot.maml", "gan.experiment", "reweight.experiment"):
        monkeypatch.setattr(f"experiments.{module}.mlp", with_poison)


@pytest.mark.parametrize(
    "name",
    all_but(lambda name: not (EXPERIMENTS[name].like or EXPERIMENTS[name].seldom), EXPERIMENTS),
)
def test_every_config_is_right(name, capsys):
    assert verify(smoke(name).config, *EXPERIMENTS[name].verify) == 0
    out = capsys.readouterr().out
    kind = options_of(name)["model"]["class_path"].rpartition(".")[2]
    assert out.startswith(f"{kind}.second_order_problem: The ")
    # one problem, or several with their names, of which all are right
    assert re.search(rf"{kind}\.second_order_problem: right, by|\n(\d+) right\n$", out)
    assert "second derivative: reverse-over-reverse " in out
    assert not list(Path().iterdir())


SMALL_GAN = GAN_CONFIG, *EXPERIMENTS["gan/mixture"].verify
# Options that make another problem of a config, or judge it another way
OPTIONS = {
    "reptile": (MAML, "--model.algorithm", "reptile"),
    "no penalty": (*SMALL_GAN, "--model.penalty", "null"),
    "wgan_gp": (*SMALL_GAN, "--model.penalty.kind", "wgan_gp"),
    "torch alone": (*SMALL_GAN, "--stand_ins", "false"),
    "routes": (MAML, "--routes", "[rr, torch.func.hessian]"),
    "bfloat16": (MAML, "--trainer.precision", "bf16-mixed"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case):
    assert verify(*OPTIONS[case]) == 0
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "config", [SMALL_GAN, [ROOT / "configs/smoke/meta/reweight_digits.yaml"]], ids=["gan", "meta"]
)
def test_what_is_wrong_is_named(config, poisoned, capsys):
    assert verify(*config) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "BackwardWithoutGrad" in out
    assert "culprit: " in out
    assert not list(Path().iterdir())


def test_json(poisoned, capsys):
    assert verify(MAML, "--json", "true") == 1
    table = json.loads(capsys.readouterr().out)
    assert table["ok"] is False
    (report,) = table["reports"]
    assert report["name"] == "MAMLRegression.second_order_problem"
    assert table["problem"].startswith("The loss on the support set of a task")
    assert table["stand_ins"] is True
    assert table["seed"] == 0
    assert table["not_run"] == []


def test_the_seed_is_that_of_the_config(capsys):
    outs = []
    for seed in (0, 0, 5):
        assert verify(MAML, "--json", "true", "--seed_everything", seed) == 0
        outs.append(json.loads(capsys.readouterr().out))
    assert outs[0] == outs[1]
    assert outs[2]["seed"] == 5
    assert outs[2]["reports"] != outs[0]["reports"]


def test_a_run_by_its_own_config_and_at_its_checkpoint(trained, monkeypatch):
    trained(MAML)
    folder = Path("runs/smoke/maml/sinusoid/version_0")
    before = sorted(Path().rglob("*"))
    seen = []
    problem = MAMLRegression.second_order_problem
    monkeypatch.setattr(
        MAMLRegression, "second_order_problem",
        lambda self, batch: seen.append(problem(self, batch)[1]) or problem(self, batch),
    )  # fmt: skip
    for args in ((), ("--ckpt_path", "last"), ("--ckpt_path", str(folder / "last.ckpt"))):
        assert verify(folder / "config.yaml", *args) == 0
    assert sorted(Path().rglob("*")) == before
    trained = checkpoint(folder)["state_dict"]
    for params, at_the_checkpoint in zip(seen, (False, True, True), strict=True):
        for name, value in params.items():
            assert torch.equal(value, trained[f"maml.model.{name}"]) == at_the_checkpoint, name


def test_the_batch_is_the_first_of_the_training(monkeypatch):
    seen = []
    monkeypatch.setattr(
        MAMLRegression, "second_order_problem",
        lambda self, batch: seen.append(batch) or (_ for _ in ()).throw(RuntimeError("enough")),
    )  # fmt: skip
    verify(MAML)
    monkeypatch.setattr(
        MAMLRegression, "training_step",
        lambda self, batch, batch_idx: seen.append(batch) or (_ for _ in ()).throw(KeyboardInterrupt()),
    )  # fmt: skip
    run("fit", "--config", MAML)
    (audited, trained) = seen
    torch.testing.assert_close(audited, trained, rtol=0, atol=0)


class Bare(pl.LightningModule):
    """Of somebody else: without the method, and with data of its own."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.net, self.scale = nn.Linear(2, 1), scale

    def train_dataloader(self):
        return [HeldOut(torch.ones(3, 2)), HeldOut(torch.zeros(3, 1))]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.scale * batch[0], batch[1]


class Own(Bare):
    """Several problems, without a word on them."""

    def second_order_problem(self, batch):
        assert batch[0].sum() == 6 * self.scale
        one = hog.functional_loss(self.net, F.mse_loss), hog.trainable_params(self.net), batch
        return {"first": one, "second": one}


class Raises(Bare):
    def second_order_problem(self, batch):
        raise RuntimeError("no problem today")


class Empty(Own):
    def train_dataloader(self):
        return []


def verify_class(tmp_path, kind, *args):
    config = tmp_path / "mine.yaml"
    config.write_text(f"model:\n  class_path: {__name__}.{kind.__name__}\n")
    status = verify(config, *args)
    config.unlink()
    return status


def test_a_module_of_ones_own(tmp_path, capsys):
    assert verify_class(tmp_path, Own, "--model.scale", "2") == 0
    out = capsys.readouterr().out
    for name in ("first", "second"):
        assert f"Own.second_order_problem[{name}]: right, by" in out
    assert out.rstrip().endswith("2 right")
    assert not list(tmp_path.iterdir())


# fmt: off
NOT_RUN = {
    "no method": (Bare, (), "Bare: expected a method second_order_problem(batch)"),
    "a method that raises": (Raises, (), "got RuntimeError: no problem today"),
    "no batch": (Empty, (), "Empty: expected a training batch, got an empty loader"),
    "an unknown route": (Own, ("--routes", "[sideways]"), "routes: expected some of"),
    "an unknown option": (Own, ("--route", "rr"), "error: "),
    "a checkpoint that is not there": (Own, ("--ckpt_path", "no.ckpt"), "checkpoint: expected a file"),
    "a checkpoint of something else": (Own, ("--ckpt_path", "other.ckpt"), "checkpoint: expected one of this network, got one of another"),
}
# fmt: on


@pytest.mark.parametrize("case", NOT_RUN)
def test_what_cannot_be_run_is_2(case, tmp_path, capsys):
    kind, args, message = NOT_RUN[case]
    steps = {"fit_loop": {"epoch_loop.state_dict": {"_batches_that_stepped": 0}}}
    of_lightning = {"global_step": 1, "pytorch-lightning_version": "2", "loops": steps}
    torch.save({**of_lightning, "state_dict": {"w": torch.ones(1)}}, "other.ckpt")
    assert verify_class(tmp_path, kind, *args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


# What the problems stand for, by formulas of their own.


def test_the_problem_of_maml_is_what_an_inner_step_descends():
    for algorithm in ALGORITHMS:
        model = MAMLRegression(hidden=[4], inner_lr=0.1, algorithm=algorithm).double()
        tasks = tuple(tuple(torch.randn(2, 2, 5, 1).double()) for _ in range(2))
        (x, y), _ = tasks
        loss, params, batch = model.second_order_problem(tasks)
        (g,) = torch.autograd.grad(loss(params, batch), [params["0.weight"]])
        expected = F.mse_loss(model(x[0]), y[0])
        torch.testing.assert_close(loss(params, batch), expected)
        adapted = model.maml.adapt((x[0], y[0]), steps=1)["0.weight"]
        if algorithm == "maml":
            torch.testing.assert_close(adapted, params["0.weight"] - 0.1 * g)


def test_the_problem_of_the_gan_is_what_its_penalty_differentiates():
    """R1 + R2 at these points, and its gradient, by the derivatives of the problem alone."""
    model = GAN(hog.GradientPenalty(kind="r1_r2", weight=0.3), hidden=[6], critic_scale=1)
    real = torch.randn(5, 2)
    scores, params, batch = model.second_order_problem(real)
    x, own = params["x"], {n: p for n, p in params.items() if n != "x"}
    torch.testing.assert_close(x[:5], real)
    penalty = model.penalty_value(x[:5], x[5:])
    at = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(scores({**own, "x": at}, batch), at, create_graph=True)
    torch.testing.assert_close(penalty, 0.3 * g.square().sum() / 5 / 2)
    # d penalty / d theta = 0.3 / 5 d/dtheta <ds/dx, g>: the block x, theta of the Hessian times g
    v = {**{n: torch.zeros_like(p) for n, p in own.items()}, "x": 0.3 / 5 * g.detach()}
    _, product = hog.hvp(scores, params, v, batch)
    expected = torch.autograd.grad(penalty, list(own.values()), allow_unused=True)
    for name, part in zip(own, expected, strict=True):
        part = torch.zeros_like(own[name]) if part is None else part
        torch.testing.assert_close(product[name], part, rtol=1e-4, atol=1e-6)


def test_the_problem_of_reweighting_is_what_its_weights_differentiate():
    model = Reweighting(against=[], hidden=[4]).double()
    noisy, clean = (
        part._replace(x=torch.randn(6, 64).double()) for part in (examples(6, 1), examples(6, 2))
    )
    loss, params, batch = model.second_order_problem((noisy, clean))
    own = {n: p for n, p in params.items() if n != "weights"}
    torch.testing.assert_close(params["weights"], even_weights(noisy))
    torch.testing.assert_close(loss(params, batch), F.cross_entropy(model(noisy.x), noisy.label))
    # u_i = <grad L_clean, d^2 L_noisy / dtheta de_i>: the block e, theta times the clean gradient
    wrong = F.cross_entropy(model(clean.x), clean.label)
    v = dict(zip(own, torch.autograd.grad(wrong, list(own.values())), strict=True))
    _, product = hog.hvp(loss, params, {**v, "weights": torch.zeros(6).double()}, batch)
    useful = product["weights"].clamp(min=0)
    torch.testing.assert_close(useful / useful.sum(), model.weights(noisy, clean))
