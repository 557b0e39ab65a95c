"""What is written of the results: files in a folder, and three pages of the documentation."""

import json
import shutil
from pathlib import Path

from experiments.benchmarks import pictures, report, summary
from experiments.benchmarks.meta import report as meta
from experiments.benchmarks.report import Results

PICTURE, MEMORY = "benchmarks.png", "meta-memory.png"
SUMMARY = f"![Times relative to torch by hand, and memory against inner steps](images/{PICTURE})"


def contents(results: Results) -> dict[str, list[str]]:
    """Page: its paragraphs; only of pages for which something was measured."""
    said = report.measured_on(results)
    found: dict[str, list[str]] = {}
    if summary.lines(results) or summary.lines(results, "cuda"):
        found["benchmarks.md"] = [said, summary.table(results), SUMMARY]
    if details := report.table(results):
        found["benchmark-details.md"] = [said, details]
    if tables := meta.parts(results):
        picture = [meta.PICTURE] if meta.curves(results) else []
        found["meta-benchmarks.md"] = [said, *tables, *picture]
    return found


def save(results: Results, folder: Path) -> list[Path]:
    """results.json, table.md, details.md and the pictures; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    data, table, details = (folder / name for name in ("results.json", "table.md", "details.md"))
    data.write_text(json.dumps(results, indent=1) + "\n")
    short = summary.table(results)
    long = [part for part in (report.table(results), *meta.parts(results)) if part]
    table.write_text("\n\n".join([report.measured_on(results), short]) + "\n")
    details.write_text("\n\n".join([report.measured_on(results), *long]) + "\n")
    files, curves = [data, table, details], meta.curves(results)
    lines = summary.lines(results)
    if lines or curves:
        files.append(pictures.plot_benchmarks(folder / PICTURE, lines, curves).save())
    if curves:
        files.append(pictures.plot_meta_memory(folder / MEMORY, curves).save())
    return files


def write(results: Results, files: list[Path], docs: Path) -> list[Path]:
    """Put tables between the marks of the pages, and pictures beside them; what was written."""
    written = []
    for page, parts in contents(results).items():
        report.put(docs / page, parts)
        written.append(docs / page)
    drawn = (file for file in files if file.suffix == ".png")
    written += [Path(shutil.copy(file, docs / "images" / file.name)) for file in drawn]
    return written
