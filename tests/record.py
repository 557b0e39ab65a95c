"""What holds before a redesign, written down to be compared with what holds after it.

    python -m tests.record [--output FILE] [--jobs N] [--only PREFIX ...]
    python -m tests.record --compare BEFORE AFTER

One part is one process: the code blocks of a page (what they print, warn and leave in their variables),
all examples of docstrings, the verdicts on the zoo, what each entry point says of each fault, the table
of a smoke run, and the float64 comparisons of the benchmarks. Numbers are compared with a tolerance;
durations, memory, addresses and folders are left out.
"""

import argparse
import contextlib
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
LEFT_OUT = (  # what differs from run to run
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (
        re.compile(r"/tmp/[\w./-]+|(?<=[ \"'])/[\w./-]*/(hoglib|tests|experiments|docs)/"),
        "<folder>",
    ),
    (re.compile(r"\d[\d.,]* ?(s|ms|us|seconds|minutes|MiB|GiB|KiB|it/s)\b"), "<amount>"),
    (re.compile(r", line \d+|:\d+(?=:|,| |$)"), "<line>"),
)
Lines = list[str]


def cleaned(text: str) -> str:
    for pattern, instead in LEFT_OUT:
        text = pattern.sub(instead, text)
    return text


def shown(value: Any, depth: int = 0) -> str | None:
    """A value in a line; None for what is no result."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_sparse or value.dtype.is_complex or value.is_meta:
            return f"tensor {value.dtype} {tuple(value.shape)}"
        numbers = value.detach().double()
        sums = (
            [numbers.sum(), numbers.abs().sum(), numbers.square().sum()] if numbers.numel() else []
        )
        return f"tensor {value.dtype} {tuple(value.shape)} {[f'{float(s):.6g}' for s in sums]}"
    if isinstance(value, bool | int | str) or value is None:
        return cleaned(repr(value)[:500])
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict) and depth < 4:
        return str({str(k): text for k, v in value.items() if (text := shown(v, depth + 1))})
    if isinstance(value, tuple | list) and depth < 4:
        return str([text for v in value if (text := shown(v, depth + 1))])
    return None


@contextlib.contextmanager
def written(lines: Lines) -> Iterator[None]:
    """Adds to the lines what is printed, logged and warned inside, and an error that ends it."""
    out, log = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("hoglib").addHandler(handler)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with contextlib.redirect_stdout(out):
                yield
        except Exception as error:
            lines.append(cleaned(f"raised {type(error).__name__}: {error}"))
    logging.getLogger("hoglib").removeHandler(handler)
    lines += [cleaned(line.rstrip()) for line in out.getvalue().splitlines()]
    lines += [f"logged {cleaned(line)}" for line in log.getvalue().splitlines()]
    lines += sorted({cleaned(f"warned {w.category.__name__}: {w.message}") for w in warned})


def page(name: str) -> dict[str, Lines]:
    """The blocks of a page, in one namespace."""
    from tests.test_docs import blocks, write_files

    sys.path.insert(0, os.getcwd())
    write_files(ROOT / name)
    namespace: dict[str, Any] = {}
    found: dict[str, Lines] = {}
    for number, code in enumerate(blocks(ROOT / name, "python")):
        before = {key: shown(value) for key, value in namespace.items()}
        lines = found.setdefault(code.strip().splitlines()[0][:60] + f" (block {number + 1})", [])
        with written(lines):
            exec(compile(code, f"{name}, block {number + 1}", "exec"), namespace)
        lines += [
            f"{key} = {text}"
            for key, value in namespace.items()
            if not key.startswith("__") and (text := shown(value)) and before.get(key) != text
        ]
    return found


def docstrings(_: str) -> dict[str, Lines]:
    """The examples of docstrings: what they print."""
    import doctest
    import inspect

    import torch
    from torch import nn
    from torch.nn import functional as F

    import hoglib as hog
    from tests.test_docstrings import FLAGS, OBJECTS

    found: dict[str, Lines] = {}
    for name, value in OBJECTS.items():
        lines = found.setdefault(name, [])
        with written(lines):
            torch.manual_seed(0)
            names = {"torch": torch, "nn": nn, "F": F, "hog": hog}
            test = doctest.DocTestParser().get_doctest(
                inspect.cleandoc(value.__doc__ or ""), names, name, None, None
            )
            runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
            runner.run(test, out=lines.append, clear_globs=False)
            lines += [
                f"{key} = {text}"
                for key, left in names.items()
                if (text := shown(left)) is not None
            ]
    return found


def zoo(_: str) -> dict[str, Lines]:
    """What verify says of each Function of the zoo: the rows, and the words of those not passed."""
    from tests.zoo import ZOO, table
    from tests.zoo.published import PUBLISHED

    def one(judged: Any) -> Lines:
        lines = [f"wanted {judged.wanted}, judged {'right' if judged.right else 'WRONG'}"]
        return [*lines, f"named by {judged.named}", *map(cleaned, judged.texts)]

    found = {f"mistake {e.name}": one(table.mistake(e)) for e in ZOO}
    found |= {f"twin {e.name}": one(table.twin(e)) for e in ZOO}
    return found | {f"published {s.name}": one(table.specimen(s)) for s in PUBLISHED}


def faults(_: str) -> dict[str, Lines]:
    """What each entry point says of each Function that has a fault, and of those that have none."""
    from hoglib.verification import entry_points
    from tests.verification import faults as functions
    from tests.verification import test_entry_points as doors

    found: dict[str, Lines] = {}
    points = {**doors.ENTRY_POINTS, **doors.FIRST_ORDER}
    chosen = ("hvp", "HessianOperator", "r1", "MAML", "hypergradient", "compile", "KFACOperator")
    for kind, cases in (("wrong", functions.WRONG), ("right", functions.RIGHT)):
        for fault, case in cases.items():
            function = case[0] if isinstance(case, tuple) else case
            for point in points if fault == next(iter(cases)) else chosen:
                entry_points.forget_verdicts()
                with written(found.setdefault(f"{kind} {fault} at {point}", [])):
                    points[point](function)
    return found


def smoke(name: str) -> dict[str, Lines]:
    """What a smoke run prints, and the names of the files that it leaves."""
    from experiments.__main__ import main

    lines: Lines = []
    with written(lines):
        main(["fit", "--config", str(ROOT / name), "--trainer.enable_progress_bar", "false"])
    files = sorted(str(path) for path in Path().rglob("*") if path.is_file())
    return {"printed": [line for line in lines if line.strip()], "files": files}


def benchmarks(_: str) -> dict[str, Lines]:
    """Which methods of which workloads are right beside float64."""
    from experiments.benchmarks.__main__ import main

    with contextlib.redirect_stdout(io.StringIO()):
        main(["--smoke", "--full", "--output", "out"])
    results = json.loads(Path("out/results.json").read_text())
    found: dict[str, Lines] = {}
    for workload in results["workloads"]:
        lines = found.setdefault(f"{workload['workload']} on {workload['problem']}", [])
        for name, row in workload["methods"].items():
            lines.append(f"{name}: {row.get('status')} {row.get('message') or ''}")
    return found


KINDS: dict[str, Callable[[str], dict[str, Lines]]] = {
    "page": page, "docstrings": docstrings, "zoo": zoo, "faults": faults, "smoke": smoke,
    "benchmarks": benchmarks,
}  # fmt: skip


def parts() -> list[str]:
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    with_code = [path for path in pages if "```python\n" in path.read_text()]
    configs = sorted((ROOT / "configs/smoke").rglob("*.yaml"))
    return [
        "faults:", "zoo:", "docstrings:", "benchmarks:",
        *(f"smoke:{path.relative_to(ROOT)}" for path in configs),
        *(f"page:{path.relative_to(ROOT)}" for path in with_code),
    ]  # fmt: skip


def run_part(part: str) -> dict[str, Lines]:
    """The part, in a process and an empty folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-m", "tests.record", "--part", part, "--output", f"{folder}/found.json"],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        )  # fmt: skip
        found = Path(folder, "found.json")
        if found.exists():
            return json.loads(found.read_text())
        return {"ended": [f"exit code {result.returncode}", *result.stderr.splitlines()[-5:]]}


