"""One workload on one problem in this process: check every method, then time those that are right."""

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.method_check import References, Row, check_method, vectors_of
from experiments.benchmarks.timing import beside, quartiles, single_threaded
from experiments.benchmarks.workload import Call, Workload
from experiments.benchmarks.workloads import WORKLOADS


def measure(
    workload: Workload, point: Any, repeats: int, budget: float, checked: Any = None
) -> tuple[Row, dict[str, Row]]:
    """What the unit of time takes, and a row for each method.

    point: what is timed. checked: where methods are compared with the reference, if not there.

    A row: ours, column, called; status, "ok", "wrong", "raises" or "missing"; message, what to print
    for the last three; and of what gave a result: error, relative to float64; products. Only where the
    status is "ok": peak_bytes, or None; first_seconds of what compiles, or None; seconds and ratio (to
    the unit), each with median, low and high quartile; repeats; beside, the same ratio to the fastest
    of `Method.beside`, with its name.
    """
    references = References(workload, point if checked is None else checked)
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    for name, method in workload.methods.items():
        rows[name], call = check_method(references, method, point)
        if call is not None:
            calls[name] = call
    for name, call in calls.items():
        if workload.methods[name].compiled:
            call()  # the check of a later method has dropped what torch.compile kept
    unit = calls.get(workload.by_hand) if workload.unit is None else workload.unit.make(point)
    if unit is None or not calls:
        return {}, rows
    counts = {name: vectors_of(method, workload) for name, method in workload.methods.items()}
    own = workload.unit is None
    others = {
        name: run_through(call, counts[name])
        for name, call in calls.items()
        if not (own and name == workload.by_hand)
    }
    units, pairs = beside(run_through(unit, 1), others, repeats, budget)
    if own:
        pairs[workload.by_hand] = [(seconds, 1.0) for seconds in units]
    each = {name: [ratio / counts[name] for _, ratio in pairs[name]] for name in calls}
    for name in calls:
        rows[name] |= {
            "seconds": quartiles([seconds / counts[name] for seconds, _ in pairs[name]]),
            "ratio": quartiles(each[name]),
            "repeats": len(each[name]),
        }
    for name in calls:
        them = [other for other in workload.methods[name].beside if other in each]
        if them:
            best = min(them, key=lambda other: rows[other]["ratio"]["median"])
            ratios = [a / b for a, b in zip(each[name], each[best], strict=True)]
            rows[name]["beside"] = {"name": best, **quartiles(ratios)}
    return {"seconds": quartiles(units), "repeats": len(units)}, rows


def run_through(call: Call, count: int) -> Call:
    """To the end, without keeping the products of an iterator."""

    def run() -> None:
        result = call()
        if isinstance(result, Iterator):
            for _ in islice(result, count):
                pass

    return run


def result(
    name: str, problem: str, device: str, small: bool, repeats: int, budget: float | None
) -> Row:
    """What is written of a workload on a problem, for the reports."""
    workload, start = WORKLOADS[name].on(problem, device), time.perf_counter()
    point = workload.make(problem, workload.vectors, small)
    checked = workload.checked(problem, small) if workload.checked else None
    if device != "cpu":
        where = torch.device(device)
        point, checked = point.to(where), checked and checked.to(where)
    unit, rows = measure(workload, point, repeats, budget or workload.seconds, checked)
    return {
        "workload": name,
        "title": workload.title,
        "brief": workload.brief,
        "page": workload.page,
        "problem": problem,
        "device": device,
        "by_hand": workload.by_hand,
        "unit": {"name": workload.unit.name if workload.unit else workload.by_hand, **unit},
        "methods": rows,
        "took": {"seconds": time.perf_counter() - start, "cpu": time.process_time()},
    }


def main(text: str) -> None:
    """text: a JSON object of the arguments of `result`, with `core` and `file`."""
    given = json.loads(text)
    single_threaded(given.pop("core"))
    file = Path(given.pop("file"))
    file.write_text(json.dumps(result(**given), indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
