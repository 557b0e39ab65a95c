"""A resumed run with noise is the same run, with the callback; and is not, without it."""

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from hoglib.lightning import RNGState
from tests.lightning.trainers import QUIET, trainer

pytestmark = QUIET


class Noisy(pl.LightningModule):
    """Dropout, and noise from Python and NumPy, in every step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        noise = random.random() + np.random.rand()
        return (self.net(batch) - noise).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


DATA = torch.arange(24.0).reshape(8, 3) / 24


def run(callbacks, folder, checkpoint=None, shuffle=True, **options):
    pl.seed_everything(5, verbose=False)
    model = Noisy()
    own = trainer(folder, callbacks, log_every_n_steps=1, **options)
    # In a fixed order every batch is alike: Lightning starts an interrupted epoch from its first batch.
    data = DATA if shuffle else torch.ones_like(DATA)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=shuffle)
    own.fit(model, loader, ckpt_path=checkpoint, weights_only=True)
    return own, model


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


class Save(pl.Callback):
    """Saves in the middle of training, as a checkpoint callback does."""

    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


# Epochs of 4 steps; in a fixed order or shuffled
WHEN = {"after an epoch": (4, True), "in an epoch": (6, False)}


@pytest.mark.filterwarnings("ignore:.*ended before the epoch ended.*")  # said of a fixed order too
@pytest.mark.parametrize("kept", [True, False], ids=["with RNGState", "without"])
@pytest.mark.parametrize("when", WHEN)
def test_resume_with_noise(when, kept, tmp_path):
    step, shuffle = WHEN[when]
    callbacks = [RNGState()] if kept else []
    path = tmp_path / "some.ckpt"
    options = {"shuffle": shuffle, "max_epochs": 3}
    _, whole = run([*callbacks, Save(path, step)], tmp_path, **options)
    resumed, model = run(callbacks, tmp_path, path, limit_train_batches=4, **options)
    assert resumed.global_step == 12
    assert same(whole, model) == kept


def test_a_test_run_does_not_touch_the_generators(tmp_path):
    callback = RNGState()
    own, _ = run([callback], tmp_path, max_epochs=1)
    checkpoint = {}
    callback.on_save_checkpoint(own, own.lightning_module, checkpoint)
    before = torch.rand(1)
    torch.manual_seed(1)
    own.state.fn = TrainerFn.TESTING
    callback.on_load_checkpoint(own, own.lightning_module, checkpoint)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.rand(1), expected)
    own.state.fn = TrainerFn.FITTING
    callback.on_load_checkpoint(own, own.lightning_module, checkpoint)
    assert torch.equal(torch.rand(1), before)
