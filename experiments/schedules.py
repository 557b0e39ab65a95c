"""Rates that fall over a run."""

import lightning.pytorch as pl
import torch


def decayed(module: pl.LightningModule, optimizer: torch.optim.Optimizer, decay: bool) -> tuple:
    """What configure_optimizers returns: the rate falls linearly to zero over the run, or stays."""

    def factor(steps: int) -> float:
        batches = module.trainer.num_training_batches * (module.trainer.max_epochs or 1)
        return 1 - min(steps / batches, 1) if steps and decay else 1.0

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]
