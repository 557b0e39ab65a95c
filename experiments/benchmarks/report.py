"""Results as long Markdown tables, with quartiles and memory; and their place on a page."""

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Results = dict[str, Any]
Row = dict[str, Any]
MARKS = "<!-- results: python -m experiments.benchmarks --full --write-docs -->", "<!-- end -->"
APART = 1.05  # quartiles that are nearer to each other are not shown
META = "meta"  # the page of what has tables of its own


def table(results: Results) -> str:
    """A Markdown table for each unit: a heading row for each workload, a row a method."""
    units: dict[str, list[Row]] = {}
    for measured in results["workloads"]:
        if measured["page"] != META:
            units.setdefault(measured["unit"]["name"], []).append(measured)
    return "\n\n".join(_table(unit, found) for unit, found in units.items())


def _table(unit: str, workloads: list[Row]) -> str:
    sections = [
        (title, networks, _cells(networks)) for title, networks in by_title(workloads).items()
    ]
    wide = max(len(networks) for _, networks, _ in sections)
    first = f"in {unit}" if unit.startswith("plain") else f"to {unit}"
    lines = [f"| {first} |" + " |" * wide, "|---|" + "---|" * wide]
    for title, networks, rows in sections:
        lines.append(_line([f"**{title}**", *(f"**{name}**" for name in networks)], wide))
        for name, cells in rows.items():
            some = next(m["methods"][name] for m in networks.values() if name in m["methods"])
            lines.append(_line([f"**{name}**" if some["ours"] else name, *cells], wide))
    return "\n".join(lines)


def by_title(workloads: list[Row]) -> dict[str, dict[str, Row]]:
    """Workload title: network name: its measurement."""
    found: dict[str, dict[str, Row]] = {}
    for measured in workloads:
        gpu = " on a GPU" * (measured["device"] != "cpu")
        found.setdefault(measured["title"], {})[measured["problem"] + gpu] = measured
    return found


def _cells(networks: dict[str, Row]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for m in networks.values() for name in m["methods"])
    return {name: [cell(m["methods"].get(name)) for m in networks.values()] for name in names}


def in_full(row: Row) -> str:
    """The ratio with quartiles that are apart, and what else was measured."""
    return ", ".join([time_of(row), *_extras(row)])


def cell(row: Row | None, show: Callable[[Row], str] = in_full) -> str:
    """What was measured of a method that is right; or why there is nothing."""
    if row is None:
        return ""
    if row["status"] == "ok" and "ratio" not in row:
        return "right"  # but the unit of time is not
    if row["status"] != "ok":
        said = "missing" if row["message"].startswith("missing:") else row["message"]
        return textwrap.shorten(said.replace("|", "/"), 70, placeholder=" …")
    return show(row)


def time_of(row: Row) -> str:
    """The ratio with quartiles that are apart; of what is the unit itself, milliseconds."""
    ratio = row["ratio"]
    if is_unit(row):
        return milliseconds(row["seconds"]["median"])
    apart = row["repeats"] > 1 and ratio["high"] > APART * ratio["low"]
    spread = f" ({short(ratio['low'])}-{short(ratio['high'])})" if apart else ""
    return short(ratio["median"]) + spread


def is_unit(row: Row) -> bool:
    return all(value == 1.0 for value in row["ratio"].values())


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{2 if seconds < 9.95e-3 else 0}f} ms"


def _extras(row: Row) -> Iterator[str]:
    if row.get("beside"):
        yield beside(row["beside"])
    if row["peak_bytes"]:
        yield f"{row['peak_bytes'] / 2**20:.0f} MiB"
    if row.get("first_seconds"):
        yield f"first {row['first_seconds']:.1f} s"
    if row["products"]:
        yield f"{row['products']} products, {row['seconds']['median']:.2g} s"


def beside(other: Row) -> str:
    """The ratio to another method, by its library or its kind."""
    name = other["name"]
    kind = "curvlinops" if name.startswith("curvlinops") else name.rpartition(", ")[2]
    return f"{short(other['median'])} of {kind}"


def short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table with rows as wide as its head."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _line(cells: list[str], wide: int) -> str:
    return "| " + " | ".join(cells + [""] * (wide + 1 - len(cells))) + " |"


def measured_on(results: Results) -> str:
    """A line on the machine and the versions."""
    m = results["machine"]
    peers = ", ".join(f"{name} {version or '(missing)'}" for name, version in m["peers"].items())
    repeats = [
        row["repeats"]
        for measured in results["workloads"]
        for row in measured["methods"].values()
        if "ratio" in row and not is_unit(row)
    ]
    counts = f"{min(repeats)} to {max(repeats)}" if repeats else "no"
    gpu = f", GPU {m['gpu']}" if m.get("gpu") else ""
    return (
        f"{m['date']}, {m['processor']}, {m['cores']} cores, each process on one core with "
        f"{m['threads']} thread{gpu}, {m['system']}, Python {m['python']}, torch {m['torch']}, hoglib "
        f"{m['hoglib']}; {peers}. Medians of {counts} interleaved repeats."
    )


def put(page: Path, parts: list[str]) -> None:
    """Put these paragraphs between the marks of the page, for what was there."""
    text = page.read_text()
    start, end = MARKS
    if start not in text or end not in text:
        raise ValueError(f"{page}: expected the marks {start!r} and {end!r}; write them in.")
    region = "\n\n".join([start, *parts, end])
    pattern = re.escape(start) + ".*?" + re.escape(end)
    page.write_text(re.sub(pattern, lambda _: region, text, flags=re.DOTALL))
