"""Where a replay keeps the states of a training: in memory, or in files of a directory.

A file is written beside its place and moved there (os.replace), so a killed process leaves whole files
only; any subset of them is enough to go on, since a training can be run again from any earlier state.
"""

import io
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.files import check_same_call, translate_file_errors, write_atomically
from hoglib._core.torch_api import pytree
from hoglib.errors import ArgumentTypeError, ArgumentValueError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST, BACKWARD, LOCK = "manifest.json", "backward.pt", "lock"
FORMAT = 1


class State(NamedTuple):
    """Parameters and state of the rule after some steps, and the generators' states there."""

    leaves: list[Any]  # tensors and Python numbers
    generators: list[Tensor]


@final
class InMemory:
    """States in memory, by the number of steps before them."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def positions(self) -> list[int]:
        """The steps that a state is kept of, ascending."""
        return sorted(self._states)

    def save(self, step: int, state: State, losses: list[Tensor]) -> None:
        """Keep a state, with the losses of all steps before it."""
        self._states[step] = state

    def load(self, step: int) -> State | None:
        """A state that is kept; None for a file that cannot be read, which is then removed."""
        return self._states.get(step)

    def drop(self, step: int) -> None:
        """Keep this state no longer."""
        self._states.pop(step, None)


@final
class OnDisk:
    """States, as of `InMemory`, in the files of a directory, which belong to one call.

    Args:
        directory: The directory, which is created if necessary.
        call: What the call is, by names: any difference to that in the directory is refused.
    Raises:
        ArgumentValueError: for a directory that holds another call.
        OutputError: for one that cannot be written to.
    """

    def __init__(self, directory: Path, call: dict[str, Any]) -> None:
        self.directory, self._call = directory, {"format": FORMAT, **call}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the directory is that of the call, and no other process works in it."""
        with self._explained("the manifest"):
            self.directory.mkdir(parents=True, exist_ok=True)
        known = LOCK, f"{MANIFEST}.tmp"
        others = [path.name for path in self.directory.iterdir() if path.name not in known]
        # before there is a lock in a directory of somebody else's
        if others and not (self.directory / MANIFEST).exists():
            raise ArgumentValueError(
                f"directory: expected an empty directory or one of an earlier memory='disk', got "
                f"{self.directory}, which holds {', '.join(sorted(others)[:3])}; name another one."
            )
        with self._explained("its lock"):
            stream = (self.directory / LOCK).open("w")
        with stream:
            try:
                if fcntl is not None:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArgumentValueError(
                    "directory: expected one that no other process works in, got "
                    f"{self.directory}; wait for that process, or name another directory."
                ) from None
            self._open()
            yield

    def _open(self) -> None:
        """Go on with the call of the directory, which has to be this one."""
        manifest = self.directory / MANIFEST
        with self._explained("the manifest"):
            for left in self.directory.glob("*.tmp"):  # of a process that was killed
                left.unlink(missing_ok=True)
            known: dict[str, Any] | None = {} if manifest.exists() else None
            with suppress(FileNotFoundError, ValueError):  # a damaged one is that of no call
                known = json.loads(manifest.read_text())
        # as JSON gives it back: tuples are lists
        wanted = json.loads(json.dumps(self._call))
        if known is not None:
            check_same_call("directory", self.directory, known, wanted)
        else:
            self._write(MANIFEST, json.dumps(wanted, indent=1).encode())

    def positions(self) -> list[int]:
        found = (path.stem.removeprefix("step-") for path in self.directory.glob("step-*.pt"))
        return sorted(int(number) for number in found if number.isdigit())

    def save(self, step: int, state: State, losses: list[Tensor]) -> None:
        stacked = torch.stack(losses) if losses else torch.zeros(0)
        self.put(_file_name(step), {**state._asdict(), "losses": stacked})

    def load(self, step: int) -> State | None:
        content = self.get(_file_name(step))
        if content is None:
            self.drop(step)
            return None
        return State(content["leaves"], content["generators"])

    def losses(self, step: int) -> list[Tensor]:
        """The losses that were saved with a state; none for a damaged file."""
        content = self.get(_file_name(step))
        return [] if content is None else list(content["losses"])

    def drop(self, step: int) -> None:
        (self.directory / _file_name(step)).unlink(missing_ok=True)

    def first(self, name: str, content: object) -> Any:
        """What the first process of a call gave by this name."""
        known = self.get(f"first-{name}.pt")
        if known is None:
            self.put(f"first-{name}.pt", {"value": content})
            return content
        return known["value"]

    def put(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of tensors and plain values."""
        buffer = io.BytesIO()
        own = pytree.map_tensors(lambda x: x.detach().clone(), content)
        torch.save(own, buffer)  # which writes the whole of a storage
        self._write(name, buffer.getbuffer())

    def get(self, name: str) -> dict[str, Any] | None:
        """The content of a file; None for one that is not there, or damaged.

        weights_only: a file of somebody else's cannot execute anything.
        """
        path = self.directory / name
        if not path.exists():
            return None
        try:
            content = torch.load(path, weights_only=True)
        except Exception:  # torch raises many kinds; each state can be computed again
            return None
        return content if isinstance(content, dict) else None

    def _write(self, name: str, content: Any) -> None:
        size = f"{len(content) / 2**20:.1f} MiB"
        with self._explained(size), write_atomically(self.directory / name) as stream:
            write_bytes(stream, content)

    def _explained(self, what: str) -> AbstractContextManager[None]:
        return translate_file_errors(
            f"memory='disk': expected to write {what} to {self.directory}",
            "Give it space, name another directory, or use schedule='log', which keeps fewest files. "
            "What is there is whole, and the same call goes on from it",
        )


def write_bytes(stream: IO[bytes], content: Any) -> None:
    """Write bytes to a file.

    Not through to the disk: after a loss of power a file may be damaged, which `OnDisk.get` tells.
    """
    stream.write(content)


def check_directory(memory: str, directory: object) -> Path | None:
    """The directory of memory="disk", which needs one, as no other does."""
    if (memory == "disk") != (directory is not None):
        got = f"with {directory}; leave it out, or use memory='disk'"
        got = "without; name where its files go" if directory is None else got
        raise ArgumentValueError(
            f"directory: expected one with memory='disk' and only there, got memory={memory!r} {got}."
        )
    if directory is None:
        return None
    if not isinstance(directory, str | os.PathLike):
        got = validation.describe(directory)
        raise ArgumentTypeError(f"directory: expected a path, got {got}.")
    path = Path(directory)
    if path.exists() and not path.is_dir():
        text = f"directory: expected a directory, got the file {path}; name another."
        raise ArgumentValueError(text)
    return path


def _file_name(step: int) -> str:
    return f"step-{step:09}.pt"
