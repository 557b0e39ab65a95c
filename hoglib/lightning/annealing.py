"""MAML's options that change over a training."""

import lightning.pytorch as pl

from hoglib._core import validation
from hoglib.errors import ArgumentValueError
from hoglib.meta.maml import MAML, multi_step_weights


class MetaAnnealing(pl.Callback):
    """Derivative-order and multi-step loss annealing, for every `hoglib.MAML` in a LightningModule.

    In the first `first_order` epochs the meta-gradient is of first order, and of second order after
    them; over the first `multi_step` epochs the outer losses after every inner step count, the less
    the later the epoch, and from then on the last alone (`hoglib.meta.multi_step_weights`). What an
    epoch is follows from its number, so a resumed run goes on as it would have. every: optimizer steps
    that count as an epoch, for trainings that have only one.
    Raises ValueError where there is no MAML in the module.
    Source: Antoniou, Edwards and Storkey, How to train your MAML, 2019, section 4.
    """

    def __init__(self, first_order: int = 0, multi_step: int = 0, every: int | None = None) -> None:
        super().__init__()
        self.first_order = validation.at_least("first_order", first_order, 0)
        self.multi_step = validation.at_least("multi_step", multi_step, 0)
        self.every = None if every is None else validation.at_least("every", every, 1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not _learners(pl_module):
            raise ArgumentValueError(
                f"MetaAnnealing: expected a hoglib.MAML in {type(pl_module).__name__}, got none; make "
                "one an attribute of the module."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        epoch = trainer.current_epoch if self.every is None else trainer.global_step // self.every
        for maml in _learners(pl_module):
            maml.first_order = epoch < self.first_order
            maml.step_weights = None
            if epoch < self.multi_step:
                maml.step_weights = multi_step_weights(maml.inner_steps, epoch, self.multi_step)


def _learners(module: pl.LightningModule) -> list[MAML]:
    return [part for part in module.modules() if isinstance(part, MAML)]
