"""The states of a training that a replay keeps: in memory, or in the files of a directory.

A file is first written beside its final place and then moved there (os.replace), so a killed process
leaves whole files only. Any subset of the files is enough to resume, because a training can run again
from any earlier state.
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

MANIFEST, BACKWARD, LOCK = "manifest.json", "backward.pt", "lock"  # names of files
FORMAT = 1  # version of the file format


class State(NamedTuple):
    """The state of a training after some steps."""

    leaves: list[Any]  # of (parameters, state of the rule): tensors and Python numbers
    generators: list[Tensor]  # states of the random number generators


@final
class InMemory:
    """Keeps states in memory. A state is named by the number of steps before it."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def positions(self) -> list[int]:
        """The numbers of all kept states, ascending."""
        return sorted(self._states)

    def save(self, step: int, state: State, losses: list[Tensor]) -> None:
        """Keep a state. losses: of all steps before it."""
        self._states[step] = state

    def load(self, step: int) -> State | None:
        """The kept state; an unreadable file is removed, and gives None."""
        return self._states.get(step)

    def drop(self, step: int) -> None:
        """Forget this state."""
        self._states.pop(step, None)


@final
class OnDisk:
    """Keeps states in the files of a directory, with the methods of `InMemory`. A directory belongs to
    one call.

    Args:
        directory: The directory, which is created if necessary.
        call: A description of the call, by names. The directory must hold no other description.
    Raises:
        ArgumentValueError: for a directory that belongs to another call.
        OutputError: for a directory without write permission or space.
    """

    def __init__(self, directory: Path, call: dict[str, Any]) -> None:
        self.directory, self._call = directory, {"format": FORMAT, **call}

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context: inside, the directory belongs to this call, and no other process works in it."""
        with self._explained("the manifest"):
            self.directory.mkdir(parents=True, exist_ok=True)
        known = LOCK, f"{MANIFEST}.tmp"
        others = [path.name for path in self.directory.iterdir() if path.name not in known]
        # check this before creating a lock: the directory may hold unrelated files
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
        """Check that the manifest describes this call, or write it."""
        manifest = self.directory / MANIFEST
        with self._explained("the manifest"):
            for left in self.directory.glob("*.tmp"):  # left by a killed process
                left.unlink(missing_ok=True)
            known: dict[str, Any] | None = {} if manifest.exists() else None
            with suppress(FileNotFoundError, ValueError):  # a damaged manifest stays {}: no call's
                known = json.loads(manifest.read_text())
        # through JSON, which turns tuples into lists
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
        """The losses saved with a state; empty for a damaged file."""
        content = self.get(_file_name(step))
        return [] if content is None else list(content["losses"])

    def drop(self, step: int) -> None:
        (self.directory / _file_name(step)).unlink(missing_ok=True)

    def first(self, name: str, content: object) -> Any:
        """The value that the first process of a call stored by this name; stores `content` if none."""
        known = self.get(f"first-{name}.pt")
        if known is None:
            self.put(f"first-{name}.pt", {"value": content})
            return content
        return known["value"]

    def put(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of tensors and plain values."""
        buffer = io.BytesIO()
        own = pytree.map_tensors(lambda x: x.detach().clone(), content)
        torch.save(own, buffer)  # clones, because torch.save writes whole storages
        self._write(name, buffer.getbuffer())

    def get(self, name: str) -> dict[str, Any] | None:
        """The content of a file; None if it is missing or damaged.

        weights_only: a file from somebody else cannot execute code.
        """
        path = self.directory / name
        if not path.exists():
            return None
        try:
            content = torch.load(path, weights_only=True)
        except Exception:  # torch raises many kinds of errors; each state can be recomputed
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

    No fsync: after a loss of power a file may be damaged, which `OnDisk.get` notices.
    """
    stream.write(content)


def check_directory(memory: str, directory: object) -> Path | None:
    """The directory as a path. memory="disk" needs one, and all other values refuse one."""
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
