"""hoglib beside torch by hand and beside other libraries: `make bench`, or

    python -m experiments.benchmarks [--smoke] [--workload NAME ...] [--write-docs]

Each workload runs on each network in a process of its own, on one thread and one core. Every method
is held against float64 first; only those that are right are timed. The results go to results.json,
table.md and benchmarks.png in the output folder.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from experiments import plots
from experiments.benchmarks import report
from experiments.benchmarks.problems import MODELS
from experiments.benchmarks.processes import ROOT, cores, run
from experiments.benchmarks.timing import environment
from experiments.benchmarks.workloads import PEERS, WORKLOADS

PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "benchmarks.png"


def save(results: dict[str, Any], folder: Path) -> Path:
    """results.json, table.md and the picture, whose file it returns."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [report.measured_on(results), "", report.table(results), ""]
    (folder / "table.md").write_text("\n".join(lines))
    return plots.benchmarks(report.by_title(results), folder / "benchmarks.png")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny networks, one repeat")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--problem", nargs="+", choices=MODELS, help="on these networks only")
    parser.add_argument("--repeats", type=int, help="at most this many rounds (20)")
    parser.add_argument("--seconds", type=float, help="no new round beyond this, a process (10)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, a core each (1)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument(
        "--write-docs", action="store_true", help=f"put table and picture into {PAGE.name}"
    )
    parser.add_argument(
        "--render", action="store_true", help="measure nothing: from results.json in the output"
    )
    given = parser.parse_args(arguments)
    problems: list[str] = []
    if given.render:
        results = json.loads((given.output / "results.json").read_text())
    else:
        options = ["--repeats", str(given.repeats or (1 if given.smoke else 20))]
        options += ["--seconds", str(given.seconds or 10)]
        options += ["--smoke"] * given.smoke
        jobs = [
            (name, problem)
            for name in given.workload
            for problem in WORKLOADS[name].problems
            if given.problem is None or problem in given.problem
        ]
        found, problems = run(jobs, options, cores()[: max(1, given.jobs)])
        results = {"machine": environment(PEERS), "smoke": given.smoke, "workloads": found}
    picture = save(results, given.output)
    print(f"{report.measured_on(results)}\n\n{report.table(results)}\n")
    print(f"In {given.output}: results.json, table.md, {picture.name}")
    if given.write_docs:
        report.write(PAGE, results)
        shutil.copy(picture, PICTURE)
        print(f"Written: {PAGE.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
