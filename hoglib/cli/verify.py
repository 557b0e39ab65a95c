"""`hoglib verify`: Functions of a module or a file, with inputs of the command line or their own."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from hoglib._core.source_location import error_text
from hoglib.cli.finding import module_of_file, object_of
from hoglib.cli.outcomes import NOT_RUN, Outcomes, complain, stdout_for
from hoglib.errors import ArgumentValueError, HoglibError
from hoglib.verification.api import verify

SAMPLES = "sample_inputs"


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
    with stdout_for(as_json):
        try:
            targets, without = find(target, inputs)
            if reference is not None:
                options["reference"] = object_of(reference, "--reference")
        except HoglibError as error:
            complain(error)
            return NOT_RUN
        found = Outcomes(seed, as_json=as_json, few=verbose or len(targets) == 1)
        for one in targets:
            _verify(one, found, options)
    note = f", {len(without)} without {SAMPLES}() ({', '.join(without)})" if without else ""
    return found.conclude(note, without_samples=without)


def _verify(one: Target, found: Outcomes, options: dict[str, Any]) -> None:
    """Judges each sample."""
    torch.manual_seed(found.seed)
    try:
        samples = one.inputs()
    except (Exception, SystemExit) as error:
        found.failed(one.name, f"its inputs could not be made: {error_text(error)}")
        return
    several = isinstance(samples, list) and all(isinstance(s, tuple) for s in samples) and samples
    own = {} if "reference" in options else _own_options(one.fn)
    for i, sample in enumerate(samples if several else [samples]):
        label = f"{one.name}[{i}]" if several and len(samples) > 1 else one.name
        found.judge(label, "verifying", partial(verify, one.fn, sample, **(own | options)))


def _own_options(fn: Any) -> dict[str, Any]:
    """A Function may carry its reference as a static method."""
    reference = getattr(fn, "reference", None) if isinstance(fn, type) else None
    return {"reference": reference} if callable(reference) else {}


# Finding what to verify.


def find(target: str, inputs: Sequence[str]) -> tuple[list[Target], list[str]]:
    """What a target stands for, and the names of Functions in it that have no samples."""
    path, _, name = target.partition(":")
    is_file = path.endswith(".py")
    if not name and not is_file:
        raise ArgumentValueError(
            f"expected package.module:Function or path/to/file.py, got {target!r}."
        )
    if name:
        fn = object_of(target, "target")
        if isinstance(fn, type) and not issubclass(fn, Function):
            raise ArgumentValueError(
                f"{target}: expected a Function, a function or a module, got the class {fn.__name__}; "
                f"name an instance of it, such as `model = {fn.__name__}(...)` there."
            )
        if inputs:
            return [Target(name, fn, lambda: tuple(map(_value, inputs)))], []
        if not hasattr(fn, SAMPLES):
            raise ArgumentValueError(
                f"{target}: expected inputs, got none; give one --input for each, such as --input "
                f'"randn(3, 4)", or the Function a static method {SAMPLES}().'
            )
        return [Target(name, fn, getattr(fn, SAMPLES))], []
    if inputs:
        raise ArgumentValueError(
            f"--input is for one Function: expected {path}:Function, got {target!r}."
        )
    functions = _functions(module_of_file(path))
    having = [f for f in functions if callable(getattr(f, SAMPLES, None))]
    if not having:
        names = ", ".join(f.__name__ for f in functions) or "none"
        raise ArgumentValueError(
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


def _value(expression: str) -> Any:
    """randn(3, 4), torch.eye(3), 0.5, None: an expression over torch's functions."""
    names = {**vars(torch), "torch": torch, "math": math}
    try:
        return eval(expression, names)
    except (Exception, SystemExit) as error:
        raise ArgumentValueError(
            f'--input {expression!r}: expected an expression such as "randn(3, 4)", "rand(2) + 1" or '
            f'"0.5": {error_text(error)}'
        ) from error
