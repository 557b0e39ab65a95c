"""The faster of torch's two matrix products on a CPU, chosen while a graph is compiled.

`torch.mm` calls MKL (or another BLAS); torch also contains oneDNN. Which one is faster depends on the
processor and the sizes: on some processors oneDNN takes half of the time for large matrices, on others
both take the same time, and MKL is faster for small matrices on all. So both are timed for each
product of the graph, at its own sizes and layout, and the choice is recorded beside the compiled graph:
a resumed run, and other processes on the machine, make the same choice and compute the same numbers.

HOGLIB_ONEDNN=off disables oneDNN, as does `torch.backends.mkldnn.enabled = False`; `on` uses it for all
but small matrices, without timing; `auto` is the default.
"""

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from time import thread_time
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hoglib._core import torch_kernels, validation
from hoglib._core.cache import make_private_dir

SWITCH = "HOGLIB_ONEDNN"
SMALLEST = 32  # the smallest size that oneDNN is tried for
SPEEDUP = 1.05  # that is required of oneDNN
SAVED = 5e-5  # seconds that it must save per product
ROUNDS = 5
SHORTEST = 2e-4  # seconds of one measurement; smaller products are repeated
LONGEST = 0.05  # seconds from which a product is measured once
ROUNDING = 1e-5  # of the norm: that of float32 in sums of a thousand is 1e-6


class Product(NamedTuple):
    """A [m, k] times B [k, n] in float32, each row-major or column-major."""

    m: int
    k: int
    n: int
    a_by_columns: bool
    b_by_columns: bool

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Self | None:
        """The product of two matrices, which may be fake; None if oneDNN does not compute it."""
        (m, k), n = a.shape, b.shape[1]
        if not all(isinstance(size, int) for size in (m, k, n)) or min(m, k, n) < SMALLEST:
            return None
        if not (torch_kernels.onednn_takes(a) and torch_kernels.onednn_takes(b)):
            return None
        return cls(m, k, n, not torch_kernels.by_rows(a), not torch_kernels.by_rows(b))


def switch() -> str:
    """The setting HOGLIB_ONEDNN: off, on or auto."""
    value = os.environ.get(SWITCH, "auto")
    validation.one_of(SWITCH, value, ("auto", "off", "on"))
    return value


def effective_switch() -> str:
    """The setting; off if oneDNN is not available, or torch itself calls it."""
    usable = torch_kernels.onednn_available() and torch_kernels.onednn_full_precision()
    return switch() if usable else "off"


def processor() -> str:
    """What identifies the processor; on a virtual machine its name is not sufficient."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        return "\n".join(line for line in first.splitlines() if line.partition("\t")[0] in wanted)
    return platform.processor()


def choose_onednn(products: Iterable[Product], record: Path) -> frozenset[Product]:
    """The products that oneDNN computes.

    Args:
        products: Those of a graph.
        record: The file with the choices for this graph; written if there is none.
    """
    how, wanted = effective_switch(), sorted(set(products))
    if how == "off" or not wanted:
        return frozenset()
    if how == "on":
        return frozenset(wanted)
    known = _read(record)
    if known is None:
        # In a thread of its own, which has none of the modes, autocast and graphs of the caller. An
        # interrupt waits for the measurement that is under way.
        with ThreadPoolExecutor(1) as pool:
            tasks = [pool.submit(_is_faster, product) for product in wanted]
            try:
                known = [p for p, task in zip(wanted, tasks, strict=True) if task.result()]
            finally:
                pool.shutdown(cancel_futures=True)
        known = _record_once(record, known)
    return frozenset(known)


def _is_faster(product: Product) -> bool:
    """Whether oneDNN computes a product faster, and correctly.

    The CPU time of one thread is measured: with several threads, a product that waits for a busy core
    takes ten times as long.
    """
    m, k, n, a_by_columns, b_by_columns = product
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()

    def matrix(rows: int, columns: int, by_columns: bool) -> Tensor:
        if by_columns:
            return matrix(columns, rows, False).t()
        return torch.randn(rows, columns, generator=generator)

    try:
        torch.set_num_threads(1)
        a, b = matrix(m, k, a_by_columns), matrix(k, n, b_by_columns)
        mm, onednn = _seconds(a, b)
    finally:
        torch.set_num_threads(threads)  # for threads that begin later
    return mm >= SPEEDUP * onednn and mm - onednn >= SAVED


def _seconds(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Median CPU seconds of both libraries; infinite for oneDNN where it raises or is wrong."""
    weight, expected = b.t(), a @ b
    try:
        found = torch_kernels.onednn_affine(a, weight)
    except RuntimeError:  # no implementation for this processor
        return 0.0, float("inf")
    if not float((found - expected).norm()) <= ROUNDING * float(expected.norm()):
        return 0.0, float("inf")
    calls: list[Callable[[], object]] = [
        lambda: a @ b,
        lambda: torch_kernels.onednn_affine(a, weight),
    ]
    one = _mean_seconds(calls[0], 1)
    count = max(1, round(SHORTEST / max(one, 1e-7)))
    rounds = ROUNDS if one < LONGEST else 1
    seconds = [[_mean_seconds(call, count) for call in calls] for _ in range(rounds)]
    mm, onednn = map(statistics.median, zip(*seconds, strict=True))
    return mm, onednn


def _mean_seconds(call: Callable[[], object], count: int) -> float:
    start = thread_time()
    for _ in range(count):
        call()
    return (thread_time() - start) / count


def _read(record: Path) -> list[Product] | None:
    try:
        return [Product(*values) for values in json.loads(record.read_text())["onednn"]]
    except (OSError, ValueError, KeyError, TypeError):  # missing or incomplete
        return None


def _record_once(record: Path, products: list[Product]) -> list[Product]:
    """Writes the choice, unless another process did so first; returns what is recorded."""
    try:
        handle, name = mkstemp(dir=make_private_dir(record.parent))
        with os.fdopen(handle, "w") as file:
            json.dump({"processor": processor(), "onednn": products}, file, indent=1)
        try:
            with suppress(FileExistsError):
                os.link(name, record)
        finally:
            os.remove(name)
    except OSError:  # the next process times them again
        return products
    known = _read(record)
    return products if known is None else known
