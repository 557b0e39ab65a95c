"""Derivative order and step weights by epoch, also of a training that is resumed."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib.lightning import MetaAnnealing
from tests.lightning.trainers import QUIET, trainer

pytestmark = QUIET
STEPS = 3


class Training(pl.LightningModule):
    """Two batches of two tasks an epoch; notes what MAML was set to at each."""

    def __init__(self, learner=hog.MAML):
        super().__init__()
        torch.manual_seed(0)
        self.maml = learner(nn.Linear(2, 1), F.mse_loss, inner_lr=0.1, inner_steps=STEPS)
        self.seen = []

    def train_dataloader(self):
        x, y = torch.linspace(-1, 1, 32).view(4, 4, 2), torch.linspace(0, 1, 16).view(4, 4, 1)
        data = torch.utils.data.TensorDataset(x, y)
        return torch.utils.data.DataLoader(data, batch_size=2)

    def training_step(self, batch, batch_idx):
        weights = getattr(self.maml, "step_weights", None)
        self.seen.append((getattr(self.maml, "first_order", None), weights))
        return self.maml.loss((tuple(batch), tuple(batch)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, callbacks, module=None, checkpoint=None, epochs=5):
    module = Training() if module is None else module
    own = trainer(folder, callbacks, max_epochs=epochs)
    own.fit(module, ckpt_path=checkpoint, weights_only=True)
    return own, module


def weights(epoch, epochs):
    """MSL's, by the formula: equal for all, then ever more for the last."""
    if epoch >= epochs:
        return None
    share = (1 - epoch / epochs) / STEPS
    return pytest.approx([share, share, 1 - 2 * share])


CASES = {  # the epoch that each of ten steps counts as
    "nothing": ({}, [0] * 10),
    "first order": ({"first_order": 2}, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    "multi-step": ({"multi_step": 3}, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    "both": ({"first_order": 1, "multi_step": 4}, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    "every 3 steps": ({"first_order": 2, "multi_step": 3, "every": 3}, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_maml_is_set_to(case, tmp_path):
    options, epochs = CASES[case]
    _, module = fit(tmp_path, [MetaAnnealing(**options)])
    first, multi = options.get("first_order", 0), options.get("multi_step", 0)
    assert module.seen == [(epoch < first, weights(epoch, multi)) for epoch in epochs]


def test_a_resumed_training_goes_on_as_it_would_have(tmp_path):
    options = {"first_order": 2, "multi_step": 4}
    _, whole = fit(tmp_path, [MetaAnnealing(**options)])
    first, _ = fit(tmp_path, [MetaAnnealing(**options)], epochs=3)
    first.save_checkpoint(tmp_path / "some.ckpt")
    _, resumed = fit(tmp_path, [MetaAnnealing(**options)], checkpoint=tmp_path / "some.ckpt")
    assert resumed.seen == whole.seen[6:]
    pairs = zip(resumed.parameters(), whole.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    _, without = fit(tmp_path, [])
    assert not torch.equal(without.maml.model.weight, whole.maml.model.weight)


def test_every_maml_of_the_module(tmp_path):
    module = Training()
    module.more = nn.ModuleList([hog.MAML(nn.Linear(2, 1), F.mse_loss, inner_steps=2)])
    fit(tmp_path, [MetaAnnealing(first_order=9, multi_step=9)], module, epochs=1)
    assert module.more[0].first_order
    assert module.more[0].step_weights == [0.5, 0.5]


@pytest.mark.parametrize("learner", [hog.meta.Reptile, hog.meta.IMAML])
def test_without_a_maml_it_raises(learner, tmp_path):
    with pytest.raises(ValueError, match=r"expected a hoglib.MAML in Training, got none"):
        fit(tmp_path, [MetaAnnealing(first_order=1)], Training(learner))


@pytest.mark.parametrize("options", [{"first_order": -1}, {"multi_step": 0.5}, {"every": 0}])
def test_errors(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        MetaAnnealing(**options)
