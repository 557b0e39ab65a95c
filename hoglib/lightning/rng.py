"""The state of the random generators in checkpoints."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch


class RNGState(pl.Callback):
    """Resume a run with noise (dropout, augmentation, sampled penalties) as the same run.

    Lightning's checkpoints hold no random state. This callback saves that of Python, NumPy, torch and
    each CUDA device with every checkpoint, and sets it when the resumed training starts: after the
    training data's iterator was made (which draws a number), before its first batch is taken.
    Validation runs on the same generators; give its loader a `generator=` of its own where it draws.
    """

    def __init__(self) -> None:
        super().__init__()
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        state: Any = np.random.get_state()
        kind, keys, position, has_gauss, gauss = state
        return {
            "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(keys.copy()), position, has_gauss, gauss),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state, self._restored = self._restored, None
        if state is None:
            return
        random.setstate(state["python"])
        kind, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, keys.cpu().numpy(), position, has_gauss, gauss))
        torch.set_rng_state(state["torch"].cpu())
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state.cpu(), device)
