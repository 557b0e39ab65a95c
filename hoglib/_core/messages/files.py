"""Files that an interrupted call continues: written atomically, and refused by different calls."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import string_at
from itertools import repeat
from pathlib import Path
from typing import IO, Any, final

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib.errors import ArgumentValueError, OutputError


def digest(leaves: Sequence[Any]) -> str:
    """A hash of the bytes of tensors, and of numbers."""
    found = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            # a lazily conjugated or negated view has the bytes of its base
            x = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
            if x.numel():
                found.update(string_at(x.data_ptr(), x.numel() * x.element_size()))
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def check_same_call(option: str, path: Path, known: Any, wanted: dict[str, Any]) -> None:
    """Raise if a file is from another call. known: the call of the file. wanted: this call."""
    for name, value in wanted.items():
        if known.get(name) != value:
            kind = "file" if path.is_file() else "directory"
            raise ArgumentValueError(
                f"{option}: expected that of the same call, got {path}, which holds another one: its "
                f"{name} {known.get(name)!r:.40}, here {value!r:.40}. Name another {kind}, or delete "
                "this one."
            )


@contextmanager
def translate_file_errors(expected: str, advice: str) -> Iterator[None]:
    """Inside, an error of the file system becomes an OutputError with advice."""
    try:
        yield
    except OSError as error:
        text = f"{expected}, got '{error.strerror or error}'. {advice}"
        raise OutputError(error.errno, text) from error


@contextmanager
def write_atomically(path: Path) -> Iterator[IO[bytes]]:
    """A stream to a file; afterwards the file is complete, or does not exist."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
        os.replace(temporary, path)
    # BaseException: KeyboardInterrupt leaves no half file either
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@final
class ScoreFile:
    """Scores in a memory-mapped .npy file. Rows are written in order; rows not yet written are NaN.

    ``scores.npy.call``, beside ``scores.npy``, records the call, and random factors, which the next run
    would draw differently. Ordinary writes fill a new file, because they raise on a full disk; a write
    to a memory map would crash the process.

    Args:
        path: The file.
        call: A description of the call, by names, with "shape" and "dtype"; a file with another
            description is refused.
    Attributes:
        scores: The memory map.
        done: The number of written rows.
        factors: The recorded factors, or None.
    """

    def __init__(self, path: Path, call: dict[str, Any]) -> None:
        numpy = validation.package("numpy", "out=", "`pip install numpy`, or leave out= away")
        self._record, self._call = path.with_name(f"{path.name}.call"), call
        shape, kind = tuple(call["shape"]), numpy.dtype(call["dtype"])
        advice = "Make its folder, or name a file where there is space"
        if not path.exists():
            with translate_file_errors(f"out: expected to write {path}", advice):
                # the record first: a later call would refuse scores without a record
                self.keep(None)
                header = {"descr": kind.str, "fortran_order": False, "shape": shape}
                row = numpy.full(shape[1:], numpy.nan, kind).tobytes()
                with write_atomically(path) as stream:
                    numpy.lib.format.write_array_header_1_0(stream, header)
                    stream.writelines(repeat(row, shape[0]))
        known: Any = {"call": {}}
        with suppress(Exception):  # torch.load raises many types of errors on a damaged file
            known = torch.load(self._record, map_location="cpu", weights_only=True)
        check_same_call("out", path, known["call"], call)
        self.factors = known["factors"]
        try:
            numpy.load(path, mmap_mode="r")  # with "r+" NumPy fills a cut file with zeros
        except ValueError as error:
            raise ArgumentValueError(
                f"out: expected a whole file, got {path}, which is cut off or damaged; delete it."
            ) from error
        self.scores = torch.from_numpy(numpy.load(path, mmap_mode="r+"))
        # the first row with a sum of NaN is not yet written
        self.done = int((~self.scores.view(shape[0], -1).sum(1).isnan()).cumprod(0).sum())

    def keep(self, factors: object) -> None:
        """Write the record of the call, with its factors."""
        with write_atomically(self._record) as stream:
            torch.save({"call": self._call, "factors": factors}, stream)