def run_here(part: str, output: Path) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, _, name = part.partition(":")
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    output.write_text(json.dumps(KINDS[kind](name)))


def same(one: str, other: str) -> bool:
    """Whether two lines are equal but for the rounding of numbers."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=2e-3, abs_tol=1e-9) for a, b in pairs)


def compare(before: Path, after: Path) -> int:
    """Prints each difference; the number of parts with one."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    differ = 0
    for part in sorted({*old, *new}):
        one, other = old.get(part, {}), new.get(part, {})
        texts: Lines = []
        for name in sorted({*one, *other}):
            a, b = one.get(name), other.get(name)
            if a is None or b is None:
                texts.append(f"  {'new' if a is None else 'gone'}: {name}")
            elif len(a) != len(b) or not all(map(same, a, b)):
                left = [line for line in a if not any(same(line, x) for x in b)]
                right = [line for line in b if not any(same(line, x) for x in a)]
                texts += [
                    f"  {name}",
                    *(f"    - {x[:300]}" for x in left),
                    *(f"    + {x[:300]}" for x in right),
                ]
        if texts:
            differ += 1
            print("\n".join([part, *texts]))
    print(f"{len(new)} parts, {differ} differ")
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("build/record.json"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="parts that begin so")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    given = parser.parse_args()
    if given.compare:
        return int(compare(*given.compare) > 0)
    if given.part:
        run_here(given.part, given.output)
        return 0
    chosen = [part for part in parts() if part.startswith(tuple(given.only))]
    record: dict[str, Any] = {}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        for part, found in zip(chosen, pool.map(run_part, chosen), strict=True):
            record[part] = found
            given.output.write_text(json.dumps(record, indent=1))
            print(f"{len(record)}/{len(chosen)} {part}", flush=True)
    print(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
