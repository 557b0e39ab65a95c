"""One workload on one network in this process: check every method, then time those that are right.

python -m experiments.benchmarks.measure --workload hvp --problem MLP --json result.json
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks import with_torch
from experiments.benchmarks.memory import peak_bytes, peak_resident
from experiments.benchmarks.problems import MODELS, Problem, problem
from experiments.benchmarks.timing import beside, quartiles, single_threaded
from experiments.benchmarks.truths import TRUTHS
from experiments.benchmarks.workload import Method, Missing, Workload, columns, finished, first_line
from experiments.benchmarks.workloads import WORKLOADS

Row = dict[str, Any]
FEW = 2  # vectors that tell the price of one, for a method that keeps nothing between them
CPU = torch.device("cpu")


def measure(
    workload: Workload, point: Problem, repeats: int, budget: float
) -> tuple[Row, dict[str, Row]]:
    """What the plain gradient takes, and a row for each method.

    A row: status, "ok", "wrong", "raises" or "missing"; message, what to print for the last three;
    error, relative to the float64 truth; peak_bytes; first_seconds of what is compiled; and only where
    the status is "ok": seconds and ratio (to the plain gradient), each with median, low and high
    quartile; beside, the same ratio to the method named by `Method.beside`; products; repeats.
    """
    gradient = with_torch.gradient(point)
    truths: dict[tuple[str, int], torch.Tensor] = {}
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], Any]] = {}
    counts = {name: _count(method, workload) for name, method in workload.methods.items()}
    for name, method in workload.methods.items():
        rows[name], call = _checked(method, workload, point, truths)
        if call is not None:
            calls[name] = partial(_run, call, counts[name])
    if not calls:
        return {}, rows
    units, pairs = beside(gradient, calls, repeats, budget)
    each = {name: [pair[0] / counts[name] for pair in pairs[name]] for name in calls}
    for name in calls:
        rows[name] |= {
            "seconds": quartiles(each[name]),
            "ratio": quartiles([pair[1] / counts[name] for pair in pairs[name]]),
            "repeats": len(each[name]),
        }
        other = workload.methods[name].beside
        if other in calls:
            ratios = [a / b for a, b in zip(each[name], each[other], strict=True)]
            rows[name]["beside"] = {"name": other, **quartiles(ratios)}
    return {"seconds": quartiles(units), "repeats": len(units)}, rows


def _count(method: Method, workload: Workload) -> int:
    """By how many vectors a time is divided."""
    if not workload.per_vector or method.truth == "gradient":
        return 1
    return FEW if method.few else workload.vectors


def _run(call: Callable[[], Any], count: int) -> None:
    """To the end, without keeping the products of an iterator."""
    result = call()
    if isinstance(result, Iterator):
        for _ in islice(result, count):
            pass


def _checked(
    method: Method, workload: Workload, point: Problem, truths: dict[tuple[str, int], torch.Tensor]
) -> tuple[Row, Callable[[], Any] | None]:
    """The row of a method but for its times, and the call to time where its result is right.

    Of an iterator the first two products are checked, of anything else the whole.
    """
    row: Row = {"ours": method.ours, "status": "ok", "message": None}
    start = time.perf_counter()
    try:
        call = method.make(point)
        result, peak = _with_peak(call) if workload.memory else (finished(call(), FEW), None)
        width = 1 if method.truth == "gradient" else point.vectors.shape[1]
        few = isinstance(result, list)
        found = columns(result, width)
        row["first_seconds"] = time.perf_counter() - start if method.compiled else None
        if workload.resident:
            peak = peak_resident(lambda: finished(call(), FEW))
    except Missing as error:
        return row | {"status": "missing", "message": str(error)}, None
    except Exception as error:
        return row | {"status": "raises", "message": f"raises: {first_line(error)}"}, None
    if few:
        point = replace(point, vectors=point.vectors[:, :FEW])
    truth, key = TRUTHS[method.truth], (method.truth, found.shape[1])
    if key not in truths:
        truths[key] = truth.value(point)
    row["error"] = _error(truth.seen(point, found), truths[key])
    row["products"] = getattr(result, "products", None)
    row["peak_bytes"] = peak or None  # what JAX allocates is not seen
    if not row["error"] <= truth.tolerance(point):
        shown = f"{row['error']:.0e}".replace("e-0", "e-").replace("e+0", "e+")
        return row | {"status": "wrong", "message": f"wrong by {shown}"}, None
    return row, call


def _with_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    kept: list[Any] = []
    peak = peak_bytes(lambda: kept.append(finished(call(), FEW)), CPU)
    return kept[0], peak


def _error(result: torch.Tensor, truth: torch.Tensor) -> float:
    if result.shape != truth.shape:
        raise ValueError(
            f"expected a result of shape {list(truth.shape)}, got {list(result.shape)}"
        )
    error = float((result - truth).norm() / truth.norm())
    return error if math.isfinite(error) else math.inf


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True, choices=WORKLOADS)
    parser.add_argument("--problem", required=True, choices=MODELS)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--core", type=int, help="stay on this core")
    parser.add_argument("--smoke", action="store_true", help="tiny networks")
    given = parser.parse_args(arguments)
    single_threaded(given.core)
    workload, start = WORKLOADS[given.workload], time.perf_counter()
    point = problem(given.problem, workload.vectors, given.smoke)
    unit, rows = measure(workload, point, given.repeats, given.seconds)
    result = {
        "workload": given.workload,
        "title": workload.title,
        "problem": given.problem,
        "gradient": unit,
        "methods": rows,
        "took": {"seconds": time.perf_counter() - start, "cpu": time.process_time()},
    }
    given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
