"""Learning rates over a run."""

from collections.abc import Callable

import lightning.pytorch as pl


def falling(trainer: pl.Trainer) -> Callable[[int], float]:
    """What a rate is multiplied by after some steps: linear from 1 to 0 over the run."""

    def factor(steps: int) -> float:
        if not steps:  # asked for before the trainer knows its batches
            return 1.0
        return 1 - min(steps / (trainer.num_training_batches * (trainer.max_epochs or 1)), 1)

    return factor
