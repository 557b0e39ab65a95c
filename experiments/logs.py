"""metrics.csv of a run, which a resumed run continues."""

import csv
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger


class RunLogger(CSVLogger):
    """Lightning's CSVLogger in runs/<name>/version_<n>, except that a resumed run keeps its rows.

    `resume(folder, step)` writes into the folder of an existing version: the rows of the steps before
    `step` stay, those after it (from a run that went further than its checkpoint) are dropped.
    """

    def __init__(
        self, name: str, save_dir: str = "runs", version: int | None = None, flush: int = 500
    ) -> None:
        super().__init__(save_dir, name, version, flush_logs_every_n_steps=flush)
        self._rows: list[dict[str, Any]] = []
        self._folder: Path | None = None

    @property
    def log_dir(self) -> str:
        return super().log_dir if self._folder is None else str(self._folder)

    def resume(self, folder: Path, step: int | None) -> None:
        """Continue in the folder of a version; step None keeps every row."""
        self._folder = folder
        file = folder / "metrics.csv"
        if file.exists():
            with file.open(newline="") as stream:
                rows = list(csv.DictReader(stream))
            self._rows = [
                {key: value for key, value in row.items() if value != ""}
                for row in rows
                if step is None or int(row["step"]) < step
            ]

    @property
    def experiment(self) -> Any:
        first = self._experiment is None
        with warnings.catch_warnings():
            if self._folder is not None:  # Lightning warns that it deletes what is put back here
                warnings.filterwarnings("ignore", "Experiment logs directory")
            writer = super().experiment
        if first and self._rows:
            writer.metrics = [*self._rows]
            writer.save()
            self._rows = []
        return writer
