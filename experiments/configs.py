"""The configs of the experiments: what each shows, and how long it takes.

Both are read from the first lines of a config, which are the only place where they stand::

    # What it shows, in one line.
    # 2 minutes on one core:
    #   python -m experiments fit --config configs/...
"""

import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "configs"
SMOKE = "smoke"
MINUTES = re.compile(r"# ([\d.]+) minutes? on one core:")


class Config(NamedTuple):
    """A config.

    Attributes:
        path: Of its file, relative to the folder that holds `configs`.
        minutes: Of a run on one core.
        shows: What it shows, in one line.
    """

    path: Path
    minutes: float
    shows: str


def with_full_configs(words: list[str]) -> list[str]:
    """A command line, with the config of the whole run before each of `smoke`, which changes it."""
    found: list[str] = []
    for i, word in enumerate(words):
        option, _, path = word.rpartition("=")
        if option in ("--config", "-c") or (i and words[i - 1] in ("--config", "-c")):
            full = Path(*(part for part in Path(path).parts if part != SMOKE))
            if full != Path(path) and full.exists():
                found += [str(full), "--config"] if not option else [f"--config={full}"]
        found.append(word)
    return found


def configs(folder: Path = FOLDER) -> list[Config]:
    """The configs of a folder, but for those of `smoke`, which are the same runs in seconds."""
    files = sorted(path for path in folder.rglob("*.yaml") if SMOKE not in path.parts)
    return [_read(path, folder.parent) for path in files]


def _read(path: Path, root: Path) -> Config:
    shows, time, *_ = path.read_text().splitlines()
    minutes = MINUTES.match(time)
    if minutes is None or not shows.startswith("# "):
        raise ValueError(
            f"{path}: expected `# what it shows` and `# N minutes on one core:` in its first two "
            f"lines, got {shows!r} and {time!r}."
        )
    return Config(path.relative_to(root), float(minutes[1]), shows[2:].rstrip("."))


def table(folder: Path = FOLDER) -> str:
    """What ``python -m experiments list`` prints."""
    found = configs(folder)
    width = max(len(str(config.path)) for config in found)
    lines = [f"{'config':{width}}  minutes  shows"]
    lines += [f"{config.path!s:{width}}  {config.minutes:7g}  {config.shows}" for config in found]
    smoke = f"{folder.name}/{SMOKE}/..."
    lines += [
        f"{smoke:{width}}  seconds  The same runs in seconds, too short to learn; make smoke",
        "",
        "Minutes are those of one core. The first lines of a config name variants. To run one:",
        f"  python -m experiments fit --config {min(found, key=lambda one: one.minutes).path}",
    ]
    return "\n".join(lines)
