"""hoglib beside torch by hand and beside other libraries: `make bench`, or

    python -m experiments.benchmarks [--full] [--workload NAME ...] [--problem NAME ...] [--write-docs]

Each workload runs on each problem in a process of its own, on one thread and one core. Every method is
compared with float64 first; only those that are right are timed. Without --full only what takes minutes
is measured, and no more than seconds of each. The results go to results.json, table.md, details.md and
benchmarks.png in the output folder, and with --write-docs to the pages of the documentation.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks import pages
from experiments.benchmarks.processes import ROOT, cores, run
from experiments.benchmarks.timing import environment
from experiments.benchmarks.workloads import PEERS, PROBLEMS, WORKLOADS, chosen

QUICK_SECONDS = 8.0  # no new round beyond these, in a process


def devices(asked: str) -> list[str]:
    """auto: the processor, and a GPU where there is one."""
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise SystemExit(
            "error: --device cuda: expected a GPU that torch sees, got none; leave --device out, or "
            "install a torch that was built for it."
        )
    return ["cpu", *["cuda"] * there] if asked == "auto" else [asked]


def measured(given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The results, and what went wrong in processes that gave none."""
    quick = not (given.full or given.smoke or given.workload or given.problem)
    seconds, repeats = QUICK_SECONDS if quick else None, 1 if given.smoke else 20
    options = {"repeats": repeats, "budget": seconds, "small": given.smoke}
    jobs = chosen(given.workload, given.problem, given.full)
    if not jobs:
        raise SystemExit(
            f"error: expected workloads that run on what --problem names, got none for "
            f"{', '.join(given.problem)}; leave one of --workload and --problem out."
        )
    workloads, problems = [], []
    for device in devices(given.device):
        # on a GPU what the summary has a column for; processes that share it would disturb one another
        some = cores()[: max(1, given.jobs)] if device == "cpu" else cores()[:1]
        there = [job for job in jobs if device == "cpu" or WORKLOADS[job[0]].brief]
        found, wrong = run(there, {**options, "device": device}, some)
        workloads += found
        problems += wrong
    machine = environment(PEERS)
    return {"machine": machine, "smoke": given.smoke, "workloads": workloads}, problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in {
        "full": "all problems; half an hour on two cores",
        "smoke": "tiny networks, one repeat",
        "write-docs": "put tables and pictures into the pages of docs",
        "render": "measure nothing: from results.json in the output",
    }.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    add = parser.add_argument
    add("--workload", nargs="+", choices=WORKLOADS, help="these, on all problems")
    add("--problem", nargs="+", choices=PROBLEMS, help="on these only")
    choices = ["cpu", "cuda", "auto"]
    add("--device", choices=choices, default="cpu", help="auto: both, if there (cpu)")
    add("--jobs", type=int, default=1, help="processes at a time, a core each (1)")
    add("--output", type=Path, default=Path("runs/benchmarks"))
    given = parser.parse_args(arguments)
    problems: list[str] = []
    if given.render:
        results = json.loads((given.output / "results.json").read_text())
    else:
        results, problems = measured(given)
    files = pages.save(results, given.output)
    print(f"{(given.output / 'table.md').read_text()}")
    print(f"In {given.output}: {', '.join(file.name for file in files)}")
    if given.write_docs:
        for page in pages.write(results, files, ROOT / "docs"):
            print(f"Written: {page.relative_to(ROOT)}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
