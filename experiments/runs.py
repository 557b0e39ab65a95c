"""The folder of a run: runs/<name>/version_<n>/ with config, checkpoint, metrics and pictures."""

import fcntl
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import EACCES
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from hoglib.errors import ArgumentValueError

if TYPE_CHECKING:  # fails beside the torchvision of other libraries, where benchmarks draw pictures
    import lightning.pytorch as pl

LAST = "last.ckpt"
CONFIG = "config.yaml"  # beside a checkpoint, as Lightning names it
SUMMARY = "summary.json"
TABLE = "table.txt"
LOCKS = ExitStack()  # on the folders that this process writes in


Result = TypeVar("Result", bound=Any)  # a NamedTuple


class Picture(NamedTuple):
    """A picture that is drawn when it is saved: its file, and the function that draws it."""

    file: Path
    save: Callable[[], Path]


def run_folder(trainer: "pl.Trainer") -> Path:
    """The folder of the trainer's run, made if need be. All processes have to call it together."""
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_rank_zero() -> bool:
    """Whether this process writes and prints the results: of several, the one of rank 0."""
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def signals_that_end() -> list[signal.Signals]:
    """The signals after which a run ends with a checkpoint, Ctrl-C first; `nohup` ignores SIGHUP."""
    closed = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *closed]


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None], signals: list[signal.Signals]
) -> Iterator[dict[int, Any]]:
    """Handle signals by a function; gives the handlers before, which are put back at the end."""
    previous: dict[int, Any] = {}
    with suppress(ValueError):  # signals can only be handled in the main thread
        for signum in signals:
            previous[signum] = signal.signal(signum, handler)
    try:
        yield previous
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def lock(folder: Path) -> None:
    """Raise where another process writes in a run's folder; none can until LOCKS is closed, or this
    process ends."""
    if not os.access(folder, os.W_OK):
        raise PermissionError(EACCES, os.strerror(EACCES), str(folder))
    handle = os.open(folder, os.O_RDONLY)
    LOCKS.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArgumentValueError(
            f"version: expected a run in which no other process writes, got {folder}; wait for the end "
            "of the other process, or stop it."
        ) from None
    except OSError:
        pass  # a file system without locks


def write_report(folder: Path, table: str, *pictures: Picture) -> None:
    """Print a result table, save it as table.txt then the pictures, and say which files were saved."""
    if not is_rank_zero():
        return
    file = folder / TABLE
    file.write_text(table + "\n", encoding="utf-8")  # whatever the terminal has
    print(f"\n{table}", flush=True)
    print(f"\nSaved {', '.join(map(str, (file, *(picture.save() for picture in pictures))))}")


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Save a run's result as summary.json, for the tables of other runs."""
    if is_rank_zero():
        (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


def summaries(folder: Path) -> list[dict[str, Any]]:
    """The summaries of all runs in the area of a run, runs/<area>/*/version_*, the newest first."""
    if _version(folder) is None or not is_rank_zero():
        return []
    files = folder.absolute().parents[1].glob(f"*/version_*/{SUMMARY}")
    found = []
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True):
        try:
            found.append(dict(json.loads(file.read_text())))
        except (OSError, ValueError, TypeError) as error:  # of a run that was killed
            print(f"{file}: no summary of a run, and is left out ({error})", file=sys.stderr)
    return found


def newest_results(folder: Path, own: Result) -> list[Result]:
    """Save a run's result, and read those of other runs in its area with the same fields."""
    write_summary(folder, own._asdict())
    return [type(own)(**x) for x in summaries(folder) if x.keys() == own._asdict().keys()]


def command(*words: object) -> str:
    """How a shell starts the experiments with this interpreter, and words that follow."""
    known = shutil.which("python")
    found = "python" if known and Path(known) == Path(sys.executable) else sys.executable
    inside = Path(found).is_relative_to(Path.cwd())
    start = os.path.relpath(found) if inside else found
    return shlex.join([start, "-m", "experiments", *map(str, words)])


def find_checkpoint(path: str | Path, option: str = "checkpoint", ended: bool = False) -> Path:
    """A checkpoint file itself, or that of the newest version in a run's folder.

    option: What names the path, for the error message. ended: Whether versions with a table, of runs
    that ended, come before others.
    """
    path = Path(path)
    if path.is_file():
        return path
    if (path / LAST).is_file():
        return path / LAST
    versions = [p for p in path.glob(f"version_*/{LAST}") if _version(p.parent) is not None]
    if not versions:
        config = Path("configs", *path.parts[1:]).with_suffix(".yaml")
        advice = f", or train it first: {command('fit', '--config', config)}"
        raise ArgumentValueError(
            f"{option}: expected a file, or a run folder with version_*/{LAST} in it, got "
            f"{str(path)!r}, where there is none; give another one{advice if config.exists() else '.'}"
        )
    if ended:
        versions = [p for p in versions if p.with_name(TABLE).exists()] or versions
    return max(versions, key=lambda p: _version(p.parent) or 0)


def load_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """The content of a Lightning checkpoint."""
    try:
        # torch reads the archive without a look at its checksums
        damaged = ZipFile(checkpoint).testzip() if is_zipfile(checkpoint) else None
        if damaged is not None:
            raise BadZipFile(f"the checksum of {damaged} is wrong")
        content: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
        content["global_step"], content["pytorch-lightning_version"], logged_steps(content)
        content["state_dict"].items(), dict(content.get(CONFIG, {}))
    except Exception as error:
        reason = error if isinstance(error, BadZipFile) else type(error).__name__
        raise ArgumentValueError(
            f"checkpoint: expected a Lightning checkpoint, got {str(checkpoint)!r}, which cannot be "
            f"read as one ({reason}); give another file."
        ) from error
    return content


def load_parameters(network: nn.Module, path: str, prefix: str, option: str) -> None:
    """Load the parameters of another run's network of the same sizes.

    Args:
        network: The network.
        path: A checkpoint, or a run folder, of which the newest version that ended is taken.
        prefix: Of the network's names in the checkpoint.
        option: The option that names the path, for the error message.
    """
    checkpoint = find_checkpoint(path, option, ended=True)
    state = load_checkpoint(checkpoint)["state_dict"]
    weights = {name.removeprefix(prefix): value for name, value in state.items()}
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    got = {name: tuple(value.shape) for name, value in weights.items()}
    if expected != got:
        raise ArgumentValueError(
            f"{option}: expected a checkpoint of the same network, {expected}, got {got} from "
            f"{checkpoint}; train it with the same sizes, or set {option} to null."
        )
    network.load_state_dict(weights)


def version_folder(checkpoint: Path) -> Path | None:
    """The run's folder that holds this checkpoint; None for a checkpoint from elsewhere."""
    folder = checkpoint.parent
    return folder if checkpoint.name == LAST and _version(folder) is not None else None


def logged_steps(content: dict[str, Any]) -> int:
    """The steps in metrics.csv before a checkpoint; global_step counts those of every optimizer."""
    # Lightning raises its count only after the checkpoint is written.
    before: int = content["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
    return before + 1


def _version(folder: Path) -> int | None:
    """The number n of a folder version_<n>; None for any other name."""
    name, _, number = folder.name.partition("_")
    return int(number) if name == "version" and number.isdigit() else None
