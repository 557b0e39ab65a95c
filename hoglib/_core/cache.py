"""Where hoglib keeps compiled graphs on this machine."""

import os
from pathlib import Path
from tempfile import TemporaryFile


def cache_dir() -> Path:
    """HOGLIB_CACHE_DIR, or `hoglib` in the user's cache directory."""
    chosen = os.environ.get("HOGLIB_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hoglib"


def make_cache_dir() -> Path:
    """The same, created where there is none, readable for the user only.

    Raises OSError where it cannot be written, and where it is another user's: reading it runs code.
    """
    directory = cache_dir()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = getattr(os, "getuid", lambda: None)()
    if owner is not None and directory.stat().st_uid != owner:
        raise PermissionError(f"{directory} belongs to another user")
    with TemporaryFile(dir=directory):
        return directory
