"""Meta-training with the tasks shared out over processes; alone, it is that of one."""

import logging

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hoglib as hog

logging.getLogger("lightning.pytorch").setLevel("ERROR")


def tasks(count):
    generator = torch.Generator().manual_seed(0)
    rand = lambda n: torch.randn(count, n, 2, dtype=torch.float64, generator=generator)  # noqa: E731
    return (rand(4), rand(4)), (rand(5), rand(5))


def learner(**options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 2)).double()
    options = {"inner_lr": 0.1, "inner_steps": 3, "learn_lr": "parameter", **options}
    kind = options.pop("kind", hog.MAML)
    if kind is not hog.MAML:
        options.pop("learn_lr")
    return kind(model, F.mse_loss, **options)


class Held:
    """The same tasks, so many times."""

    def __init__(self, batch, times):
        self.batch, self.times = batch, times

    def __len__(self):
        return self.times

    def __iter__(self):
        return iter([self.batch] * self.times)


class Training(pl.LightningModule):
    """Two steps, as the experiments take them."""

    def __init__(self, count, **options):
        super().__init__()
        self.maml, self.count = learner(**options), count

    def train_dataloader(self):
        return Held(tasks(self.count), 2)

    def training_step(self, batch, index):
        mine, weight = hog.meta.shard(batch)
        return weight * self.maml.loss(mine)

    def validation_step(self, batch, index):
        # Lightning takes no_grad instead where gloo runs
        assert (
            torch.is_inference_mode_enabled() or not self.trainer.testing or dist.is_initialized()
        )
        self.log("value", self.maml.loss(batch).item(), sync_dist=True)
        support = tuple(x[0] for x in batch[0])
        assert self.maml(support[0], params=self.maml.adapt(support)).shape == (4, 2)

    test_step = validation_step

    def val_dataloader(self):
        return Held(tasks(self.count), 1)

    test_dataloader = val_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Loss(nn.Module):
    """What DistributedDataParallel wraps."""

    def __init__(self, maml):
        super().__init__()
        self.maml = maml

    def forward(self, tasks):
        mine, weight = hog.meta.shard(tasks)
        return weight * self.maml.loss(mine)


CASES = {
    "even": (4, {}),
    "uneven": (5, {}),
    "uneven, remat, looped": (5, {"memory": "remat", "over_tasks": "loop"}),
    "Reptile": (5, {"kind": hog.meta.Reptile}),
    "IMAML": (5, {"kind": hog.meta.IMAML, "inner_steps": 10, "strength": 4.0}),
}


def plainly(count, options):
    maml = learner(**options)
    loss = Loss(maml)
    if dist.is_initialized():
        loss = DistributedDataParallel(loss)
    loss(tasks(count)).backward()
    return {n: p.grad.tolist() for n, p in maml.named_parameters()}


def by_lightning(count, options):
    module, several = Training(count, **options), dist.is_initialized()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        devices=2 if several else 1,
        strategy=DDPStrategy(process_group_backend="gloo") if several else "auto",
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module)
    found = {n: p.tolist() for n, p in module.maml.named_parameters()}
    for loop in (trainer.validate, trainer.test):
        (metrics,) = loop(module, verbose=False)
        found[loop.__name__] = metrics["value"]
    return found


def too_few():
    try:
        hog.meta.shard(tasks(1))
    except ValueError as error:
        return str(error)
    return ""


def everything():
    found = {name: plainly(*case) for name, case in CASES.items()}
    kinds = ("uneven", "Reptile", "IMAML")  # what else a case has is the same in a fit
    return found | {f"Lightning, {name}": by_lightning(*CASES[name]) for name in kinds}
