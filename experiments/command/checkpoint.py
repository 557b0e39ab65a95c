"""last.ckpt of a run: always complete, always the newest state from which the run can be resumed."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from experiments.checks import at_least
from experiments.logs import RunLogger
from experiments.runs import LAST, command, is_rank_zero, run_folder
from hoglib.errors import OutputError


class LastCheckpoint(Checkpoint):
    """Writes last.ckpt every so many optimizer steps, at the end of an epoch or a run, and at Ctrl-C.

    A checkpoint is taken between two steps, so that a resumed run is the same run. It replaces the one
    before only when it is complete: a full disk or a crash loses no earlier state. Ctrl-C ends the run
    after the step in progress, once the checkpoint is written; a second Ctrl-C ends it at once.

    Args:
        every_n_train_steps: Optimizer steps between two checkpoints.
    """

    def __init__(self, every_n_train_steps: int = 1000) -> None:
        super().__init__()
        self.every = at_least("every_n_train_steps", every_n_train_steps, 1)
        self.path: Path | None = None
        self.interrupted = False  # by Ctrl-C, which may reach each process at another moment
        self._stopping = False  # the same in all processes
        self._saved_step: int | None = None
        self._step_before = 0
        self._previous_handler: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._previous_handler = None
        self.interrupted = self._stopping = False
        with suppress(ValueError):  # signals can only be handled in the main thread
            self._previous_handler = signal.signal(signal.SIGINT, self._on_interrupt)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._stopping and self._saved_step == trainer.global_step:
            raise KeyboardInterrupt
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step, strategy = trainer.global_step, trainer.strategy
        self._stopping = strategy.reduce_boolean_decision(self.interrupted, all=False)
        if step == self._saved_step:
            return  # gradients are being accumulated: no optimizer stepped
        # With several optimizers a batch takes several steps, and may step over the multiple.
        due = step // self.every > self._step_before // self.every
        if self._stopping or due or self._is_last(trainer):
            self._save(trainer, step)

    def _is_last(self, trainer: pl.Trainer) -> bool:
        return trainer.is_last_batch or 0 < trainer.max_steps <= trainer.global_step

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore_handler()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore_handler()
        if isinstance(trainer.logger, RunLogger) and trainer.is_global_zero:
            trainer.logger.discard()
        if self._saved_step is not None and trainer.is_global_zero:
            print(
                f"\nThe state of step {self._saved_step} is in {self.path}; "
                f"resume it with: {command()} fit --ckpt_path {self.path}",
                flush=True,
            )

    def _save(self, trainer: pl.Trainer, step: int) -> None:
        self.path = run_folder(trainer) / LAST
        part = self.path.with_suffix(".part")
        try:
            trainer.save_checkpoint(part)
            if trainer.is_global_zero:
                os.replace(part, self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            kept = (
                f"the checkpoint of step {self._saved_step} is intact"
                if self._saved_step is not None
                else "this run has no earlier checkpoint"
            )
            raise OutputError(
                f"checkpoint: could not write {self.path} at step {step} ({error.strerror}); {kept}. "
                f"Free some space or choose another folder with --trainer.logger.save_dir, then "
                f"resume with --ckpt_path."
            ) from error
        self._saved_step = step

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self.interrupted = True
        self._restore_handler()
        if is_rank_zero():
            print("\nStopping after this step; Ctrl-C again stops at once.", flush=True)

    def _restore_handler(self) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None
