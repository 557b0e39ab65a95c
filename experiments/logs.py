"""metrics.csv of a run: the logger that writes it, and reading its columns.

Configs name the class path of the logger, as do those saved beside checkpoints.
"""

import csv
import os
import shutil
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from matplotlib.image import imread

from experiments.runs import CONFIG, LAST, is_rank_zero, lock, run_folder
from hoglib.errors import ArgumentValueError
from hoglib.lightning.curvature import log_image

METRICS = "metrics.csv"
RUNS = "runs"  # the folder of all runs
Points = list[tuple[int, float]]  # (step, value)


class Rows(ExperimentWriter):
    """Lightning's writer of metrics.csv. The file of a resumed run stays as it is until the run logs
    its first row, by when its checkpoint has been loaded; then it begins with the rows that are kept.

    Args:
        folder: Folder of the file.
        kept: Rows of a resumed run; None for a new one.
    """

    def __init__(self, folder: str, kept: list[dict[str, Any]] | None) -> None:
        self.kept = kept
        super().__init__(folder)

    def _check_log_dir_exists(self) -> None:
        if self.kept is None:
            super()._check_log_dir_exists()  # which deletes the file

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        if self.kept is not None:
            self.metrics = self.kept
            self.save()
            if not self.kept:
                Path(self.metrics_file_path).unlink(missing_ok=True)
            self.kept = None
        super().log_metrics(metrics_dict, step)

    def save(self) -> None:
        """Lightning's, to a file that replaces the one before when it is complete: a new column and a
        resumed run write all rows again, and a full disk would lose them."""
        if not self.metrics:
            return
        file, before = Path(self.metrics_file_path), ([*self.metrics_keys], self.metrics)
        part = file.with_suffix(".part")
        self.metrics_file_path = str(part)
        try:
            part.unlink(missing_ok=True)  # of a run that was killed
            if self.kept is None and file.exists():
                shutil.copyfile(file, part)
            super().save()
            os.replace(part, file)
        except BaseException:
            self.metrics_keys, self.metrics = before
            part.unlink(missing_ok=True)
            raise
        finally:
            self.metrics_file_path = str(file)


class RunLogger(CSVLogger):
    """Lightning's CSVLogger in <save_dir>/<name>/version_<n>, where a resumed run keeps its rows.

    Args:
        name: Name of the run, a path below ``save_dir``.
        save_dir: Folder of all runs. Default: the trainer's ``default_root_dir``, or ``runs``.
        version: Number n. Default: the next one that is free.
    """

    def __init__(self, name: str, save_dir: str | None = None, version: int | None = None) -> None:
        super().__init__(save_dir or RUNS, name, version, flush_logs_every_n_steps=500)
        self._save_dir_given, self._version_given = save_dir is not None, version is not None
        self._kept: list[dict[str, Any]] | None = None  # rows of a resumed run
        self._folder: Path | None = None

    @property
    def log_dir(self) -> str:
        return super().log_dir if self._folder is None else str(self._folder)

    def use_root(self, folder: str) -> None:
        """Put the runs into this folder, unless ``save_dir`` was given.

        Args:
            folder: The trainer's ``default_root_dir``.
        """
        if not self._save_dir_given:
            self._save_dir = folder

    def resume(self, folder: Path, step: int | None) -> None:
        """Continue in the folder of an existing version.

        Args:
            folder: The folder of the version.
            step: Rows before this step are kept; later ones, of a run that went further than its
                checkpoint, are dropped. None keeps every row.
        """
        self._folder = folder
        if is_rank_zero():
            lock(folder)
        self._kept = [
            {key: value for key, value in row.items() if value != ""}
            for row in _rows(folder / METRICS)
            if step is None or int(row["step"]) < step
        ]

    def check_free(self) -> None:
        """Raise for a version that was given and holds a run, whose files this one would overwrite."""
        if self._version is None or {p.name for p in Path(self.log_dir).glob("*")} <= {CONFIG}:
            return
        last = Path(self.log_dir) / LAST
        go_on = f", or go on with this one by --ckpt_path {last}" if last.exists() else ""
        raise ArgumentValueError(
            f"version: expected one of a new run, got {self.version} of the run in {last.parent}; "
            f"choose another --trainer.logger.version{go_on}."
        )

    def discard(self) -> None:
        """Remove the folder of a new run that holds nothing yet, or its config alone."""
        folder = Path(self.log_dir)
        # without an experiment the folder, if there is one, is another process's
        logged = self._folder is not None or getattr(self._experiment, "metrics", True)
        if not logged and folder.exists() and {p.name for p in folder.iterdir()} <= {CONFIG}:
            (folder / CONFIG).unlink(missing_ok=True)
            folder.rmdir()

    @property
    def experiment(self) -> Any:
        if self._experiment is None and is_rank_zero():
            folder = self._folder or self._make_folder()
            self._experiment = Rows(str(folder), self._kept)
        return super().experiment

    def _make_folder(self) -> Path:
        """The locked folder of a new run: of two that start at once, one takes the next version."""
        while True:
            folder = Path(self.log_dir)
            try:
                folder.mkdir(parents=True, exist_ok=self._version_given)
            except FileExistsError:
                self._version = int(self.version) + 1
                continue
            lock(folder)
            return folder


class PictureLogger(pl.Callback):
    """Sends the pictures of a test to the loggers that take images, as TensorBoard's and W&B's do."""

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pictures = sorted(run_folder(trainer).glob("*.png"))
        for logger in trainer.loggers if is_rank_zero() else ():
            for picture in pictures:
                log_image(logger, picture.stem, partial(_read, picture), trainer.global_step)


def _read(picture: Path) -> Any:
    return (imread(picture)[..., :3] * 255).astype("uint8")


def curves(folder: Path) -> dict[str, Points]:
    """Columns of training and validation with more than one row in metrics.csv; {} without a file."""
    every = _rows(folder / METRICS)
    # a later `validate` or `test` writes rows from step 0 again, which do not belong to the training
    last = next(
        (i for i, (a, b) in enumerate(pairwise(every), 1) if int(b["step"]) < int(a["step"])), None
    )
    rows = every[:last]
    columns = {
        key: [(int(row["step"]) + 1, float(row[key])) for row in rows if row[key] != ""]
        for key in (rows[0] if rows else ())
        if key not in ("step", "epoch") and not key.startswith("test/")
    }
    return {key: points for key, points in columns.items() if len(points) > 1}


def _rows(file: Path) -> list[dict[str, str]]:
    try:  # an editor may begin it with a mark of its encoding
        lines = file.read_text("utf-8-sig").splitlines(keepends=True) if file.exists() else []
        if lines and not lines[-1].endswith("\n"):  # of a process that was killed
            left_out = f"the last row has no end, and is left out: {lines.pop()!r}"
            print(f"{file}: {left_out}", file=sys.stderr)
        rows = list(csv.DictReader(lines))
        [int(row["step"]) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentValueError(
            f"{METRICS}: expected rows with the numbers of their steps, got {file}, which cannot "
            f"be read as such ({error}); restore it, or move it elsewhere to go on without its rows."
        ) from error
    return rows
