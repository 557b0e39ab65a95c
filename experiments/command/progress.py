"""The progress bar of a run; ``--trainer.enable_progress_bar false`` turns it off."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


class FitAndTestBar(TQDMProgressBar):
    """Lightning's bars of training and test, without that of each validation, which takes a moment."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=20)

    def init_validation_tqdm(self) -> Tqdm:
        return Tqdm(disable=True)

    def init_test_tqdm(self) -> Tqdm:
        bar = super().init_test_tqdm()
        bar.leave = False  # the table of the test takes its place
        return bar

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return dict(metrics)
