"""Which errors are the user's, and what is said of them."""

from collections.abc import Iterator
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from pathlib import Path
from traceback import walk_tb

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from experiments.shared.processes import LOST, lost_process
from hoglib.errors import HoglibError

FULL = (ENOSPC, EDQUOT, EFBIG, EIO)


class CommandError(HoglibError):
    """A command line or config that cannot be read."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def user_error(error: Exception) -> str | None:
    """The message for an error that the user can correct; None for any other."""
    # jsonargparse wraps what a constructor raises; the explanation is further down.
    return next(filter(None, map(_message, causes(error))), None)


def _message(cause: BaseException) -> str | None:
    text = str(cause)
    of_a_logger = isinstance(cause, ModuleNotFoundError) and "Requirement" in text
    if isinstance(cause, HoglibError | MisconfigurationException) or of_a_logger:
        return text
    # an error of a write has no file's name, one of a socket neither
    if isinstance(cause, OSError) and (cause.filename or cause.errno in FULL):
        return (
            f"expected to read and write files of the run, got {cause}. Free some space, or choose "
            "another folder with --trainer.logger.save_dir."
        )
    if isinstance(cause, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return (
            f"expected memory for the run, got none ({text or 'MemoryError'}). Give it more, or "
            "smaller batches. If there is a checkpoint, resume it with --ckpt_path last."
        )
    if "Error(s) in loading state_dict" in text:
        return (
            "checkpoint: expected one of this network, got one of another "
            f"({text.splitlines()[1].strip().rstrip('.')}). Resume it with --ckpt_path alone, which "
            "reads the config beside it, or train the network anew."
        )
    if lost_process(cause):
        return LOST
    checked = isinstance(cause, ValueError | RuntimeError) and raised_by_lightning(cause)
    return text.strip() if checked else None


def raised_by_lightning(error: BaseException) -> bool:
    """Whether Lightning raised it: a check of the options of its trainer and callbacks."""
    raised_in = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)][-1:]
    return any(Path(file).is_relative_to(Path(pl.__file__).parents[1]) for file in raised_in)
