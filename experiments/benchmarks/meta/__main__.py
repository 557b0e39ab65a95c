"""Meta-gradients in hoglib beside those by hand and by other libraries (some five minutes):

    python -m experiments.benchmarks.meta [--smoke] [--jobs 2] [--write-docs]  # two at a time: three

Each learner has a process of its own, on one thread and one core. Every method is held against a loop
by hand in float64 first; only those that are right are timed. Then the memory and the time of long
inner loops. The results go to results.json, tables.md and meta-memory.png in the output folder.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from experiments import plots
from experiments.benchmarks.meta import report
from experiments.benchmarks.meta.methods import METHODS, PEERS
from experiments.benchmarks.meta.tasks import LEARNERS, STEPS
from experiments.benchmarks.processes import ROOT, cores, run
from experiments.benchmarks.timing import environment

PAGE = ROOT / "docs" / "meta-benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "meta-memory.png"
JOBS = {"meta-gradient": list(LEARNERS), "steps": [str(steps) for steps in STEPS]}


def save(results: dict[str, Any], folder: Path) -> Path | None:
    """results.json, tables.md and the picture, whose file it returns, where steps were counted."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "tables.md").write_text("\n\n".join(report.parts(results)) + "\n")
    curves = report.curves(results)
    return plots.meta_memory(curves, folder / PICTURE.name) if curves else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny networks, one repeat")
    parser.add_argument("--workload", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--problem", nargs="+", help="only these learners, or numbers of steps")
    parser.add_argument("--repeats", type=int, help="at most this many rounds (20)")
    parser.add_argument("--seconds", type=float, help="no new round beyond this, a process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, a core each (1)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/meta"))
    parser.add_argument(
        "--write-docs", action="store_true", help=f"put tables and picture into {PAGE.name}"
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
        options += ["--seconds", str(given.seconds)] if given.seconds else []
        options += ["--smoke"] * given.smoke
        jobs = [
            (name, problem)
            for name in given.workload
            for problem in JOBS[name]
            if given.problem is None or problem in given.problem
        ]
        module = "experiments.benchmarks.meta.measure"
        found, problems = run(jobs, options, cores()[: max(1, given.jobs)], module)
        results = {"machine": environment(PEERS), "smoke": given.smoke, "workloads": found}
    picture = save(results, given.output)
    print("\n\n".join(report.parts(results)))
    print(
        f"\nIn {given.output}: results.json, tables.md" + (f", {picture.name}" if picture else "")
    )
    if given.write_docs:
        report.write(PAGE, results)
        print(f"Written: {PAGE.relative_to(ROOT)}")
        if picture:
            shutil.copy(picture, PICTURE)
            print(f"Written: {PICTURE.relative_to(ROOT)}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
