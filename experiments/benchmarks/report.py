"""Results as a Markdown table, and their place in docs/benchmarks.md."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Results = dict[str, Any]
Row = dict[str, Any]
START, END = "<!-- results: python -m experiments.benchmarks --write-docs -->", "<!-- end -->"


def table(results: Results) -> str:
    """One Markdown table: a heading row for each workload, a row a method, a column a network."""
    sections = [
        (title, networks, _cells(networks)) for title, networks in by_title(results).items()
    ]
    wide = max((len(networks) for _, networks, _ in sections), default=0)
    lines = [
        "| in plain gradients of the same network |" + " |" * wide,
        "|---|" + "---|" * wide,
    ]
    for title, networks, rows in sections:
        lines.append(_line([f"**{title}**", *(f"**{name}**" for name in networks)], wide))
        for name, cells in rows.items():
            first = next(m["methods"][name] for m in networks.values() if name in m["methods"])
            lines.append(_line([f"**{name}**" if first["ours"] else name, *cells], wide))
    return "\n".join(lines)


def by_title(results: Results) -> dict[str, dict[str, Row]]:
    """Workload title: network name: its measurement."""
    found: dict[str, dict[str, Row]] = {}
    for measured in results["workloads"]:
        found.setdefault(measured["title"], {})[measured["problem"]] = measured
    return found


def _cells(networks: dict[str, Row]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for m in networks.values() for name in m["methods"])
    return {name: [cell(m["methods"].get(name)) for m in networks.values()] for name in names}


def cell(row: Row | None) -> str:
    """The ratio with its quartiles, and what else was measured; or why there is none."""
    if row is None:
        return ""
    if row["status"] != "ok":
        said = "missing" if row["message"].startswith("missing:") else row["message"]
        return textwrap.shorten(said.replace("|", "/"), 70, placeholder=" …")
    ratio = row["ratio"]
    spread = f" ({short(ratio['low'])} to {short(ratio['high'])})" if row["repeats"] > 1 else ""
    return ", ".join([short(ratio["median"]) + spread, *_extras(row)])


def _extras(row: Row) -> Iterator[str]:
    if beside := row.get("beside"):
        yield f"{short(beside['median'])} of {_kind(beside['name'])}"
    if row["peak_bytes"]:
        yield f"{row['peak_bytes'] / 2**20:.0f} MiB"
    if row.get("first_seconds"):
        yield f"first call {row['first_seconds']:.0f} s"
    if row["products"]:
        yield f"{row['products']} products, {row['seconds']['median']:.2g} s"


def _kind(name: str) -> str:
    return "JAX's gradients" if name.startswith("JAX") else name.rpartition(", ")[2]


def short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


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
        if "repeats" in row
    ]
    counts = f"{min(repeats)} to {max(repeats)}" if repeats else "no"
    return (
        f"{m['date']}, {m['processor']}, one core of {m['cores']}, {m['system']}, Python "
        f"{m['python']}, torch {m['torch']}, hoglib {m['hoglib']}; {peers}. Medians (and quartiles) "
        f"of {counts} interleaved repeats."
    )


def write(page: Path, results: Results) -> None:
    """Put the table between the marks of the page."""
    picture = "![Times in plain gradients, hoglib in blue](images/benchmarks.png)"
    put(page, (START, END), [measured_on(results), table(results), picture])


def put(page: Path, marks: tuple[str, str], parts: list[str]) -> None:
    """Put these paragraphs between the marks of the page, for what was there."""
    text = page.read_text()
    start, end = marks
    if start not in text or end not in text:
        raise ValueError(f"{page}: expected the marks {start!r} and {end!r}; write them in.")
    region = "\n\n".join([start, *parts, end])
    pattern = re.escape(start) + ".*?" + re.escape(end)
    page.write_text(re.sub(pattern, lambda _: region, text, flags=re.DOTALL))
