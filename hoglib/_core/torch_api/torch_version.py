"""The installed torch, the oldest one that hoglib runs on, and the newest one that it was run on.

`import hoglib` imports this module first, so that an older torch is refused in one sentence.
"""

import torch

from hoglib.errors import MissingDependencyError

Version = tuple[int, int]
OLDEST: Version = (2, 11)
NEWEST: Version = (2, 15)


def parse_version(text: str) -> Version:
    """Major and minor of a version such as "2.13.0+cpu"."""
    major, minor, *_ = text.split("+")[0].split(".")
    return int(major), int(minor)


TORCH_VERSION = parse_version(torch.__version__)

if TORCH_VERSION < OLDEST:
    _oldest = ".".join(map(str, OLDEST))
    raise MissingDependencyError(
        f"hoglib needs torch {_oldest} or newer, got torch {torch.__version__}; upgrade it: "
        f'pip install "torch>={_oldest}".'
    )
