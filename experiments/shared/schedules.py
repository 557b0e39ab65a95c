"""Learning rates that fall linearly over a run."""

import lightning.pytorch as pl
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def linear_decay(module: pl.LightningModule, optimizer: Optimizer, every: int = 1) -> LambdaLR:
    """A learning rate that falls linearly to zero over the run.

    Args:
        module: The module that is trained, whose trainer knows the number of batches.
        optimizer: Its optimizer.
        every: Batches between two steps of the schedule.
    Returns:
        The schedule.
    """

    def factor(steps: int) -> float:
        if not steps:  # at step 0 the trainer does not know its batches yet
            return 1.0
        batches = module.trainer.num_training_batches * (module.trainer.max_epochs or 1)
        return 1 - min(steps * every / batches, 1)

    return LambdaLR(optimizer, factor)
