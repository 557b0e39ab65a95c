"""How the benchmarks measure: in turn, on one thread, after a warm-up; and by medians."""

import argparse
import atexit
import gc
import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from importlib import metadata
from tempfile import mkdtemp
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import hoglib as hog

COLLECTED_EVERY = 1.0  # seconds between two collections of garbage, at least
Call = Callable[[], object]
Clock = Callable[[], float]
# What these say is heard by the libraries when they are loaded.
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
}


def interleaved(
    functions: Mapping[str, Call], repeats: int, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Median seconds a call of each function, the functions taking turns at every repeat."""
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            seconds[name].append(once(function, clock))
    return {name: statistics.median(values) for name, values in seconds.items()}


def beside(
    unit: Call, functions: Mapping[str, Call], repeats: int, budget: float
) -> tuple[list[float], dict[str, list[tuple[float, float]]]]:
    """Seconds of the unit, and for each function its pairs (seconds, that many units).

    The functions take turns, and the unit runs between them, so that a ratio is one of neighbours in
    time, and each call follows one of another function: a call that follows itself finds its code in
    the caches and takes up to 3% less. Ends after `repeats` rounds, or early when one more round would
    go beyond `budget` seconds, but not before three, unless a single round is beyond it. The functions
    are called as they are: warm them up before.
    """
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    units: list[float] = []
    start, collected = time.perf_counter(), -math.inf
    for done in range(1, repeats + 1):
        # what runs first after a collection finds cold caches: so not in each round of short calls
        if time.monotonic() - collected > COLLECTED_EVERY:
            gc.collect()
            collected = time.monotonic()
            unit()
            units.append(once(unit))
        for name, function in functions.items():
            before, seconds = units[-1], once(function)
            units.append(once(unit))
            pairs[name].append((seconds, seconds / math.sqrt(before * units[-1])))
        took = time.perf_counter() - start
        if (done >= 3 and took * (done + 1) / done > budget) or took / done > budget:
            break
    return units, pairs


def once(function: Call, clock: Clock = time.perf_counter) -> float:
    """The seconds of a call, from when nothing else runs until it has ended on every device."""
    settle()
    start = clock()
    function()
    settle()
    return clock() - start


def settle() -> None:
    """Wait for a GPU, where this process has used one: calls return before it has done its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def quartiles(values: list[float]) -> dict[str, float]:
    """Median and both quartiles; of one value, that value three times."""
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": median, "low": low, "high": high}


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def machine() -> str:
    """A line on what was measured on."""
    return f"{processor()}, {torch.get_num_threads()} torch thread, torch {torch.__version__}"


def versions(packages: list[str]) -> dict[str, str | None]:
    """What is installed of each distribution, None where it is not."""
    found = {package: metadata.distributions(name=package) for package in packages}
    return {name: next((one.version for one in those), None) for name, those in found.items()}


def environment(peers: list[str]) -> dict[str, Any]:
    """What was measured on, for a file of results."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": 1,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hoglib": hog.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "peers": versions(peers),
        "date": date.today().isoformat(),
    }


def forget_compiled() -> None:
    """What is compiled next is found in no cache: as on a machine that has not run it before."""
    from torch._inductor.utils import clear_caches  # of torch's kernels, in this process

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = mkdtemp()
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
    torch.compiler.reset()
    clear_caches()


def program(description: str | None, tables: Mapping[str, Callable[[bool], Iterable[str]]]) -> None:
    """Print tables, on one thread, from a seed: the head of each, and its rows, which a function of
    whether networks are tiny makes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="seconds, too short to mean anything")
    given = parser.parse_args()
    single_threaded()
    print(machine())
    for head, rows in tables.items():
        torch.manual_seed(0)
        if head:
            columns = head.rpartition("\n")[2].count("|") - 1
            print(f"\n{head}\n|{'---|' * columns}")
        for row in rows(given.smoke):
            print(row, flush=True)


def relative_error(found: Any, right: Any) -> float:
    """|found - right| / |right| of all tensors in two trees, in float64."""
    a, b = (
        torch.cat([x.detach().double().flatten() for x in tree_leaves(x)]) for x in (found, right)
    )
    return float((a - b).norm() / b.norm())


def single_threaded(core: int | None = None) -> None:
    """One thread for torch; with a core, the whole process stays on it, JAX's threads included."""
    torch.set_num_threads(1)
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
