"""python -m tests.mutants: a small change of the code, and the tests that reach it: does one fail?

A change (mutant) is of one operator, number, condition, keyword, statement or default. It is compiled into a
fork of a process that has imported torch, which then imports hoglib and runs the tests whose lines include
the changed ones, near and fast tests first, to the first that fails. Lines are recorded once (build/mutants/tests.jsonl),
and again for a test file that has changed, or reaches a file that has. What runs in processes that a test starts anew is
neither recorded nor changed. A mutant that survives is an equivalent change, code that does nothing, or a
missing test; the log, and the end of the output, have its diff.
"""

import argparse
import ast
import difflib
import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import accumulate
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, final

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/mutants"
PACKAGE = str(ROOT / "hoglib") + os.sep
FORK = multiprocessing.get_context("fork")
BEFORE = ("torch._dynamo", "torch._inductor.compile_fx", "numpy", "hypothesis")  # what tests import
QUIET = "-Wignore::pytest.PytestAssertRewriteWarning"  # of those
PYTEST = ("-q", "-p", "no:cacheprovider", "--tb=no", QUIET)
VERDICTS = ("caught", "survived", "no test")

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
NOT_CHANGED = {"annotation", "returns", "decorator_list", "bases"}
NOT_ENTERED = (ast.JoinedStr, ast.Import, ast.ImportFrom)
NOTHING = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body


class Place(NamedTuple):
    """Where a node stands, and what a test runs that can notice a change of it."""

    where: str = ""  # class and function
    inside: bool = False  # a function; code outside is run by an import
    lines: range = range(0)  # of a function: of the statement, or of the body of a default
    body: range = range(0)  # of the function
    names: frozenset[str] = frozenset()  # outside: what the code defines


class Mutant(NamedTuple):
    """A node of a file, and another one in its place."""

    file: str
    place: Place
    old: Any
    new: Any
    slot: tuple[ast.AST, str, int | None]  # the node above, its field, and the index there

    @property
    def label(self) -> str:
        change = f"{ast.unparse(self.old)} -> {ast.unparse(self.new)}"
        return f"{self.file}:{self.old.lineno}:{self.old.col_offset} {self.place.where}: {change}"

    def put(self) -> None:
        """Changes the tree."""
        node, field, i = self.slot
        if i is None:
            setattr(node, field, self.new)
        else:
            getattr(node, field)[i] = self.new

    def diff(self) -> str:
        text = (ROOT / self.file).read_bytes().splitlines(keepends=True)
        before, after = self.old.lineno - 1, self.old.end_lineno
        line = text[before][: self.old.col_offset] + ast.unparse(self.new).encode()
        line += text[after - 1][self.old.end_col_offset :]
        both = text, [*text[:before], line, *text[after:]]
        a, b = ([line.decode() for line in lines] for lines in both)
        return "".join(difflib.unified_diff(a, b, f"a/{self.file}", f"b/{self.file}"))


