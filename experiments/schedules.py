"""Learning rates over a run."""

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def falling(
    module: pl.LightningModule, optimizer: Optimizer, decay: bool = True, every: int = 1
) -> LambdaLR:
    """A rate that falls linearly to zero over the run, or stays; its steps are at every so many
    batches."""

    def factor(steps: int) -> float:
        if not steps or not decay:  # at 0 the trainer does not know its batches
            return 1.0
        batches = module.trainer.num_training_batches * (module.trainer.max_epochs or 1)
        return 1 - min(steps * every / batches, 1)

    return LambdaLR(optimizer, factor)


def stepwise(
    module: pl.LightningModule, optimizer: Optimizer, decay: bool = True
) -> tuple[list[Optimizer], list[dict[str, Any]]]:
    """What `configure_optimizers` returns for a rate that falls with every batch."""
    schedule = {"scheduler": falling(module, optimizer, decay), "interval": "step"}
    return [optimizer], [schedule]
