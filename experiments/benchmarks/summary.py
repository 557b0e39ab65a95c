"""The short table: for each workload and network the time by hand, and all others beside it."""

from math import inf
from typing import NamedTuple

from experiments.benchmarks.report import Row, cell, markdown, milliseconds, short

SLOWER = 1.1  # than somebody, by this and more: who that is stands in bold
HEAD = ["torch by hand", "hoglib", "hoglib compiled (first call)", "other libraries"]
HEAD += ["JAX jit (first call)"]
GPU = ["GPU: by hand", "hoglib", "compiled"]


class Entry(NamedTuple):
    """A method: its time to that by hand, or None and why; the seconds of its first call."""

    called: str
    ratio: float | None
    first: float | None
    said: str


class Line(NamedTuple):
    """A workload on a network: seconds by hand, or None and why, and the entries of each column."""

    seconds: float | None
    said: str
    entries: dict[str, list[Entry]]

    def best(self, column: str) -> Entry | None:
        """The fastest of a column that is right; where none is, the first."""
        found = self.entries.get(column, [])
        return min(found, key=lambda entry: entry.ratio or inf, default=None)

    def faster(self, ratio: float | None) -> bool:
        """Whether hoglib, in the better of its columns, is slower than that by a tenth."""
        ours = [self.best(column) for column in ("hoglib", "compiled")]
        times = [entry.ratio for entry in ours if entry and entry.ratio is not None]
        return bool(times) and ratio is not None and min(times) > SLOWER * ratio


def lines(results: Row, device: str = "cpu") -> dict[str, Line]:
    """What was measured on that device, by workload and network."""
    return {
        f"{measured['brief']}, {measured['problem']}": line(measured)
        for measured in results["workloads"]
        if measured["brief"] and measured["device"] == device
    }


def line(measured: Row) -> Line:
    methods = measured["methods"]
    hand = methods[measured["by_hand"]]
    unit = hand["ratio"]["median"] if "ratio" in hand else None
    entries: dict[str, list[Entry]] = {}
    for row in methods.values():
        if row["column"]:
            timed = unit is not None and "ratio" in row
            ratio = row["ratio"]["median"] / unit if timed else None
            first = row.get("first_seconds") if timed else None
            said = "" if row["status"] == "ok" else cell(row).partition(":")[0]
            entries.setdefault(row["column"], []).append(Entry(row["called"], ratio, first, said))
    return Line(hand["seconds"]["median"] if unit else None, "" if unit else cell(hand), entries)


def table(results: Row) -> str:
    """A row for each workload and network; columns for a GPU where there was one."""
    on_cpu, on_gpu = lines(results), lines(results, "cuda")
    head = ["", *HEAD, *(GPU if on_gpu else [])]
    rows = []
    for name in dict.fromkeys([*on_cpu, *on_gpu]):
        there = _cells(on_gpu.get(name))[: len(GPU)] if on_gpu else []
        rows.append([name, *_cells(on_cpu.get(name)), *there])
    return markdown(head, rows)


def _cells(line: Line | None) -> list[str]:
    """The cells below HEAD; the first ones stand below GPU, too."""
    if line is None:
        return [""] * len(HEAD)
    others = line.entries.get("other", [])
    return [
        _by_hand(line),
        _ratio(line.best("hoglib")),
        _ratio(line.best("compiled")),
        ", ".join(_other(line, entry) for entry in others),
        _jax(line),
    ]


def _by_hand(line: Line) -> str:
    if line.seconds is None:
        return line.said
    return _bold(milliseconds(line.seconds), line.faster(1.0))


def _ratio(entry: Entry | None) -> str:
    """The ratio, which of several ways it is, and the first call."""
    if entry is None or entry.ratio is None:
        return entry.said if entry else ""
    first = f" ({entry.first:.{1 if entry.first < 1 else 0}f} s)" if entry.first else ""
    named = [short(entry.ratio), *([entry.called] if entry.called not in ("", "JAX") else [])]
    return ", ".join(named) + first


def _other(line: Line, entry: Entry) -> str:
    if entry.ratio is None:
        return f"{entry.called} {entry.said}"
    return _bold(f"{entry.called} {short(entry.ratio)}", line.faster(entry.ratio))


def _jax(line: Line) -> str:
    entry = line.best("jax")
    return _bold(_ratio(entry), line.faster(entry.ratio if entry else None))


def _bold(text: str, so: bool) -> str:
    return f"**{text}**" if so else text
