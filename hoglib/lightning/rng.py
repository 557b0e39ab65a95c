"""Checkpoints with the state of the random number generators."""

from typing import Any, final

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from hoglib._core.modules.state import random_state, set_random_state
from hoglib._core.torch_api import pytree
from hoglib.curvature.batches.data import gathered

KEY = "hoglib.lightning.RNGState"  # in the checkpoint


@final
class RNGState(pl.Callback):
    """Save the random state in checkpoints, so that a resumed run draws the numbers of the original
    run.

    Lightning's checkpoints hold no random state: dropout, augmentation and sampled penalties differ
    after resuming. This callback saves the state of Python, NumPy, torch and every CUDA device in each
    checkpoint. When a fit resumes, it restores the state before Lightning makes the iterator of the
    training data, which draws the order of a shuffled epoch. For a checkpoint from the middle of an
    epoch, it restores the state again after that, before the next batch. In a distributed fit each
    process has its own state; if the number of processes has changed, all get the state of the first.
    The order of an interrupted epoch is restored by a data loader with a ``state_dict``. Validation
    draws from the same generators, unless its loader has a ``generator=``.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from hoglib.lightning import RNGState
        >>> trainer = Trainer(callbacks=[RNGState()], logger=False, enable_checkpointing=False)
        >>> any(isinstance(callback, RNGState) for callback in trainer.callbacks)
        True
    """

    _middle_of_epoch: dict[str, Any] | None = None  # state to restore again in `on_train_start`

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random state to the checkpoint."""
        first, *others = _random_states()
        checkpoint[KEY] = {**first, "others": others, "middle_of_epoch": not trainer.is_last_batch}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the random state, before the iterator of the training data is made."""
        state = checkpoint.get(KEY)
        if state is None or trainer.state.fn != TrainerFn.FITTING:
            return
        every = [state, *state.get("others", ())]
        if len(every) == trainer.world_size:
            # as many processes as before: each continues with its own numbers
            state = {**every[trainer.global_rank], "middle_of_epoch": state["middle_of_epoch"]}
        _set_random_state(state)
        self._middle_of_epoch = state if state["middle_of_epoch"] else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the random state again, in the middle of an epoch."""
        state, self._middle_of_epoch = self._middle_of_epoch, None
        if state is not None:
            _set_random_state(state)


def _random_states() -> list[dict[str, Any]]:
    """The random state of each process, as tensors, which checkpoints can hold."""
    # arrays in between: torch cannot unpickle a state of its own generator
    own = pytree.map_tensors(lambda x: x.cpu().numpy(), random_state())
    return [pytree.map(_as_tensor, state) for state in gathered("RNGState", own)]


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _set_random_state(state: dict[str, Any]) -> None:
    """Set the random state from a checkpoint; its tensors may be on another device."""
    state = pytree.map_tensors(Tensor.cpu, state)
    kind, keys, *rest = state["numpy"]
    set_random_state({**state, "numpy": (kind, keys.numpy(), *rest)})
