"""`hoglib verify`: Functions of a module or a file, with inputs of the command line or their own."""

import contextlib
import importlib
import importlib.util
import io
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from hoglib import _arguments as arguments
from hoglib._version import __version__
from hoglib.verification._verify import verify
from hoglib.verification.report import Report

SAMPLES = "sample_inputs"
RIGHT, WRONG, NOT_RUN = 0, 1, 2


class Target(NamedTuple):
    """What to verify, and a function that makes its inputs."""

    name: str
    fn: Callable[..., Any] | type[Function]
    inputs: Callable[[], Any]


def run(
    target: str, inputs: Sequence[str], *, as_json: bool = False, verbose: bool = False,
    seed: int = 0, reference: str | None = None, **options: Any,
) -> int:  # fmt: skip
    """Verify, print, and return the exit status."""
    # what the user's code prints must not stand in the JSON
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            targets, without = find(target, inputs)
            if reference is not None:
                options["reference"] = _object(reference, "--reference")
        except arguments.Explained as error:
            print(f"error: {error}", file=sys.stderr)
            return NOT_RUN
        reports, failures = [], []
        width = min(100, max(60, shutil.get_terminal_size((100, 24)).columns))
        for one in targets:
            for label, report in _verified(one, seed, options):
                if isinstance(report, Report):
                    report.name = label
                    reports.append(report)
                    if not as_json:
                        whole = verbose or len(targets) == 1 or not report.ok
                        print(report.text(table=whole, width=width) + "\n", flush=True)
                else:
                    failures.append((label, report))
                    print(f"error: {label}: {report}", file=sys.stderr)
    if as_json:
        print(_json(reports, without, failures, seed))
    elif len(targets) + len(without) > 1:
        print(_summary(reports, without, failures))
    return _status(reports, failures)


def _verified(
    one: Target, seed: int, options: dict[str, Any]
) -> Iterator[tuple[str, Report | str]]:
    """A report for each sample; or what went wrong before there was one."""
    torch.manual_seed(seed)
    try:
        samples = one.inputs()
    except (Exception, SystemExit) as error:
        yield one.name, f"its inputs could not be made: {_told(error)}"
        return
    several = isinstance(samples, list) and all(isinstance(s, tuple) for s in samples) and samples
    for i, sample in enumerate(samples if several else [samples]):
        label = f"{one.name}[{i}]" if several and len(samples) > 1 else one.name
        own = {} if "reference" in options else _own_options(one.fn)
        torch.manual_seed(seed)
        _announce(f"verifying {label} ...")
        try:
            # what it prints it would print a hundred times
            with contextlib.redirect_stdout(io.StringIO()):
                report: Report | str = verify(one.fn, sample, **(own | options))
        except (Exception, SystemExit) as error:
            report = _told(error)
        finally:
            _announce("")
        yield label, report


