"""The two tables, and their place in docs/meta-benchmarks.md."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.benchmarks import report
from experiments.benchmarks.meta.methods import CHOSEN, METHODS
from experiments.benchmarks.report import short

Row = dict[str, Any]
MARKS = "<!-- results: python -m experiments.benchmarks.meta --write-docs -->", "<!-- end -->"
PICTURE = "![Peak memory and time against inner steps, hoglib solid](images/meta-memory.png)"


def columns(results: Row, workload: str) -> dict[str, dict[str, Row]]:
    """Learner, or number of inner steps: the rows of its methods."""
    return {
        measured["problem"]: measured["methods"]
        for measured in results["workloads"]
        if measured["workload"] == workload
    }


def parts(results: Row) -> list[str]:
    """What was measured on, the meta-gradients, and the inner loops of many steps."""
    found = [report.measured_on(results)]
    if learners := columns(results, "meta-gradient"):
        found.append(meta_gradients(learners))
    if steps := columns(results, "steps"):
        found.append(many_steps(steps))
    return found


def meta_gradients(learners: Mapping[str, dict[str, Row]]) -> str:
    head = ["time of a meta-gradient, to the loop by hand", *learners]
    rows = [
        [name, *(cell(methods.get(name), _time) for methods in learners.values())]
        for name in METHODS["meta-gradient"]
    ]
    choices = [methods.get(CHOSEN, {}).get("choice") for methods in learners.values()]
    if any(choices):
        rows.append([f"{CHOSEN}'s own choice, to the better of its two", *map(_choice, choices)])
    return _markdown(head, rows, bold="hoglib")


def many_steps(steps: Mapping[str, dict[str, Row]]) -> str:
    head = ["one task, conv4-32; inner steps:", *steps]
    rows = [
        [f"{name}, {what}", *(cell(methods.get(name), show) for methods in steps.values())]
        for what, show in (("peak", _peak), ("time", _time))
        for name in METHODS["steps"]
    ]
    return _markdown(head, rows, bold="hoglib")


def cell(row: Row | None, show: Callable[[Row], str]) -> str:
    """What was measured of a method that is right; or why there is nothing."""
    if row is None:
        return ""
    if row["status"] == "ok":
        return show(row) if "ratio" in row else "right"
    if row["status"] == "missing" and row["message"].startswith("missing:"):
        return "not installed"
    return report.cell(row)


def _time(row: Row) -> str:
    """The unit in seconds, the others in units with quartiles."""
    return ", ".join(_times(row))


def _times(row: Row) -> Iterator[str]:
    ratio, seconds = row["ratio"], row["seconds"]["median"]
    if ratio["low"] == ratio["median"] == ratio["high"] == 1.0:
        yield f"{seconds * 1e3:.0f} ms"
        return
    spread = f" ({short(ratio['low'])} to {short(ratio['high'])})" if row["repeats"] > 1 else ""
    yield short(ratio["median"]) + spread
    if "first" in row:
        yield f"first call {row['first']:.1f} s"


def _peak(row: Row) -> str:
    return f"{row['peak_bytes'] / 2**20:.1f} MiB"


def _choice(choice: Row | None) -> str:
    if choice is None:
        return ""
    return f"{short(choice['median'])} of {choice['better']}"


def _markdown(head: list[str], rows: list[list[str]], bold: str) -> str:
    lines = [head, ["---"] * len(head)]
    for name, *cells in rows:
        lines.append([f"**{name}**" if name.startswith(bold) else name, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def curves(results: Row) -> dict[str, dict[int, tuple[float, float]]]:
    """Method: number of inner steps: (peak MiB, time to the graphs stored by hand)."""
    found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in METHODS["steps"]}
    for steps, methods in columns(results, "steps").items():
        for name, row in methods.items():
            if "ratio" in row:
                found[name][int(steps)] = row["peak_bytes"] / 2**20, row["ratio"]["median"]
    return {name: points for name, points in found.items() if points}


def write(page: Path, results: Row) -> None:
    """Put the tables and the picture between the marks of the page."""
    report.put(page, MARKS, [*parts(results), PICTURE])
