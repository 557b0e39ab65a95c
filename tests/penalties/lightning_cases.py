"""Lightning under DDP: the whole LightningModule is wrapped, and training_step calls its critic."""

import logging
from functools import partial

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.penalties import processes
from tests.penalties.processes import by_hand, by_hoglib, critic, data, gradients, loss

logging.getLogger("lightning.pytorch").setLevel("ERROR")
STEPS = 4


class Critic(pl.LightningModule):
    """Automatic optimisation of a critic."""

    def __init__(self, gp, generator=False):
        super().__init__()
        self.critic, self.gp, self.seen = critic(), gp, []
        torch.manual_seed(4)
        if generator:
            self.generator = nn.Linear(3, 3).double()

    def training_step(self, batch, index):
        return self.gp(self.critic, batch[0]) + loss(self.critic, *batch)

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(gradients(self.critic))

    def configure_optimizers(self):
        return torch.optim.SGD(self.critic.parameters(), lr=0.1)


class Gan(Critic):
    """Manual optimisation of a critic and its generator."""

    def __init__(self, gp, parts="one", manual=True):
        super().__init__(gp, generator=True)
        self.automatic_optimization = False
        self.parts, self.manual = parts, manual

    def both_backward(self, value):
        self.manual_backward(value) if self.manual else value.backward()

    def training_step(self, batch, index):
        real, z = batch
        of_critic, of_generator = self.optimizers()
        fake = self.generator(z)
        self.toggle_optimizer(of_critic)
        of_critic.zero_grad()
        if self.parts == "one":
            self.both_backward(loss(self.critic, real, fake.detach()) + self.gp(self.critic, real))
        else:
            self.both_backward(loss(self.critic, real, fake.detach()))
            self.both_backward(self.gp(self.critic, real))
        self.seen.append(gradients(self.critic))
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        self.both_backward(-self.critic(self.generator(z)).mean())
        self.seen.append(gradients(self.generator))
        of_generator.step()
        self.untoggle_optimizer(of_generator)

    def on_before_optimizer_step(self, optimizer):
        """The step looks at the gradients itself."""

    def configure_optimizers(self):
        parts = self.critic, self.generator
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


def alone(model):
    """The gradients of one process with both shards, and a Gan without its trainer."""
    sgd = model.configure_optimizers()
    model.optimizers = lambda: sgd
    model.manual_backward = torch.Tensor.backward
    model.toggle_optimizer = model.untoggle_optimizer = lambda optimizer: None
    for step in range(STEPS):
        value = model.training_step(data(step), step)
        if value is not None:
            value.backward()
            model.on_before_optimizer_step(sgd)
            sgd.step()
            sgd.zero_grad()
    return model.seen


def fit(make, strategy, **options):
    expected = alone(make(by_hand, **options))
    model = make(by_hoglib, **options)
    everything = [torch.cat(tensors) for tensors in zip(*map(data, range(STEPS)), strict=True)]
    data_set = TensorDataset(*everything)
    sampler = DistributedSampler(data_set, 2, dist.get_rank(), shuffle=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=1,
        strategy=DDPStrategy(static_graph=True) if strategy == "static_graph" else strategy,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    error = None
    try:
        trainer.fit(model, DataLoader(data_set, batch_size=processes.HALF, sampler=sampler))
    except RuntimeError as e:
        error = e
    return processes.outcome(model.seen, expected, error)


UNUSED = "ddp_find_unused_parameters_true"
CASES = {
    "ddp": ("mean", fit, Critic, "ddp"),
    "static_graph": ("mean", fit, Critic, "static_graph"),
    "a generator beside": ("refused", partial(fit, generator=True), Critic, "ddp"),
    "a generator beside, unused": ("mean", partial(fit, generator=True), Critic, UNUSED),
    "GAN": ("refused", fit, Gan, "ddp"),
    "GAN, static_graph": ("refused", fit, Gan, "static_graph"),
    "GAN, unused": ("mean", fit, Gan, UNUSED),
    "GAN, loss, then penalty, unused": ("mean", partial(fit, parts="two"), Gan, UNUSED),
    "GAN, .backward() for manual_backward": ("refused", partial(fit, manual=False), Gan, UNUSED),
}
