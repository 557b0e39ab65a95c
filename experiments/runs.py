"""Where runs live: runs/<name>/version_<n>/ holds config.yaml, metrics.csv, last.ckpt and pictures."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from hoglib.errors import ArgumentValueError

LAST = "last.ckpt"
SUMMARY = "summary.json"


def run_folder(trainer: pl.Trainer) -> Path:
    """The folder of the trainer's run, made if need be."""
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_checkpoint(where: str | Path) -> Path:
    """A checkpoint itself, or the one of the newest version in a run's folder."""
    path = Path(where)
    if path.is_file():
        return path
    versions = [p for p in path.glob(f"version_*/{LAST}") if _number(p.parent) is not None]
    if (path / LAST).is_file():
        return path / LAST
    if not versions:
        config = Path("configs", *path.parts[1:]).with_suffix(".yaml")
        raise ArgumentValueError(
            f"checkpoint: expected a file, or a run folder with version_*/{LAST} in it, got "
            f"{str(path)!r}, where there is none; give another one"
            + (
                f", or train it first: python -m experiments fit --config {config}"
                if config.exists()
                else "."
            )
        )
    return max(versions, key=lambda p: _number(p.parent) or 0)


def version_folder(checkpoint: Path) -> Path | None:
    """The run's folder that holds this checkpoint, if it lies in one."""
    folder = checkpoint.parent
    return folder if checkpoint.name == LAST and _number(folder) is not None else None


def load(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's content, checked."""
    try:
        content: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
        content["global_step"], content["state_dict"]
    except Exception as error:
        raise ArgumentValueError(
            f"checkpoint: expected a Lightning checkpoint, got {str(checkpoint)!r}, which cannot be "
            f"read as one ({type(error).__name__}); give another file."
        ) from error
    return content


def logged_steps(content: dict[str, Any]) -> int:
    """The steps in metrics.csv up to a checkpoint; global_step counts those of each optimizer."""
    # Lightning raises its count only after the checkpoint is written.
    before: int = content["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
    return before + 1


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """A run's result in its folder, for the tables of other runs."""
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


def summaries(folder: Path) -> list[dict[str, Any]]:
    """Results of the runs in the area of a run, runs/<area>/*/version_*, the newest first."""
    if _number(folder) is None:
        return []
    files = folder.absolute().parents[1].glob(f"*/version_*/{SUMMARY}")
    newest = sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)
    return [json.loads(file.read_text()) for file in newest]


def _number(folder: Path) -> int | None:
    name, _, number = folder.name.partition("_")
    return int(number) if name == "version" and number.isdigit() else None
