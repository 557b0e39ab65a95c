"""The callback: a poisoned training stops before its first step, and a sound one is as without it."""

import random
import traceback

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.errors import HoglibError
from hoglib.lightning import SecondOrderAudit
from tests.functions import BackwardWithoutGrad
from tests.lightning.trainers import QUIET, state, trainer
from tests.models import Through
from tests.several_processes import found_by_each

pytestmark = QUIET


def poison():
    return Through(BackwardWithoutGrad.apply)


def square():
    return Through(torch.square)


class Training(pl.LightningModule):
    """Regression with a penalty; counts steps, and draws random numbers in each."""

    def __init__(self, act=square, manual=False):
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Sequential(act(), nn.BatchNorm1d(4))
        self.net = nn.Sequential(nn.Linear(3, 4), inner, nn.Linear(4, 1))
        self.automatic_optimization = not manual
        self.stepped, self.metrics, self.asked = 0, [], 0

    def second_order_problem(self, batch):
        """Runs the model, as where points are generated."""
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
        assert self.training
        self.asked += 1
        random.random(), np.random.rand()
        with torch.no_grad():
            self.net(torch.randn(4, 3).to(batch[0]))
        return hog.functional_loss(self.net, F.mse_loss), hog.trainable_params(self.net), batch

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = random.random() + np.random.rand() + torch.rand(())
        loss = F.mse_loss(self.net(x + noise), y)
        self.metrics.append(loss.item())
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.stepped += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader():
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)


def fit(folder, callbacks, module, checkpoint=None, **options):
    pl.seed_everything(3, verbose=False)
    own = trainer(folder, callbacks, **{"max_epochs": 2, **options})
    own.fit(module, loader(), ckpt_path=checkpoint, weights_only=True)
    return own


def test_a_poisoned_training_stops_before_its_first_step(tmp_path):
    module = Training(poison)
    before = state(module)
    with pytest.raises(hog.VerificationError, match=r"culprit: (net\.)?1\.0") as caught:
        fit(tmp_path, [SecondOrderAudit()], module)
    assert isinstance(caught.value, HoglibError)
    text = str(caught.value)
    assert "Training.second_order_problem: expected right second derivatives" in text
    assert "BackwardWithoutGrad" in text
    assert "action='warn'" in text
    assert (module.stepped, module.metrics) == (0, [])
    assert_close(state(module), before, rtol=0, atol=0)


def test_warn_goes_on(tmp_path, capsys):
    module, callback = Training(poison), SecondOrderAudit(action="warn")
    with pytest.warns(UserWarning, match=r"culprit: (net\.)?1\.0"):
        trainer = fit(tmp_path, [callback], module)
    assert module.stepped == 8
    assert "WRONG" in capsys.readouterr().out
    assert not callback.reports[0].ok
    path = tmp_path / "some.ckpt"
    trainer.save_checkpoint(path)
    resumed = Training(poison)  # audited again
    with pytest.raises(hog.VerificationError):
        fit(tmp_path, [SecondOrderAudit()], resumed, path, max_epochs=4)
    assert resumed.stepped == 0


