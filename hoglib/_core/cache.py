"""Where hoglib keeps what it found out about this machine: compiled graphs, and times of products."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """HOGLIB_CACHE_DIR, or hoglib in the user's cache directory."""
    chosen = os.environ.get("HOGLIB_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hoglib"


def made(directory: Path) -> Path:
    """The directory, which is nobody else's to write to. Raises OSError where it cannot be."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory
