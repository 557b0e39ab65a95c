"""Find the objects named on the command line: Functions to verify, factories of losses to audit."""

import importlib.util
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Function

from hoglib._core.messages import validation
from hoglib._core.messages.call_errors import binding_error
from hoglib._core.runtime.source_location import error_text
from hoglib.auditing.problem import PROBLEM
from hoglib.errors import ArgumentTypeError, ArgumentValueError

SAMPLES = "sample_inputs"  # static method of a Function
FACTORY = "second_order_problem"  # start of a factory's name


class Target(NamedTuple):
    """A function to verify."""

    name: str
    fn: Callable[..., Any] | type[Function]
    inputs: Callable[[], Any]  # makes the samples


def functions(target: str, inputs: Sequence[str]) -> tuple[list[Target], list[str]]:
    """The Functions named by a target, and the names of Functions in its file without samples."""
    path, _, name = target.partition(":")
    if name:
        fn = object_of(target, "target")
        if isinstance(fn, type) and not issubclass(fn, Function):
            raise ArgumentValueError(
                f"{target}: expected a Function, a function or a module, got the class {fn.__name__}; "
                f"name an instance of it: define `model = {fn.__name__}(...)` and pass :model."
            )
        if not inputs and not hasattr(fn, SAMPLES):
            raise ArgumentValueError(
                f"{target}: expected inputs, got none; pass one --input for each argument, such as "
                f'--input "randn(3, 4)", or give the Function a static method {SAMPLES}(); for a '
                "factory of a loss: `hoglib audit`."
            )
        own = (lambda: tuple(map(_evaluate, inputs))) if inputs else getattr(fn, SAMPLES)
        return [Target(name, fn, own)], []
    if not path.endswith(".py"):
        raise ArgumentValueError(
            f"expected package.module:Function or path/to/file.py, got {target!r}"
            + (
                _each_file(path, SAMPLES, "verify")
                or (f"; perhaps {':'.join(target.rsplit('.', 1))!r}." if "." in target else ".")
            )
        )
    if inputs:
        text = f"--input belongs to one Function: expected {path}:Function, got {target!r}."
        raise ArgumentValueError(text)
    defined = _defined_in(module_of_file(path)).items()
    # a class may have several names in the module: take each class once, by its own name
    classes = [x for key, x in defined if isinstance(x, type) and x.__name__ == key]
    found = [x for x in classes if issubclass(x, Function)]
    with_samples = [f for f in found if callable(getattr(f, SAMPLES, None))]
    if not with_samples:
        names = ", ".join(f.__name__ for f in found) or "none"
        raise ArgumentValueError(
            f"{path}: expected at least one Function with a static method {SAMPLES}() that returns its "
            f"arguments, got none (Functions in it: {names})."
        )
    without = [f.__name__ for f in found if f not in with_samples]
    return [Target(f.__name__, f, getattr(f, SAMPLES)) for f in with_samples], without


def _each_file(path: str, word: str, command: str) -> str:
    """The end of a sentence: how to check all files of a directory. "" for any other path."""
    files = f"grep -rl --include='*.py' {word} {shlex.quote(path)}"
    return f"; for its files: {files} | xargs -n 1 hoglib {command}" if os.path.isdir(path) else ""


def _defined_in(module: ModuleType) -> dict[str, Any]:
    """The classes and functions that a module itself defines, in the order of its text."""
    kinds, name = type | FunctionType, module.__name__
    return {k: x for k, x in vars(module).items() if isinstance(x, kinds) and x.__module__ == name}


def _evaluate(expression: str) -> Any:
    """The value of an expression over torch's functions: randn(3, 4), torch.eye(3), 0.5, None."""
    try:
        # user code, like the code in the named file: eval adds no risk
        return eval(expression, {**vars(torch), "torch": torch, "math": math})
    except (Exception, SystemExit) as error:
        raise ArgumentValueError(
            f'--input {expression!r}: expected an expression such as "randn(3, 4)", "rand(2) + 1" or '
            f'"0.5"; it raises {error_text(error)}'
        ) from error


def factories(target: str) -> dict[str, Callable[[], Any]]:
    """The factories named by a target, by name."""
    path, _, name = target.partition(":")
    if name:
        factory = object_of(target, "target")
        call = factory.forward if isinstance(factory, nn.Module) else factory
        if not callable(call) or isinstance(call, type) or binding_error(call, ()):
            raise ArgumentTypeError(
                f"{target}: expected a function without arguments that returns {PROBLEM}, got "
                f"{validation.describe(factory)}; for a custom Function: `hoglib verify`."
            )
        return {name: factory}
    if not path.endswith(".py"):
        raise ArgumentValueError(
            f"expected package.module:factory or path/to/file.py, got {target!r}"
            + (
                _each_file(path, FACTORY, "audit")
                or (f"; a factory is a function without arguments that returns {PROBLEM}.")
            )
        )
    defined = _defined_in(module_of_file(path)).items()
    found = {k: x for k, x in defined if k.startswith(FACTORY) and not isinstance(x, type)}
    if not found:
        raise ArgumentValueError(
            f"{path}: expected a function {FACTORY}() that returns {PROBLEM}, or several whose names "
            f"start with {FACTORY}, got none; write one, or name another factory: {path}:name; "
            "for custom Functions: `hoglib verify`."
        )
    return found


def object_of(target: str, what: str) -> Any:
    """The object named by package.module:name or path/to/file.py:name."""
    path, _, name = target.partition(":")
    if not (path and name):
        raise ArgumentValueError(f"{what}: expected package.module:name, got {target!r}.")
    if path.endswith(".py"):
        found: Any = module_of_file(path)
    else:
        found = _import(path, "", lambda: importlib.import_module(path))  # as `python -m` does
    for part in name.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if callable(value) and key[0] != "_"]
            raise ArgumentValueError(
                f"{what}: expected a name in {path}, got {name!r}; its names are "
                f"{validation.listing(known, 20) or 'none'}{validation.did_you_mean(part, known)}"
            )
        found = getattr(found, part)
    return found


def module_of_file(path: str) -> ModuleType:
    """Import a file as a module. In a package it gets its full name, so that relative imports work."""
    file = Path(path).resolve()
    if not file.is_file():
        found = "a folder" if file.is_dir() else "none"
        raise ArgumentValueError(
            f"{path}: expected an existing file, found {found}; check the path."
        )
    # up to the first folder outside of any package
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    name = ".".join(parts)

    def load() -> ModuleType:
        if len(parts) > 1:
            return importlib.import_module(name)
        spec: Any = importlib.util.spec_from_file_location(name, file)
        # register before running: dataclasses and pickle look the module up by name
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return _import(path, str(folder), load)


def _import(what: str, folder: str, load: Callable[[], ModuleType]) -> ModuleType:
    # during the import, `folder` comes first on the path, for modules next to the file
    sys.path.insert(0, folder)
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise ArgumentValueError(f"{what}: the import failed: {error_text(error)}") from error
    finally:
        sys.path.remove(folder)
