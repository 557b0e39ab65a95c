"""Where hoglib keeps compiled graphs on this machine."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """HOGLIB_CACHE_DIR, or `hoglib` in the user's cache directory."""
    chosen = os.environ.get("HOGLIB_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hoglib"


def make_private_dir(directory: Path) -> Path:
    """The directory, which is created if necessary, readable for the user only."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory
