"""MAML's options that change during training."""

from typing import final

import lightning.pytorch as pl

from hoglib._core.messages import validation
from hoglib.errors import ArgumentValueError
from hoglib.meta.learners import MAML, multi_step_weights


@final
class MetaAnnealing(pl.Callback):
    """Anneal the derivative order and the step weights of every MAML in a LightningModule.

        epoch <  first_order:  meta-gradients of first order; afterwards of second order
        epoch <  multi_step:   outer losses after every inner step, by hoglib.meta.multi_step_weights
        epoch >= multi_step:   the outer loss after the last inner step alone

    The options depend only on the number of the epoch, so a resumed run continues as if uninterrupted.

    Args:
        first_order: Number of epochs with meta-gradients of first order. Default: 0.
        multi_step: Number of epochs over which the weights move to the last inner step. Default: 0.
        every: Optimizer steps that count as an epoch, for a training of a single epoch. Default: None,
            the epochs of the trainer.
    Raises:
        ArgumentValueError: at the start of the training, if the module has no :class:`hoglib.MAML`.
    References:
        Antoniou, Edwards and Storkey, How to train your MAML, 2019, section 4.
    Example:
        >>> from lightning.pytorch import Trainer
        >>> from hoglib.lightning import MetaAnnealing
        >>> annealing = MetaAnnealing(first_order=50, multi_step=15)
        >>> trainer = Trainer(callbacks=[annealing], logger=False, enable_checkpointing=False)
        >>> annealing in trainer.callbacks
        True
    """

    def __init__(self, first_order: int = 0, multi_step: int = 0, every: int | None = None) -> None:
        super().__init__()
        self.first_order = validation.at_least("first_order", first_order, 0)
        self.multi_step = validation.at_least("multi_step", multi_step, 0)
        self.every = validation.none_or_at_least("every", every, 1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that there is a MAML."""
        if not _learners(pl_module):
            raise ArgumentValueError(
                f"MetaAnnealing: expected a hoglib.MAML in {type(pl_module).__name__}, got none; make "
                "one an attribute of the module."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Set the options for this epoch."""
        # the trainer's count, not a counter here: checkpoints restore it
        epoch = trainer.current_epoch if self.every is None else trainer.global_step // self.every
        for maml in _learners(pl_module):
            maml.first_order = epoch < self.first_order
            maml.step_weights = None
            if epoch < self.multi_step:
                maml.step_weights = multi_step_weights(maml.inner_steps, epoch, self.multi_step)


def _learners(module: pl.LightningModule) -> list[MAML]:
    return [part for part in module.modules() if isinstance(part, MAML)]
