"""Fits under ModelParallelStrategy, whose modules fully_shard (FSDP2) shards: those of one process."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hoglib as hog
from hoglib._core.substrate import placement
from hoglib.errors import UnsupportedError
from hoglib.lightning import CurvatureMonitor, SecondOrderAudit
from tests.lightning.trainers import QUIET, trainer
from tests.several_processes import found_by_each

pytestmark = QUIET
BATCHES = 3  # an epoch's
SPECTRUM = {"every": BATCHES, "k": 1, "num_samples": 1, "steps": 3, "critical": True}


class Critic(pl.LightningModule):
    """A critic with a penalty in every second step."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(3, 3), nn.Sequential(nn.SiLU(), nn.Linear(3, 3)), nn.SiLU(), nn.Linear(3, 1)
        )
        self.double()
        self.penalty = hog.GradientPenalty(kind="r1", weight=1.0, every=2)
        self.losses = []

    def configure_model(self):
        if self.device_mesh is None or any(map(placement.is_sharded, self.parameters())):
            return
        from torch.distributed.fsdp import fully_shard

        for part in (self.net[1], self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def second_order_problem(self, batch):
        loss = hog.functional_loss(self.net, F.mse_loss)
        return loss, hog.trainable_params(self.net), batch

    def training_step(self, batch, index):
        real, targets = batch
        loss = F.mse_loss(self.net(real), targets) + self.penalty(self.net, real)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


def loader():
    """Batches of 8 examples, of which each process has a part."""
    x = torch.randn(8 * BATCHES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    if not dist.is_initialized():
        return DataLoader(data, batch_size=8)
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler)


def fit(folder, module, callbacks, epochs, path=None, **options):
    own = trainer(folder, callbacks, max_epochs=epochs, **options)
    own.fit(module, loader(), ckpt_path=path)
    return own


def state(module, monitor):
    """All that a fit leaves, as lists."""
    return {
        "params": {n: placement.full_tensor(p).tolist() for n, p in module.named_parameters()},
        "largest": [float(one.spectrum.largest) for one in monitor.history],
        "trace": [one.spectrum.trace[0] for one in monitor.history],
        "batches": [one.batch for one in monitor.history],
        "critical": [one.critical for one in monitor.history],
        "calls": module.penalty.calls,
    }


def in_a_process(rank, folder, found):
    def options():
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        return {"strategy": strategy, "devices": 2}

    whole, monitor = Critic(), CurvatureMonitor(**SPECTRUM)
    fit(folder, whole, [monitor], 2, **options())
    assert all(map(placement.is_sharded, whole.net.parameters()))
    found["whole"] = state(whole, monitor)
    half, monitor = Critic(), CurvatureMonitor(**SPECTRUM)
    trainer = fit(folder, half, [monitor], 1, **options())
    path = folder / "half"
    trainer.save_checkpoint(path)  # a folder, with the shards of each process
    found["checkpoint"] = path.is_dir()
    resumed, monitor = Critic(seed=1), CurvatureMonitor(**SPECTRUM)
    fit(folder, resumed, [monitor], 2, path, **options())
    found["resumed"] = state(resumed, monitor)
    found["losses"] = [whole.losses, half.losses + resumed.losses]
    found["audit"] = "nothing was raised"
    try:
        fit(folder, Critic(), [SecondOrderAudit()], 1, **options())
    except UnsupportedError as error:
        found["audit"] = str(error)


def test_fits_of_two_processes_equal_that_of_one(tmp_path):
    """The uninterrupted fit of two processes, and a resumed one, which restores parameters, optimizer, the
    schedule of the penalty and the measurements."""
    one, monitor = Critic(), CurvatureMonitor(**SPECTRUM)
    fit(tmp_path, one, [monitor], 2)
    expected = state(one, monitor)
    assert expected["batches"] == [0, 3, 6]
    assert expected["calls"] == 2 * BATCHES
    for found in found_by_each(in_a_process, tmp_path):
        assert found["checkpoint"]
        assert found["losses"][0] == found["losses"][1]
        assert "expected params that each process holds whole" in found["audit"]
        for name in ("whole", "resumed"):
            got = found[name]
            assert got["batches"] == expected["batches"], name
            assert got["calls"] == expected["calls"], name
            for key in ("largest", "trace", "critical"):
                assert got[key] == pytest.approx(expected[key], rel=1e-8), (name, key)
            for key, values in expected["params"].items():
                torch.testing.assert_close(
                    torch.tensor(got["params"][key]), torch.tensor(values), rtol=0, atol=1e-10
                )
