"""How the benchmarks measure: in turn, on one thread, after a warm-up; and by medians."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds a call of each function, the functions taking turns at every repeat."""
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> str:
    """A line on what was measured on."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {torch.get_num_threads()} torch thread, torch {torch.__version__}"
