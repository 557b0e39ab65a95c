"""Scores in a memory-mapped .npy file, with which a call that was interrupted goes on.

Rows are written in order; those that are not written yet are NaN. Beside ``scores.npy``,
``scores.npy.call`` says which call they are of, and holds its factors, which might be drawn anew.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import IO, Any, final

import torch

from hoglib._core import validation
from hoglib._core.files import check_same_call, written_whole
from hoglib.errors import OutputError


@final
class ScoreFile:
    """The scores of one call.

    A new file is filled by ordinary writes: a full disk raises here, and would end the process where a
    memory map is written to.

    Args:
        path: The file.
        call: What the call is, by names, with "shape" and "dtype": any difference to that of the file
            is refused.
    Attributes:
        scores: The memory map.
        done: The number of rows that are written.
        factors: Those that were kept, or None.
    """

    def __init__(self, path: Path, call: dict[str, Any]) -> None:
        numpy = validation.package("numpy", "out=", "`pip install numpy`, or leave out= away")
        self._record, self._call = Path(f"{path}.call"), call
        shape, kind = tuple(call["shape"]), numpy.dtype(call["dtype"])
        if not path.exists():
            self.keep(None)
            header = {"descr": kind.str, "fortran_order": False, "shape": shape}
            row = numpy.full(shape[1:], numpy.nan, kind).tobytes()
            with _written(path) as stream:
                numpy.lib.format.write_array_header_1_0(stream, header)
                stream.writelines(repeat(row, shape[0]))
        known: Any = {"call": {}}
        with suppress(Exception):  # torch raises many kinds for a damaged file
            known = torch.load(self._record, map_location="cpu", weights_only=True)
        check_same_call("out", path, known["call"], call)
        self.factors = known["factors"]
        self.scores = torch.from_numpy(numpy.load(path, mmap_mode="r+"))
        missing = self.scores.view(shape[0], -1).sum(1).isnan().nonzero()
        self.done = int(missing[0]) if len(missing) else shape[0]

    def keep(self, factors: Any) -> None:
        """Write the record of the call, with its factors."""
        with _written(self._record) as stream:
            torch.save({"call": self._call, "factors": factors}, stream)


@contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    try:
        with written_whole(path) as temporary, temporary.open("wb") as stream:
            yield stream
    except OSError as error:
        raise OutputError(
            error.errno,
            f"out: expected to write {path}, got '{error.strerror or error}'. Make its folder, or name "
            "a file where there is space",
        ) from error