# Of the trainer, and the module's
WAYS = {
    "plain": ({}, {}),
    "accumulation": ({"accumulate_grad_batches": 3}, {}),
    "manual optimisation": ({}, {"manual": True}),
    "fast_dev_run": ({"fast_dev_run": True}, {}),
    "overfit_batches": ({"overfit_batches": 2}, {}),
    "bf16-mixed": ({"precision": "bf16-mixed"}, {}),
    "64-true": ({"precision": "64-true"}, {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train.*")
@pytest.mark.filterwarnings("ignore:.*overfit.*:UserWarning")
def test_a_run_with_it_is_the_run_without_it(way, tmp_path, capsys):
    options, of_module = WAYS[way]
    runs = []
    for callbacks in ([], [SecondOrderAudit()]):
        module = Training(**of_module)
        fit(tmp_path, callbacks, module, **options)
        runs.append(module)
        drawn = random.random(), np.random.rand(), torch.rand(()).item()
        module.metrics.append(drawn)
    without, with_it = runs
    assert with_it.asked == 1
    assert without.metrics == with_it.metrics
    assert without.stepped == with_it.stepped > 0
    assert_close(state(with_it), state(without), rtol=0, atol=0)
    assert capsys.readouterr().out.count("Training.second_order_problem: right, by") == 1


def test_options_are_those_of_audit(tmp_path, capsys):
    class Attends(Training):
        """Torch has no second derivative of its attention on the CPU; hoglib has."""

        def second_order_problem(self, batch):
            def loss(params, x):
                q = (x @ params["w"])[None, None]
                return F.scaled_dot_product_attention(q, q, q).square().sum()

            return loss, {"w": self.net[0].weight.T}, batch[0]

    with pytest.raises(hog.VerificationError, match="scaled_dot_product"):
        fit(tmp_path, [SecondOrderAudit(stand_ins=False)], Attends())
    capsys.readouterr()
    for verbose in (False, True):
        capsys.readouterr()
        fit(tmp_path, [SecondOrderAudit(verbose=verbose)], Attends())
        assert ("check  " in capsys.readouterr().out) == verbose

    class Norm(Training):
        def second_order_problem(self, batch):
            net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))
            return hog.functional_loss(net, F.mse_loss), hog.trainable_params(net), batch

    with pytest.raises(hog.VerificationError, match=r"torch\.func\.hessian"):
        fit(tmp_path, [SecondOrderAudit(routes=["torch.func.hessian"], stand_ins=False)], Norm())


def test_of_a_loader_the_first_batch_is_audited(tmp_path):
    def reports(act):
        class OfALoader(Training):
            def second_order_problem(self, batch):
                loss, params, _ = super().second_order_problem(batch)
                return loss, params, loader()

        callback = SecondOrderAudit(action="warn")
        fit(tmp_path, [callback], OfALoader(act), max_steps=1)
        return callback.reports

    (right,) = reports(square)
    assert right.ok
    with pytest.warns(UserWarning, match="expected right second derivatives"):
        (wrong,) = reports(poison)
    assert wrong.culprits


def test_several_problems(tmp_path, capsys):
    class Two(Training):
        def second_order_problem(self, batch):
            one = super().second_order_problem(batch)
            bad = nn.Sequential(nn.Linear(3, 4), poison(), nn.Linear(4, 1))
            other = hog.functional_loss(bad, F.mse_loss), hog.trainable_params(bad), batch
            return {"net": one, "other": other}

    callback = SecondOrderAudit()
    with pytest.raises(hog.VerificationError) as caught:
        fit(tmp_path, [callback], Two())
    assert "second_order_problem[other]: WRONG" in str(caught.value)
    assert "second_order_problem[net]" not in str(caught.value)
    assert "second_order_problem[net]: right" in capsys.readouterr().out
    assert [report.ok for report in callback.reports] == [True, False]


def test_a_module_that_does_not_say_what(tmp_path):
    class Silent(Training):
        second_order_problem = None

    module = Silent()
    words = r"expected a method second_order_problem\(batch\)"
    with pytest.raises(TypeError, match=words) as caught:
        fit(tmp_path, [SecondOrderAudit(action="warn")], module)
    assert module.stepped == 0
    _, _, example = str(caught.value).partition("\n\n")
    scope = {"hoglib": hog, "torch": torch}
    exec(f"class Example:\n{example}", scope)  # what it says to add does what it says
    mine = Training()
    ones = torch.ones(4, 3), torch.ones(4, 1)
    loss, params, batch = scope["Example"].second_order_problem(mine, ones)
    assert loss(params, batch).dim() == 0


def raising(*batch):
    raise RuntimeError("no problem today")


WRONG = {
    "raises": (raising, ValueError, "got RuntimeError: no problem today"),
    "nothing": (lambda batch: None, TypeError, "got NoneType None"),
    "a pair": (lambda batch: (F.mse_loss, batch), TypeError, r"got a tuple \(function, list\)"),
    "an empty list": (lambda batch: [], ValueError, "expected at least one"),
    "a list of anything": (lambda batch: [1], TypeError, r"second_order_problem\(batch\)\[0\]: expected"),
    "no parameters": (lambda batch: (F.mse_loss, {}, batch), ValueError, "params: expected at least one"),
    "no loss": (lambda batch: (raising, {"w": torch.ones(2)}, batch), hog.VerificationError, "NOT RUN"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_problem_is_explained(case, tmp_path):
    method, kind, message = WRONG[case]
    module = Training()
    module.second_order_problem = method
    with pytest.raises(kind, match=message) as caught:
        fit(tmp_path, [SecondOrderAudit()], module)
    assert isinstance(caught.value, HoglibError)
    assert module.stepped == 0


@pytest.mark.parametrize(
    "options", [{"action": "ignore"}, {"stand_ins": 1}, {"verbose": None}, {"routes": ["sideways"]}]
)
def test_errors(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))) as caught:
        SecondOrderAudit(**options)
    assert isinstance(caught.value, HoglibError)


# In two processes: what is wrong is only what the second one sees.


class OfProcess(Training):
    def second_order_problem(self, batch):
        how = self.how if dist.get_rank() else "right"
        if how == "raises":
            raise RuntimeError("no problem today")
        act = poison() if how == "wrong" else square()
        net = nn.Sequential(nn.Linear(3, 4), act, nn.Linear(4, 1))
        return hog.functional_loss(net, F.mse_loss), hog.trainable_params(net), batch


def in_a_process(rank, folder, found):
    for how in ("right", "wrong", "raises"):
        module = OfProcess()
        module.how = how
        try:
            fit(folder, [SecondOrderAudit()], module, devices=2, strategy="ddp", max_epochs=1)
            found[how] = "trained", "", module.stepped
        except Exception as error:
            text = str(error) if isinstance(error, HoglibError) else traceback.format_exc()
            found[how] = type(error).__name__, text, module.stepped


def test_two_processes_raise_alike(tmp_path):
    first, second = found_by_each(in_a_process, tmp_path)
    for found in (first, second):
        assert found["right"] == ["trained", "", 2]
        name, text, stepped = found["wrong"]
        assert (name, stepped) == ("WrongSecondDerivative", 0)
        assert "OfProcess.second_order_problem in process 1: expected right" in text
        assert "BackwardWithoutGrad" in text
        assert found["raises"][0] == "ArgumentValueError"
        assert "no problem today" in found["raises"][1]
        assert found["raises"][2] == 0
    assert first["wrong"] == second["wrong"]
