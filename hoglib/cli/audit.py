"""`hoglib audit`: losses of a module or a file, as a factory makes them."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import isfunction
from typing import Any

import torch

from hoglib._core import validation
from hoglib._core.source_location import error_text
from hoglib.auditing.api import audit
from hoglib.auditing.problem import PROBLEM, problems
from hoglib.cli.finding import module_of_file, object_of
from hoglib.cli.outcomes import NOT_RUN, Outcomes, complain, stdout_for
from hoglib.errors import ArgumentTypeError, ArgumentValueError, HoglibError

FACTORY = "second_order_problem"


def run(
    target: str, *, as_json: bool = False, verbose: bool = False, seed: int = 0,
    routes: Sequence[str] | None = None, stand_ins: bool = False,
) -> int:  # fmt: skip
    """Audit, print, and return the exit status."""
    with stdout_for(as_json):
        try:
            factories = find(target)
        except HoglibError as error:
            complain(error)
            return NOT_RUN
        found = Outcomes(seed, as_json=as_json)
        for name, factory in factories.items():
            torch.manual_seed(seed)
            try:
                made = problems(f"{name}()", factory())
            except (Exception, SystemExit) as error:
                found.failed(name, error_text(error))
                continue
            found.few = verbose or len(factories) == len(made) == 1
            for one in made:
                label = f"{name}[{one.name}]" if one.name else name
                judged = partial(audit, *one[1:], routes=routes, stand_ins=stand_ins)
                found.judge(label, "auditing", judged)
    return found.conclude()


def find(target: str) -> dict[str, Callable[[], Any]]:
    """The factories that a target stands for, by name."""
    path, _, name = target.partition(":")
    if name:
        factory = object_of(target, "target")
        if not callable(factory):
            raise ArgumentTypeError(
                f"{target}: expected a function without arguments that returns {PROBLEM}, got "
                f"{validation.describe(factory)}."
            )
        return {name: factory}
    if not path.endswith(".py"):
        raise ArgumentValueError(
            f"expected package.module:factory or path/to/file.py, got {target!r}; the factory is a "
            f"function without arguments that returns {PROBLEM}."
        )
    module = module_of_file(path)
    found: dict[str, Callable[[], Any]] = {
        key: value
        for key, value in vars(module).items()
        if key.startswith(FACTORY) and isfunction(value) and value.__module__ == module.__name__
    }
    if not found:
        raise ArgumentValueError(
            f"{path}: expected a function {FACTORY}() that returns {PROBLEM}, or several whose names "
            f"start so, got none; write one, or name another factory: {path}:name."
        )
    return found