def _announce(text: str) -> None:
    """A line for who waits at a terminal, until the next one."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _own_options(fn: Any) -> dict[str, Any]:
    """A Function may carry its reference as a static method."""
    reference = getattr(fn, "reference", None) if isinstance(fn, type) else None
    return {"reference": reference} if callable(reference) else {}


def _status(reports: Sequence[Report], failures: Sequence[tuple[str, str]]) -> int:
    if any(report.ran and not report.ok for report in reports):
        return WRONG
    unclear = not reports or any(not (report.ran and report.judged) for report in reports)
    return NOT_RUN if unclear or failures else RIGHT


def _summary(
    reports: Sequence[Report], without: Sequence[str], failures: Sequence[tuple[str, str]]
) -> str:
    wrong = [report.name for report in reports if report.ran and not report.ok]
    unknown = [report.name for report in reports if report.ok and not report.judged]
    not_run = [
        *(report.name for report in reports if not report.ran),
        *(name for name, _ in failures),
    ]
    right = sum(report.ok and report.judged for report in reports)
    parts = [f"{right} right"]
    if wrong:
        parts.append(f"{len(wrong)} WRONG ({', '.join(wrong)})")
    if unknown:
        parts.append(f"{len(unknown)} not judged ({', '.join(unknown)})")
    if not_run:
        parts.append(f"{len(not_run)} not run ({', '.join(not_run)})")
    if without:
        parts.append(f"{len(without)} without {SAMPLES}() ({', '.join(without)})")
    return ", ".join(parts)


def _json(
    reports: Sequence[Report],
    without: Sequence[str],
    failures: Sequence[tuple[str, str]],
    seed: int,
) -> str:
    return json.dumps(
        {
            "ok": _status(reports, failures) == RIGHT,
            "reports": [report.to_dict() for report in reports],
            "not_run": [{"name": name, "error": error} for name, error in failures],
            "without_samples": list(without),
            "seed": seed,
            "hoglib": __version__,
            "torch": torch.__version__,
        },
        indent=2,
    )


# Finding what to verify.


def find(target: str, inputs: Sequence[str]) -> tuple[list[Target], list[str]]:
    """What a target stands for, and the names of Functions in it that have no samples."""
    path, _, name = target.partition(":")
    is_file = path.endswith(".py")
    if not name and not is_file:
        raise arguments.WrongValue(
            f"expected package.module:Function or path/to/file.py, got {target!r}."
        )
    if name:
        fn = _object(target, "target")
        if isinstance(fn, type) and not issubclass(fn, Function):
            raise arguments.WrongValue(
                f"{target}: expected a Function, a function or a module, got the class {fn.__name__}; "
                f"name an instance of it, such as `model = {fn.__name__}(...)` there."
            )
        if inputs:
            return [Target(name, fn, lambda: tuple(map(_value, inputs)))], []
        if not hasattr(fn, SAMPLES):
            raise arguments.WrongValue(
                f"{target}: expected inputs, got none; give one --input for each, such as --input "
                f'"randn(3, 4)", or the Function a static method {SAMPLES}().'
            )
        return [Target(name, fn, getattr(fn, SAMPLES))], []
    if inputs:
        raise arguments.WrongValue(
            f"--input is for one Function: expected {path}:Function, got {target!r}."
        )
    functions = _functions(_module_of_file(path))
    having = [f for f in functions if callable(getattr(f, SAMPLES, None))]
    if not having:
        names = ", ".join(f.__name__ for f in functions) or "none"
        raise arguments.WrongValue(
            f"{path}: expected at least one Function with a static method {SAMPLES}() that returns its "
            f"arguments, got none (Functions there: {names})."
        )
    without = [f.__name__ for f in functions if f not in having]
    return [Target(f.__name__, f, getattr(f, SAMPLES)) for f in having], without


def _functions(module: ModuleType) -> list[type[Function]]:
    """The Functions that a module defines, in the order of its text."""
    return [
        value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Function)
        and value.__module__ == module.__name__
        and value.__name__ == key
    ]


def _object(target: str, what: str) -> Any:
    """The object that package.module:name or path/to/file.py:name stands for."""
    path, _, name = target.partition(":")
    if not name:
        raise arguments.WrongValue(f"{what}: expected package.module:name, got {target!r}.")
    found: Any = _module_of_file(path) if path.endswith(".py") else _module(path)
    for part in name.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if callable(value) and key[0] != "_"]
            raise arguments.WrongValue(
                f"{what}: expected a name in {path}, got {name!r}; there are "
                f"{', '.join(known) or 'none'}."
            )
        found = getattr(found, part)
    return found


def _module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # as `python -m` has it
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise arguments.WrongValue(f"{name}: it could not be imported: {_told(error)}") from error
    finally:
        sys.path.remove("")


def _module_of_file(path: str) -> ModuleType:
    """A file as a module; one inside a package by its full name, so that its own imports work."""
    file = Path(path).resolve()
    if not file.is_file():
        raise arguments.WrongValue(f"{path}: expected a file, there is none.")
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    try:
        name = ".".join(parts)
        if len(parts) > 1:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise arguments.WrongValue(f"{path}: it could not be imported: {_told(error)}") from error
    finally:
        sys.path.remove(str(folder))


def _value(expression: str) -> Any:
    """randn(3, 4), torch.eye(3), 0.5, None: an expression over torch's functions."""
    names = {**vars(torch), "torch": torch, "math": math}
    try:
        return eval(expression, names)
    except (Exception, SystemExit) as error:
        raise arguments.WrongValue(
            f'--input {expression!r}: expected an expression such as "randn(3, 4)", "rand(2) + 1" or '
            f'"0.5": {_told(error)}'
        ) from error


def _told(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, arguments.Explained) else f"{type(error).__name__}: {text}"
