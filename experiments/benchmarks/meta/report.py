"""The two tables of meta-gradients, and what the picture of memory shows."""

from collections.abc import Mapping

from experiments.benchmarks.meta.workloads import CHOSEN
from experiments.benchmarks.report import Row, beside, cell, markdown, time_of

PICTURE = "![Peak memory and time against inner steps, hoglib solid](images/meta-memory.png)"


def columns(results: Row, workload: str) -> dict[str, dict[str, Row]]:
    """Learner, or number of inner steps: the rows of its methods."""
    return {
        measured["problem"]: measured["methods"]
        for measured in results["workloads"]
        if measured["workload"] == workload and measured["device"] == "cpu"
    }


def parts(results: Row) -> list[str]:
    """The meta-gradients, and the inner loops of many steps; nothing where nothing was measured."""
    found = []
    if learners := columns(results, "meta-gradient"):
        found.append(meta_gradients(learners))
    if steps := columns(results, "steps"):
        found.append(many_steps(steps))
    return found


def meta_gradients(learners: Mapping[str, dict[str, Row]]) -> str:
    head = ["time of a meta-gradient, to the loop by hand", *learners]
    rows = [
        [name, *(cell(methods.get(name), _time) for methods in learners.values())]
        for name in _names(learners)
    ]
    choices = [methods.get(CHOSEN, {}).get("beside") for methods in learners.values()]
    if any(choices):
        cells = [beside(choice) if choice else "" for choice in choices]
        rows.append([f"{CHOSEN}, to the faster of loop and vmap", *cells])
    return markdown(head, _bold(rows))


def many_steps(steps: Mapping[str, dict[str, Row]]) -> str:
    head = ["one task, conv4-32; inner steps:", *steps]
    rows = [
        [f"{name}, {what}", *(cell(methods.get(name), show) for methods in steps.values())]
        for what, show in (("peak", _peak), ("time", _time))
        for name in _names(steps)
    ]
    return markdown(head, _bold(rows))


def _time(row: Row) -> str:
    """The unit in seconds, the others in units with quartiles."""
    first = f", first {row['first_seconds']:.1f} s" if row["first_seconds"] else ""
    return time_of(row) + first


def _peak(row: Row) -> str:
    return f"{row['peak_bytes'] / 2**20:.1f} MiB"


def _names(problems: Mapping[str, dict[str, Row]]) -> list[str]:
    return list(dict.fromkeys(name for methods in problems.values() for name in methods))


def _bold(rows: list[list[str]]) -> list[list[str]]:
    return [[f"**{x}**" if x.startswith("hoglib") else x, *cells] for x, *cells in rows]


def curves(results: Row) -> dict[str, dict[int, tuple[float, float]]]:
    """Method: number of inner steps: (peak MiB, time to the graphs stored by hand)."""
    measured = columns(results, "steps")
    found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in _names(measured)}
    for steps, methods in measured.items():
        for name, row in methods.items():
            if "ratio" in row:
                found[name][int(steps)] = row["peak_bytes"] / 2**20, row["ratio"]["median"]
    return {name: points for name, points in found.items() if points}
