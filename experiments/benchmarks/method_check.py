"""Compares a method's result with a float64 reference, before it is timed; its memory."""

import math
import time
from dataclasses import replace
from typing import Any

import torch

from experiments.benchmarks.memory import peak_allocated, peak_resident
from experiments.benchmarks.timing import forget_compiled, settle
from experiments.benchmarks.truths import TRUTHS
from experiments.benchmarks.workload import (
    Call,
    Memory,
    Method,
    Missing,
    Workload,
    columns,
    finished,
    first_line,
    peer,
)

Row = dict[str, Any]
FEW = 2  # vectors that tell the price of one, for a method that keeps nothing between them


class References:
    """The reference results of a workload at one point, each computed once."""

    def __init__(self, workload: Workload, point: Any) -> None:
        self.workload, self.point = workload, point
        self._truths: dict[tuple[str, bool], torch.Tensor] = {}

    def truth(self, method: Method, few: bool) -> tuple[Any, torch.Tensor]:
        """The point and the right result there; few: of the first vectors only."""
        point, key = self.point, (method.truth, few)
        if few:
            point = replace(point, vectors=point.vectors[:, :FEW])
        if key not in self._truths:
            self._truths[key] = TRUTHS[method.truth].value(point)
        return point, self._truths[key]


def check_method(references: References, method: Method, timed: Any) -> tuple[Row, Call | None]:
    """The row of a method but for its times; and where its result is right, the call at `timed`.

    Of an iterator the first two products are checked, of anything else the whole.
    """
    row: Row = {"ours": method.ours, "column": method.column, "called": method.called}
    row |= {"status": "ok", "message": None}
    workload = references.workload
    try:
        if method.library:
            peer(method.library)
        if method.compiled:
            forget_compiled()
        start = time.perf_counter()
        call = method.make(references.point)
        result = finished(call(), FEW)
        settle()
        first = time.perf_counter() - start
        found = columns(result, workload.vectors)
    except Missing as reason:
        return row | {"status": "missing", "message": str(reason)}, None
    except Exception as reason:
        return row | {"status": "raises", "message": f"raises: {first_line(reason)}"}, None
    truth = TRUTHS[method.truth]
    point, right = references.truth(method, few=isinstance(result, list))
    found = truth.seen(point, found)
    if found.shape != right.shape:
        said = f"raises: expected a result of shape {list(right.shape)}, got {list(found.shape)}"
        return row | {"status": "raises", "message": said}, None
    error = error_of(found, right.to(found.device), truth.apart)
    row |= {"error": error, "products": getattr(result, "products", None)}
    del result, found
    if not error <= truth.tolerance(point):
        shown = f"{error:.0e}".replace("e-0", "e-").replace("e+0", "e+")
        return row | {"status": "wrong", "message": f"wrong by {shown}"}, None
    if timed is not references.point:
        call = method.make(timed)
        finished(call(), FEW)
    row["first_seconds"] = first if method.compiled else None
    row["peak_bytes"] = peak(workload.memory, call, timed.device) or None  # JAX's is not seen
    return row, call


def peak(memory: Memory, call: Call, device: torch.device) -> int | None:
    """The peak of a call, of what the workload says; on a GPU of what its allocator gave."""
    if not memory:
        return None

    def run() -> Any:
        return finished(call(), FEW)

    resident = memory == "resident" and device.type == "cpu"
    return peak_resident(run) if resident else peak_allocated(run, device)


def error_of(result: torch.Tensor, right: torch.Tensor, apart: int = 0) -> float:
    """|result - right| / |right|; of the first rows by themselves and of the rest the larger."""
    pieces = [slice(apart), slice(apart, None)] if apart else [slice(None)]
    errors = [float((result[at] - right[at]).norm() / right[at].norm()) for at in pieces]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def vectors_of(method: Method, workload: Workload) -> int:
    """By how many vectors a time is divided."""
    if not workload.per_vector:
        return 1
    return FEW if method.few else workload.vectors
