"""Lightning under DDP: the whole LightningModule is wrapped, and training_step calls its critic."""

import logging

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.penalties.processes import (
    HALF,
    by_hand,
    by_hoglib,
    critic,
    data,
    gradients,
    loss,
    outcome,
)

logging.getLogger("lightning.pytorch").setLevel("ERROR")
STEPS = 4


class Critic(pl.LightningModule):
    """Automatic optimisation of a critic."""

    def __init__(self, gp, how, generator=False):
        super().__init__()
        self.critic, self.gp, self.how, self.seen = critic(), gp, how, []
        torch.manual_seed(4)
        if generator:
            self.generator = nn.Linear(3, 3).double()

    def training_step(self, batch, index):
        penalty = self.gp(self.critic, batch[0])
        return penalty if self.how == "penalty alone" else penalty + loss(self.critic, *batch)

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(gradients(self.critic))

    def configure_optimizers(self):
        return torch.optim.SGD(self.critic.parameters(), lr=0.1)


class Gan(Critic):
    """Manual optimisation of a critic and its generator."""

    def __init__(self, gp, how, backward="manual_backward"):
        super().__init__(gp, how, generator=True)
        self.automatic_optimization = False
        self.backward_by = backward

    def both_backward(self, value):
        value.backward() if self.backward_by == "backward" else self.manual_backward(value)

    def training_step(self, batch, index):
        real, z = batch
        of_critic, of_generator = self.optimizers()
        fake = self.generator(z)
        self.toggle_optimizer(of_critic)
        of_critic.zero_grad()
        if self.how == "one backward":
            self.both_backward(loss(self.critic, real, fake.detach()) + self.gp(self.critic, real))
        else:
            if self.how == "loss, then penalty":
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


class ByHand:
    """What a Gan asks its trainer for, in one process."""

    def __init__(self, model):
        sgd = model.configure_optimizers()
        model.optimizers = lambda: sgd
        model.manual_backward = torch.Tensor.backward
        model.toggle_optimizer = model.untoggle_optimizer = lambda optimizer: None


def alone(model, accumulate):
    """The gradients of one process with both shards."""
    if isinstance(model, Gan):
        ByHand(model)
        for step in range(STEPS):
            model.training_step(data(step), step)
        return model.seen
    sgd = model.configure_optimizers()
    for step in range(STEPS):
        (model.training_step(data(step), step) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            model.on_before_optimizer_step(sgd)
            sgd.step()
            sgd.zero_grad()
    return model.seen


def fit(make, how, strategy, accumulate=1, **options):
    expected = alone(make(by_hand, how, **options), accumulate)
    model = make(by_hoglib, how, **options)
    everything = [torch.cat(tensors) for tensors in zip(*map(data, range(STEPS)), strict=True)]
    data_set = TensorDataset(*everything)
    sampler = DistributedSampler(data_set, 2, dist.get_rank(), shuffle=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, accumulate_grad_batches=accumulate,
        strategy=DDPStrategy(static_graph=True) if strategy == "static_graph" else strategy,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    error = None
    try:
        trainer.fit(model, DataLoader(data_set, batch_size=HALF, sampler=sampler))
    except RuntimeError as e:
        error = e
    return outcome(model.seen, expected, error)


UNUSED = "ddp_find_unused_parameters_true"
CASES = {
    "penalty alone": ("mean", fit, Critic, "penalty alone", "ddp"),
    "one backward": ("mean", fit, Critic, "one backward", "ddp"),
    "penalty alone, accumulating": ("mean", fit, Critic, "penalty alone", "ddp", 2),
    "one backward, accumulating": ("mean", fit, Critic, "one backward", "ddp", 2),
    "penalty alone, static_graph": ("mean", fit, Critic, "penalty alone", "static_graph"),
    "one backward, static_graph": ("mean", fit, Critic, "one backward", "static_graph"),
    "penalty alone, unused": ("mean", fit, Critic, "penalty alone", UNUSED),
    "GAN, penalty alone, unused": ("mean", fit, Gan, "penalty alone", UNUSED),
    "GAN, one backward, unused": ("mean", fit, Gan, "one backward", UNUSED),
    "GAN, loss, then penalty, unused": ("mean", fit, Gan, "loss, then penalty", UNUSED),
    "GAN, one backward": ("refused", fit, Gan, "one backward", "ddp"),
    "GAN, one backward, static_graph": ("refused", fit, Gan, "one backward", "static_graph"),
}


def with_generator(strategy):
    return fit(Critic, "one backward", strategy, generator=True)


def gan_without_manual_backward():
    return fit(Gan, "one backward", UNUSED, backward="backward")


CASES |= {
    "a generator beside": ("refused", with_generator, "ddp"),
    "a generator beside, unused": ("mean", with_generator, UNUSED),
    "GAN, .backward() for manual_backward": ("refused", gan_without_manual_backward),
}
