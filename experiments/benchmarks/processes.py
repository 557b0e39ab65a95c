"""A process for each measurement, on one thread and a core of its own."""

import json
import os
import queue
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.benchmarks.timing import ONE_THREAD

ROOT = Path(__file__).parents[2]
MODULE = "experiments.benchmarks.measure"


def run(
    jobs: list[tuple[str, str]],
    options: dict[str, Any],
    cores: list[int],
) -> tuple[list[dict[str, Any]], list[str]]:
    """A measurement for each (workload, problem), and what went wrong in the others.

    The longest, which are last, are begun first: so no core waits for them at the end.
    """
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in cores:
        free.put(core)
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=len(jobs), unit="run", desc="benchmarks") as bar,
        ThreadPoolExecutor(len(cores)) as pool,
    ):
        outcomes = list(pool.map(partial(_one, Path(folder), options, free, bar), jobs[::-1]))[::-1]
    found = [outcome for outcome in outcomes if isinstance(outcome, dict)]
    return found, [outcome for outcome in outcomes if isinstance(outcome, str)]


def _one(
    folder: Path, options: dict[str, Any], free: Any, bar: Any, job: tuple[str, str]
) -> dict[str, Any] | str:
    name, problem = job
    file, core = folder / f"{name}-{problem}.json", free.get()
    bar.set_postfix_str(f"{name}, {problem}")
    given = {**options, "name": name, "problem": problem, "file": str(file), "core": core}
    command = [sys.executable, "-W", "ignore", "-m", MODULE, json.dumps(given)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True
        )
    finally:
        free.put(core)
        bar.update()
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        return f"{name}, {problem}: the process ended with {done.returncode}\n{said}"
    return json.loads(file.read_text())


def cores() -> list[int]:
    """The cores that this process may use, from the last: the first serves the system's interrupts."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0), reverse=True)
    return list(range(os.cpu_count() or 1))