def replacements(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """What may stand in the place of a node, which is the field of another one."""
    match node:
        case ast.Compare(left, ops, comparators):
            for i, op in enumerate(ops):
                for other in COMPARED[type(op)]:
                    yield ast.Compare(left, [*ops[:i], other(), *ops[i + 1 :]], comparators)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield from map(ast.Constant, dict.fromkeys((value + 1, value - 1, -value, 2 * value)))
        case ast.Constant(float(value)):
            yield from map(ast.Constant, dict.fromkeys((2 * value, -value, value + 1)))
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Call(func, args, keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg:
                    yield ast.Call(func, args, keywords[:i] + keywords[i + 1 :])
        case ast.Name(name) if name in SWAPPED:
            yield ast.Name(SWAPPED[name], ast.Load())
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Return(value) if value is not None:
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Constant()):  # a docstring
            pass
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Assert():
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
    if field in ("test", "ifs"):
        yield from (ast.Constant(True), ast.Constant(False))
    if field == "context_expr":
        yield NOTHING


def place_of(child: ast.AST, node: ast.AST, at: Place) -> Place:
    """The place of a child of a node, which stands at a place."""
    if isinstance(node, ast.FunctionDef):
        body = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        at = at._replace(inside=True, lines=body, body=body)
    if isinstance(child, ast.FunctionDef | ast.ClassDef):
        at = at._replace(where=f"{at.where}.{child.name}".strip("."), names=frozenset({child.name}))
    if isinstance(child, ast.stmt):
        body = getattr(child, "body", None)
        end = max(child.lineno, body[0].lineno - 1) if body else child.end_lineno
        at = at._replace(lines=range(child.lineno, (end or 0) + 1))
    if isinstance(child, ast.Assign | ast.AnnAssign) and not at.inside:
        targets = child.targets if isinstance(child, ast.Assign) else [child.target]
        found = (n for target in targets for n in ast.walk(target))
        at = at._replace(names=frozenset(n.id for n in found if isinstance(n, ast.Name)))
    return at


def mutants(file: str, text: str) -> tuple[ast.Module, list[Mutant]]:
    """The tree of a file, and each change of it."""

    def of(node: ast.AST, at: Place) -> Iterator[Mutant]:
        for field, value in ast.iter_fields(node):
            if field in NOT_CHANGED or (field == "keywords" and isinstance(node, ast.ClassDef)):
                continue
            for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(child, ast.AST) or isinstance(child, NOT_ENTERED):
                    continue
                there = place_of(child, node, at)
                for new in replacements(child, field):
                    if ast.unparse(new) != ast.unparse(child):
                        if not hasattr(new, "lineno"):  # no part of the tree, such as an operand
                            ast.fix_missing_locations(ast.copy_location(new, child))
                        yield Mutant(file, there, child, new, (node, field, i))
                yield from of(child, there)

    tree = ast.parse(text)
    return tree, list(of(tree, Place()))


# What tests run


class Recorded(NamedTuple):
    file: str
    name: str
    seconds: float
    lines: dict[str, int]  # of a file of hoglib, as bits


@final
class Recorder:
    """A plugin of pytest: the lines of hoglib that each test runs."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, dict[str, str]]] = {}
        self.bad = set[str]()
        self.lines: dict[str, set[int]] = {}
        self.calls = Counter[int]()

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return None
        self.calls[id(frame.f_code)] += 1
        if self.calls[id(frame.f_code)] > 20:  # of a loop, whose lines are known by now
            return None
        add = self.lines.setdefault(file, set()).add

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            add(frame.f_lineno)
            return line

        return line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines, self.calls, start = {}, Counter(), time.monotonic()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            bits = {
                file.removeprefix(f"{ROOT}/"): f"{sum(1 << line for line in lines):x}"
                for file, lines in self.lines.items()
            }
            self.tests[item.nodeid] = round(time.monotonic() - start, 3), bits

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.bad.add(report.nodeid)


def record(file: str) -> tuple[dict[str, Any], int]:
    """Runs a test file: its tests that pass, with their lines, and how many fail."""
    plugin = Recorder()
    pytest.main([file, *PYTEST], plugins=[plugin])
    tests = {name: found for name, found in plugin.tests.items() if name not in plugin.bad}
    files = {file, *(file for _, lines in tests.values() for file in lines)}
    return {"file": file, "files": {f: digest(f) for f in files}, "tests": tests}, len(plugin.bad)


@cache
def digest(file: str) -> str:
    path = ROOT / file
    return sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def recorded(files: list[str], jobs: int) -> list[Recorded]:
    """What the tests of files run, from the record; first the files are run that are not in it."""
    path = FOLDER / "tests.jsonl"
    path.touch()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    every = {r["file"]: r for r in rows if all(digest(f) == d for f, d in r["files"].items())}
    missing = [file for file in files if file not in every]
    with ThreadPool(jobs) as pool, path.open("a") as log:
        todo = pool.imap_unordered(
            lambda file: (file, forked(partial(record, file), 3600)), missing
        )
        for file, found in progress("tests recorded", todo, len(missing)):
            nothing = {"file": file, "files": {file: digest(file)}, "tests": {}}
            every[file], bad = found or (nothing, 1)
            print(json.dumps(every[file]), file=log, flush=True)
            if bad:
                print(f"\n{file}: {bad} tests fail, and are left out")
    return [
        Recorded(file, name, seconds, {of: int(bits, 16) for of, bits in lines.items()})
        for file in files
        for name, (seconds, lines) in every[file]["tests"].items()
    ]


def reaching(mutant: Mutant, tests: Iterable[Recorded], seconds: float) -> list[Recorded]:
    """The tests that can notice a change, of some seconds altogether. First come near ones, fast ones, and
    those that run what few others run of the function."""
    place, near = mutant.place, "tests/" + mutant.file.split("/")[1].strip("_")
    masks = {mutant.file: sum(1 << line for line in place.lines)}
    if not place.inside:
        masks = {file: lines_with(file, place.names) for file in sources([""])}
    found = [t for t in tests if any(t.lines.get(file, 0) & bits for file, bits in masks.items())]
    lines = [t.lines.get(mutant.file, 0) for t in found]
    every = {k: sum(bits >> k & 1 for bits in lines) for k in place.body}
    rare = [sum(1 / n for k, n in every.items() if bits >> k & 1) + 1e-3 for bits in lines]
    cost = {
        test.name: test.seconds * (1 if test.file.startswith(near) else 5) / weight
        for test, weight in zip(found, rare, strict=True)
    }
    found.sort(key=lambda test: cost[test.name])
    files = [*dict.fromkeys(test.file for test in found)][
        :8
    ]  # to collect a file takes seconds, too
    found = [test for test in found if test.file in files]
    sums = accumulate(t.seconds for t in found)
    return [t for t, total in zip(found, sums, strict=True) if total - t.seconds < seconds]


@cache
def lines_with(file: str, names: frozenset[str]) -> int:
    """The lines that have one of some names."""
    name = re.compile(rf"\b({'|'.join(names) or '.'})\b")
    lines = (ROOT / file).read_text().splitlines()
    return sum(1 << i for i, line in enumerate(lines, start=1) if name.search(line))


def sources(only: Iterable[str]) -> list[str]:
    paths = sorted((ROOT / "hoglib").rglob("*.py"))
    names = [str(path.relative_to(ROOT)) for path in paths]
    return [name for name in names if any(name.startswith(f"hoglib/{part}") for part in only)]


# One mutant


@final
class Changed(SourceFileLoader):
    """Imports a changed module; it is also its finder."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        super().__init__(name, str(ROOT / file))
        self.tree = tree

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.tree, self.path, "exec", dont_inherit=True)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None


