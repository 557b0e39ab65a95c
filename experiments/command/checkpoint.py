"""last.ckpt of a run: always complete, always the newest state from which the run can be resumed."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from experiments import runs
from experiments.checks import at_least
from experiments.logs import RunLogger
from hoglib.errors import OutputError


class LastCheckpoint(Checkpoint):
    """Writes last.ckpt every so many optimizer steps, at the end of an epoch or a run, and at Ctrl-C.

    A checkpoint is taken between two steps, so that a resumed run is the same run. It replaces the one
    before only when it is complete: a full disk or a crash loses no earlier state. Ctrl-C, SIGTERM or
    SIGHUP ends the run after the step in progress, once the checkpoint is written; Ctrl-C then ends it
    now.

    Args:
        every_n_train_steps: Optimizer steps between two checkpoints.
    """

    def __init__(self, every_n_train_steps: int = 1000) -> None:
        super().__init__()
        self.every = at_least("every_n_train_steps", every_n_train_steps, 1)
        self.path: Path | None = None
        self.interrupted = 0  # the signal, which may reach each process at another moment
        self._stopping = False  # the same in all processes
        self._resumed = 0
        self._saved_step: int | None = None
        self._step_before = 0
        self._handlers = ExitStack()  # of signals, while the run is trained

    def on_fit_start(self, *_: Any, **__: Any) -> None:
        self.interrupted, self._stopping = 0, False
        handled = runs.handled_by(self._on_interrupt, runs.signals_that_end())
        self._previous_handlers = self._handlers.enter_context(handled)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._stopping and self._saved_step == trainer.global_step:
            raise KeyboardInterrupt(self.interrupted or signal.SIGINT)
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        # A checkpoint of before a validation would lose its row of metrics.csv: Lightning skips the
        # validation of a step that is resumed.
        if trainer.should_stop or not _validates(trainer):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._save_if_due(trainer)

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        self._stopping = self._interrupted_anywhere(trainer)
        if step == self._saved_step:
            return  # gradients are being accumulated: no optimizer stepped
        # With several optimizers a batch takes several steps, and may step over the multiple.
        due = step // self.every > self._step_before // self.every
        if self._stopping or trainer.should_stop or due or self._is_last(trainer):
            self._save(trainer, step)

    def _interrupted_anywhere(self, trainer: pl.Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(bool(self.interrupted), all=False)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resumed = runs.logged_steps(checkpoint)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Where no step was left to train, Lightning does not complete the counts of the last one, with
        # which the test is logged.
        steps, epoch = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
        steps._batches_that_stepped = max(steps._batches_that_stepped, self._resumed)
        epoch.completed = epoch.ready

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # after the last step: without this, a test would follow
        if self._interrupted_anywhere(trainer):
            raise KeyboardInterrupt(self.interrupted or signal.SIGINT)

    def _is_last(self, trainer: pl.Trainer) -> bool:
        return trainer.is_last_batch or 0 < trainer.max_steps <= trainer.global_step

    def teardown(self, *_: Any, **__: Any) -> None:
        self._handlers.close()

    def on_exception(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._handlers.close()
        if isinstance(trainer.logger, RunLogger) and trainer.is_global_zero:
            trainer.logger.discard()
        if self.path is not None and self.path.exists() and trainer.is_global_zero:
            print(
                f"\nThe state of step {self._saved_step} is in {self.path}; "
                f"resume it with: {runs.command('fit', '--ckpt_path', self.path)}",
                flush=True,
            )

    def _save(self, trainer: pl.Trainer, step: int) -> None:
        self.path = runs.run_folder(trainer) / runs.LAST
        part = self.path.with_suffix(".part")
        try:
            trainer.save_checkpoint(part)
            if trainer.is_global_zero:
                os.replace(part, self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            last = self._saved_step
            kept = f"the checkpoint of step {last} is intact"
            kept = "this run has no earlier checkpoint" if last is None else kept
            raise OutputError(
                f"checkpoint: could not write {self.path} at step {step} ({error.strerror}); {kept}. "
                f"Free some space or choose another folder with --trainer.logger.save_dir, then "
                f"resume with --ckpt_path."
            ) from error
        self._saved_step = step

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, self._previous_handlers[signal.SIGINT])
        if not self.interrupted and runs.is_rank_zero():  # `timeout` sends SIGTERM twice
            print("\nStopping after this step; Ctrl-C stops at once.", flush=True)
        self.interrupted = self.interrupted or signum


def _validates(trainer: pl.Trainer) -> bool:
    """Whether a validation follows the step."""
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    return fetcher is not None and loop.epoch_loop._should_check_val_fx(fetcher)
