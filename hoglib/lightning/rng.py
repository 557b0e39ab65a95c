"""The state of the random generators in checkpoints."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from hoglib._core.state import random_state, set_random_state

KEY = "hoglib.lightning.RNGState"


class RNGState(pl.Callback):
    """Resume a run with noise (dropout, augmentation, sampled penalties) as the same run.

    Lightning's checkpoints hold no random state. This callback saves that of Python, NumPy, torch and
    each CUDA device with every checkpoint, and sets it when a fit goes on from one: before the
    training data's iterator is made, which draws the order of a shuffled epoch; and, for a checkpoint
    from the middle of an epoch, again after it, before the next batch is taken. (The order of an epoch
    that was interrupted is a matter for a data loader with a `state_dict`.) Validation draws from the
    same generators unless its loader has a `generator=` of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._middle_of_epoch: dict[str, Any] | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[KEY] = {**_get(), "middle_of_epoch": not trainer.is_last_batch}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint.get(KEY)
        if state is None or trainer.state.fn != TrainerFn.FITTING:
            return
        _set(state)
        self._middle_of_epoch = state if state["middle_of_epoch"] else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state, self._middle_of_epoch = self._middle_of_epoch, None
        if state is not None:
            _set(state)


def _get() -> dict[str, Any]:
    """With tensors for NumPy's arrays, which checkpoints may hold."""
    state = random_state()
    kind, keys, *rest = state["numpy"]
    return {**state, "numpy": (kind, torch.from_numpy(keys.copy()), *rest)}


def _set(state: dict[str, Any]) -> None:
    """Of a checkpoint, whose tensors may be on another device."""
    kind, keys, *rest = state["numpy"]
    set_random_state(
        {
            **state,
            "numpy": (kind, keys.cpu().numpy(), *rest),
            "torch": state["torch"].cpu(),
            "cuda": [one.cpu() for one in state["cuda"]],
        }
    )
