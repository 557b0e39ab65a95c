"""Files by which a call that was interrupted goes on: whole ones, and those of the same call."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import string_at
from pathlib import Path
from typing import Any

from torch import Tensor

from hoglib.errors import ArgumentValueError


def digest(leaves: Sequence[Any]) -> str:
    """A hash of the bytes of tensors, and of the numbers among them."""
    found = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            x = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
            if x.numel():
                found.update(string_at(x.data_ptr(), x.numel() * x.element_size()))
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file beside the path, which is moved there at the end: it is there as a whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def check_same_call(
    option: str, path: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Raise for files of another call than the one that is wanted, both by names."""
    for name, value in wanted.items():
        if known.get(name) != value:
            kind = "file" if path.is_file() else "directory"
            raise ArgumentValueError(
                f"{option}: expected that of the same call, got {path}, which holds another one: its "
                f"{name} {_describe_value(known.get(name))}, here {_describe_value(value)}. Name "
                f"another {kind}, or delete this one."
            )


def _describe_value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:16]}...{text[-8:]}"