@final
class Chosen:
    """A plugin of pytest: some tests in their order, and the first that fails."""

    def __init__(self, names: list[str]) -> None:
        self.order = {name: i for i, name in enumerate(names)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = (item for item in items if item.nodeid in self.order)
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid


def run(tests: list[Recorded], tree: ast.Module, mutant: Mutant) -> str:
    """By what a mutant is caught; an empty string if all tests pass."""
    mutant.put()
    sys.meta_path.insert(0, Changed(mutant.file, tree))
    plugin = Chosen([test.name for test in tests])
    code = pytest.main(
        [*dict.fromkeys(test.file for test in tests), "-x", *PYTEST], plugins=[plugin]
    )
    return plugin.failed or ("" if code == pytest.ExitCode.OK else f"pytest: {code!r}")


def judged(mutant: Mutant, tree: ast.Module, tests: list[Recorded]) -> tuple[str, str]:
    """(verdict, by what). The first few tests run by themselves: collecting the files of all takes longer."""
    first = [*dict.fromkeys(test.file for test in tests)][:3]
    sums = accumulate(test.seconds for test in tests)
    few = [t for t, s in zip(tests, sums, strict=True) if t.file in first and s - t.seconds < 5]
    for part in (few, [test for test in tests if test not in few]):
        limit = 60 + 10 * sum(test.seconds for test in part)
        caught = forked(partial(run, part, tree, mutant), limit) if part else ""
        if caught is None or caught:
            return "caught", caught or "a crash, or the time limit"
    return ("survived" if tests else "no test"), f"{len(tests)} tests"


FORKING = threading.Lock()
RUNNING = set[int]()


def forked(task: Callable[[], Any], limit: float) -> Any:
    """What a task returns in a fork; None if it ends without, or not in time."""

    def work() -> None:
        os.setsid()
        quiet = os.open(FOLDER / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        theirs.send(task())
        os._exit(0)

    with FORKING:  # no other fork keeps this pipe open
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=work)
        process.start()
        theirs.close()
    RUNNING.add(process.pid or 0)
    try:
        return ours.recv() if ours.poll(limit) else None
    except EOFError:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        RUNNING.discard(process.pid or 0)


def progress(what: str, every: Iterable[Any], count: int) -> Iterator[Any]:
    start = time.monotonic()
    for k, found in enumerate(every, start=1):
        left = (time.monotonic() - start) / k * (count - k) / 60
        bar = f"\r{'#' * (30 * k // count):30} {k}/{count} {what}, {left:.0f} min left "
        print(bar, end="\n" if k == count else "", flush=True)
        yield found


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Of (file, verdict): how many of each verdict, by package."""
    counts = Counter((part, v) for file, v in rows for part in (os.path.dirname(file), "together"))
    lines = [f"{'':32}" + "".join(f"{verdict:>10}" for verdict in VERDICTS)]
    for part in sorted({part for part, _ in counts}):
        lines.append(f"{part:32}" + "".join(f"{counts[part, v]:10,}" for v in VERDICTS))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    option, week = parser.add_argument, int(time.strftime("%G%V"))
    option("--only", nargs="+", default=[""], help="packages, files: curvature meta/tasks.py")
    option("--number", type=int, default=200, help="of mutants, one of a node at most; 0: all")
    option("--seed", type=int, default=week, help="of the draw; default: the week")
    option("--seconds", type=float, default=60, help="of tests that a mutant has to survive")
    option("--tests", nargs="+", default=["tests"], help="folders and files of tests")
    option("--jobs", type=int, default=2)
    option("--log", type=Path, default=FOLDER / "log.jsonl")
    option("--resume", action="store_true", help="go on from the log")
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    given.log.open("a" if given.resume else "w").close()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(FOLDER / "inductor")
    for name in BEFORE:
        importlib.import_module(name)
    pytest.main(["--version", "--noconftest", QUIET])  # imports its plugins
    paths = (path for name in given.tests for path in [Path(name), *sorted(Path(name).rglob("*"))])
    files = [str(p) for p in paths if p.match("test_*.py") and "experiments" not in p.parts]
    try:
        tests = recorded(files, given.jobs)
        parsed = [mutants(file, (ROOT / file).read_text()) for file in sources(given.only)]
        every = [(mutant, tree) for tree, own in parsed for mutant in own]
        random.Random(given.seed).shuffle(every)
        of_each_node = list({id(mutant.old): (mutant, tree) for mutant, tree in every}.values())
        drawn = of_each_node[: given.number] if given.number else every
        known = {row["label"]: row for row in map(json.loads, given.log.read_text().splitlines())}
        todo = [(mutant, tree) for mutant, tree in drawn if mutant.label not in known]

        def judge(pair: tuple[Mutant, ast.Module]) -> tuple[Mutant, str, str]:
            mutant, tree = pair
            return mutant, *judged(mutant, tree, reaching(mutant, tests, given.seconds))

        with ThreadPool(given.jobs) as pool, given.log.open("a") as log:
            done = progress("mutants", pool.imap_unordered(judge, todo), len(todo))
            for mutant, verdict, by in done:
                row = {"label": mutant.label, "verdict": verdict, "by": by, "diff": mutant.diff()}
                known[mutant.label] = row
                print(json.dumps(row), file=log, flush=True)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; --resume goes on")
    finally:
        for pid in [*RUNNING]:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    rows = [known[mutant.label] for mutant, _ in drawn]
    for row in rows:
        if row["verdict"] != "caught":
            print(f"{row['verdict']} ({row['by']}): {row['label']}\n{row['diff']}")
    print(table((row["label"].split(":")[0], row["verdict"]) for row in rows))
    print(f"{len(drawn)} of {len(every)} mutants, --seed {given.seed}; {given.log}")


if __name__ == "__main__":
    main()
