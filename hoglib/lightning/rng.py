"""The state of the random number generators in checkpoints."""

from typing import Any, final

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from hoglib._core.modules.state import random_state, set_random_state
from hoglib._core.torch_api import pytree
from hoglib.curvature.batches.data import gathered

KEY = "hoglib.lightning.RNGState"


@final
class RNGState(pl.Callback):
    """Save the random state in checkpoints, so that a resumed run with noise is the same run.

    Lightning's checkpoints hold no random state: dropout, augmentation and sampled penalties differ
    after resuming. This callback saves the state of Python, NumPy, torch and every CUDA device in each
    checkpoint, and restores it when a fit resumes: before the iterator of the training data is made,
    which draws the order of a shuffled epoch; and, for a checkpoint from the middle of an epoch, again
    after it, before the next batch. Of a distributed fit each process has a state of its own, if as
    many resume it, and that of the first otherwise. The order of an interrupted epoch is restored by a
    data loader with a ``state_dict``. Validation draws from the same generators, unless its loader has
    a ``generator=``.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from hoglib.lightning import RNGState
        >>> trainer = Trainer(callbacks=[RNGState()], logger=False, enable_checkpointing=False)
        >>> any(isinstance(callback, RNGState) for callback in trainer.callbacks)
        True
    """

    _middle_of_epoch: dict[str, Any] | None = None

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
            # each process goes on with its own numbers, where there are as many as before
            state = {**every[trainer.global_rank], "middle_of_epoch": state["middle_of_epoch"]}
        _set_random_state(state)
        self._middle_of_epoch = state if state["middle_of_epoch"] else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the random state again, in the middle of an epoch."""
        state, self._middle_of_epoch = self._middle_of_epoch, None
        if state is not None:
            _set_random_state(state)


def _random_states() -> list[dict[str, Any]]:
    """The random state of each process, with tensors for arrays, which checkpoints can hold."""
    # as arrays: torch cannot read a pickled state of its own generator
    own = pytree.map_tensors(lambda x: x.cpu().numpy(), random_state())
    return [pytree.map(_as_tensor, state) for state in gathered(own)]


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _set_random_state(state: dict[str, Any]) -> None:
    """Set a state from a checkpoint, whose tensors may be on another device."""
    state = pytree.map_tensors(Tensor.cpu, state)
    kind, keys, *rest = state["numpy"]
    set_random_state({**state, "numpy": (kind, keys.numpy(), *rest)})
