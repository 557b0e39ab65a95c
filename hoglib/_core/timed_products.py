"""Times torch's two matrix products once per machine, and caches the times on disk.

A class of products consists of three sizes, each the nearest power of four, and the layout of the first
factor, which oneDNN copies if it is column-major. The CPU time of one thread is measured: with several
threads, a product that waits for a busy core takes ten times as long, and such a time would be cached.
"""

import hashlib
import json
import os
import platform
import statistics
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from itertools import product
from pathlib import Path
from tempfile import mkstemp
from time import thread_time
from typing import NamedTuple

import torch
from torch import Tensor

from hoglib._core import torch_internals
from hoglib._core.cache import cache_dir, make_private_dir

SIZES: tuple[int, ...] = (64, 256, 1024)
ROUNDS = 5
SHORTEST = 2e-4  # seconds of one measurement; smaller products are repeated
LONGEST = 0.05  # seconds from which a product is measured once
_ERROR = 1e-5  # of the norm: float32's rounding in sums of a thousand is 1e-6


class Class(NamedTuple):
    """A [m, k] times B [k, n]; columns: A is column-major."""

    m: int
    k: int
    n: int
    columns: bool


class Times(NamedTuple):
    """Median CPU seconds of torch.mm and of oneDNN."""

    mm: float
    onednn: float


def class_of(m: int, k: int, n: int, columns: bool) -> Class:
    """The class of a product: each size is rounded to the nearest power of four."""
    return Class(_nearest(m), _nearest(k), _nearest(n), columns)


def _nearest(size: int) -> int:
    return next((one for one in SIZES if size < 2 * one), SIZES[-1])


def measure() -> dict[Class, Times]:
    """The times of every class in which oneDNN is correct; takes about two seconds.

    It runs in a thread of its own, without the modes, autocast and graphs of the caller.
    """
    found: list[dict[Class, Times]] = []
    problems: list[BaseException] = []
    threads, stopped = torch.get_num_threads(), threading.Event()

    def run() -> None:
        try:
            torch.set_num_threads(1)
            with torch.no_grad():
                found.append(_measure(stopped))
        except BaseException as error:
            problems.append(error)
        finally:
            torch.set_num_threads(threads)  # for threads that begin later

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # an interrupt: stop the thread
        stopped.set()
        thread.join()
        raise
    if problems:
        raise problems[0]
    return found[0]


def _measure(stopped: threading.Event) -> dict[Class, Times]:
    generator = torch.Generator().manual_seed(0)
    times = {}
    for m, k, n, columns in product(SIZES, SIZES, SIZES, (False, True)):
        if stopped.is_set():
            break
        a = torch.randn((k, m) if columns else (m, k), generator=generator)
        a, b = a.t() if columns else a, torch.randn(k, n, generator=generator)
        one = timed(a, b)
        if one is not None:
            times[Class(m, k, n, columns)] = one
    return times


def timed(a: Tensor, b: Tensor) -> Times | None:
    """The times of both products; None if they differ by more than rounding, or oneDNN raises."""
    weight, expected = b.t(), a @ b
    try:
        found = torch_internals.onednn_affine(a, weight)
    except RuntimeError:  # no implementation for this processor
        return None
    if not float((found - expected).norm()) <= _ERROR * float(expected.norm()):
        return None
    ways: list[Callable[[], object]] = [
        lambda: a @ b,
        lambda: torch_internals.onednn_affine(a, weight),
    ]
    one = _seconds(ways[0], 1)
    count = max(1, round(SHORTEST / max(one, 1e-7)))
    rounds = ROUNDS if one < LONGEST else 1
    seconds = [[_seconds(way, count) for way in ways] for _ in range(rounds)]
    return Times(*map(statistics.median, zip(*seconds, strict=True)))


def _seconds(call: Callable[[], object], count: int) -> float:
    start = thread_time()
    for _ in range(count):
        call()
    return (thread_time() - start) / count


def kept() -> dict[Class, Times]:
    """The times on this machine: from the cache, or measured and cached now."""
    path = cache_dir() / f"products-{_key()}.json"
    known = _read(path)
    if known is None:
        known = measure()
        # Of several processes that measure at once, all use the times of the first.
        known = known if _write(path, known) else _read(path) or known
    return known


def _key() -> str:
    parts = [*_processor(), platform.machine(), torch.__version__]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """What identifies the processor; on a virtual machine its name is not sufficient."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        return [line for line in first.splitlines() if line.partition("\t")[0] in wanted]
    return [platform.processor()]


def _read(path: Path) -> dict[Class, Times] | None:
    try:
        seconds = json.loads(path.read_text())["seconds"]
        return {_named(name): Times(*map(float, pair)) for name, pair in seconds.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing or incomplete
        return None


def _write(path: Path, times: dict[Class, Times]) -> bool:
    """Writes the file atomically, unless it exists; returns whether it was written."""
    text = {
        "processor": _processor(),
        "torch": torch.__version__,
        "measured": date.today().isoformat(),
        "seconds": {_name(of): list(pair) for of, pair in times.items()},
    }
    try:
        handle, name = mkstemp(dir=make_private_dir(path.parent))
        with os.fdopen(handle, "w") as file:
            json.dump(text, file, indent=1)
        try:
            if _read(path) is None:
                os.replace(name, path)
                return True
            return False
        finally:
            with suppress(OSError):
                os.remove(name)
    except OSError:  # the next process measures again
        return False


def _name(of: Class) -> str:
    return f"{of.m} {of.k} {of.n} {'columns' if of.columns else 'rows'}"


def _named(name: str) -> Class:
    m, k, n, lie = name.split()
    return Class(int(m), int(k), int(n), lie == "columns")
