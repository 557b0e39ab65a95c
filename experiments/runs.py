"""Where runs live: runs/<name>/version_<n>/ holds config.yaml, metrics.csv, last.ckpt and pictures."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from hoglib import _arguments as arguments

LAST = "last.ckpt"


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
        raise arguments.WrongValue(
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
        raise arguments.WrongValue(
            f"checkpoint: expected a Lightning checkpoint, got {str(checkpoint)!r}, which cannot be "
            f"read as one ({type(error).__name__}); give another file."
        ) from error
    return content


def _number(folder: Path) -> int | None:
    name, _, number = folder.name.partition("_")
    return int(number) if name == "version" and number.isdigit() else None
