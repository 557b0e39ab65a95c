"""One learner in this process: check every method, then time those that are right.

python -m experiments.benchmarks.meta.measure --workload steps --problem 40 --json result.json
"""

import argparse
import atexit
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.memory import peak_bytes
from experiments.benchmarks.meta import tasks, with_torch
from experiments.benchmarks.meta.methods import (
    CHOSEN,
    COMPILED,
    FORCED,
    JAX,
    METHODS,
    Make,
    methods_for,
)
from experiments.benchmarks.meta.tasks import LEARNERS, STEPS, Learner, learner
from experiments.benchmarks.meta.with_torch import Call, Found
from experiments.benchmarks.timing import beside, quartiles, single_threaded
from experiments.benchmarks.workload import Missing, columns, first_line

Row = dict[str, Any]
CPU = torch.device("cpu")
# the wrong meta-gradients that torch gives are off by 2e-4 and more
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
SECONDS = {"meta-gradient": 6.0, "steps": 5.0}  # no new round beyond these


def measure(
    point: Learner,
    methods: Mapping[str, Make],
    repeats: int,
    budget: float,
    memory: bool = False,
    checked: Learner | None = None,
) -> dict[str, Row]:
    """A row for each method; the first is the unit of time.

    checked: what the methods are held against the truth on, if not on `point`.

    A row: ours; status, "ok", "wrong", "raises" or "missing"; message, what to print for the last
    three; and where there is a result: error, relative to float64, the larger of that of the meta-loss
    and that of its gradient. Only where the status is "ok": seconds, ratio (to the unit) with median,
    low and high quartile, repeats; first, the seconds of the first call, where it compiles; peak_bytes,
    where memory is asked for; choice, where hoglib chose: see `chosen`.
    """
    checked = point if checked is None else checked
    truth = flat(with_torch.checkpointed_by_hand(checked.double())())
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    for name, make in methods.items():
        rows[name], call = _held(name, make, checked, truth)
        if call is not None:
            calls[name] = call if checked is point else make(point)
            if memory:
                rows[name]["peak_bytes"] = peak_bytes(calls[name], CPU)
    unit = next(iter(methods))
    if unit not in calls:
        return rows
    others = {name: call for name, call in calls.items() if name != unit}
    units, pairs = beside(calls[unit], others, repeats, budget)
    one = dict.fromkeys(("median", "low", "high"), 1.0)
    rows[unit] |= {"seconds": quartiles(units), "ratio": one, "repeats": len(units)}
    for name, found in pairs.items():
        seconds, ratios = zip(*found, strict=True)
        rows[name] |= {
            "seconds": quartiles(list(seconds)),
            "ratio": quartiles(list(ratios)),
            "repeats": len(found),
        }
    if CHOSEN in pairs:
        rows[CHOSEN]["choice"] = chosen(pairs)
    return rows


def chosen(pairs: Mapping[str, list[tuple[float, float]]]) -> Row | None:
    """hoglib's own choice between vmap and loop, in times of the better of both where both run."""
    ratios = {way: [ratio for _, ratio in pairs.get(name, [])] for way, name in FORCED.items()}
    medians = {way: quartiles(found)["median"] for way, found in ratios.items() if found}
    if not medians:
        return None
    better = min(medians, key=lambda way: medians[way])
    both = zip(pairs[CHOSEN], ratios[better], strict=True)
    return {"better": better, **quartiles([ours / best for (_, ours), best in both])}


def flat(found: Found) -> tuple[Tensor, Tensor]:
    """The meta-loss and its gradient, in float64."""
    value, *grads = found
    return columns(value, 1), columns(tuple(grads), 1)


def _held(
    name: str, make: Make, point: Learner, truth: tuple[Tensor, Tensor]
) -> tuple[Row, Call | None]:
    """The row of a method but for its times, and its call where the result is right."""
    row: Row = {"ours": name.startswith("hoglib"), "status": "ok", "message": None}
    try:
        call = make(point)
        start = time.perf_counter()
        found = call()
        first = time.perf_counter() - start
        row["error"] = max(map(_error, flat(found), truth))
    except Missing as error:
        return row | {"status": "missing", "message": str(error)}, None
    except Exception as error:
        return row | {"status": "raises", "message": f"raises: {first_line(error)}"}, None
    if not row["error"] <= TOLERANCE[point.support[0].dtype]:
        shown = f"{row['error']:.0e}".replace("e-0", "e-").replace("e+0", "e+")
        return row | {"status": "wrong", "message": f"wrong by {shown}"}, None
    return row | ({"first": first} if name in (JAX, *COMPILED.values()) else {}), call


def _error(result: Tensor, truth: Tensor) -> float:
    if result.shape != truth.shape:
        raise ValueError(
            f"expected a result of shape {list(truth.shape)}, got {list(result.shape)}"
        )
    error = float((result - truth).norm() / truth.norm())
    return error if math.isfinite(error) else math.inf


def forget_compiled() -> None:
    """First calls compile: what earlier processes kept is not seen in this one."""
    for name in ("HOGLIB_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[name] = mkdtemp()
        atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True, choices=METHODS)
    parser.add_argument("--problem", required=True, choices=[*LEARNERS, *map(str, STEPS)])
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--core", type=int, help="stay on this core")
    parser.add_argument("--smoke", action="store_true", help="tiny networks")
    given = parser.parse_args(arguments)
    single_threaded(given.core)
    forget_compiled()
    start = time.perf_counter()
    which = given.workload, given.problem, given.smoke
    rows = measure(
        learner(*which),
        methods_for(given.workload, given.problem),
        given.repeats,
        given.seconds or SECONDS[given.workload],
        memory=given.workload == "steps",
        checked=tasks.checked(*which) if given.workload == "steps" else None,
    )
    result = {
        "workload": given.workload,
        "problem": given.problem,
        "methods": rows,
        "took": {"seconds": time.perf_counter() - start, "cpu": time.process_time()},
    }
    given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
