"""Finds what a command is to judge: the objects of a module or a file."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hoglib._core.source_location import error_text
from hoglib.errors import ArgumentValueError


def object_of(target: str, what: str) -> Any:
    """The object that package.module:name or path/to/file.py:name stands for."""
    path, _, name = target.partition(":")
    if not name:
        raise ArgumentValueError(f"{what}: expected package.module:name, got {target!r}.")
    found: Any = module_of_file(path) if path.endswith(".py") else module_of(path)
    for part in name.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if callable(value) and key[0] != "_"]
            raise ArgumentValueError(
                f"{what}: expected a name in {path}, got {name!r}; there are "
                f"{', '.join(known) or 'none'}."
            )
        found = getattr(found, part)
    return found


def module_of(name: str) -> ModuleType:
    sys.path.insert(0, "")  # as `python -m` has it
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ArgumentValueError(
            f"{name}: it could not be imported: {error_text(error)}"
        ) from error
    finally:
        sys.path.remove("")


def module_of_file(path: str) -> ModuleType:
    """A file as a module; one inside a package by its full name, so that its own imports work."""
    file = Path(path).resolve()
    if not file.is_file():
        raise ArgumentValueError(f"{path}: expected a file, there is none.")
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
        raise ArgumentValueError(
            f"{path}: it could not be imported: {error_text(error)}"
        ) from error
    finally:
        sys.path.remove(str(folder))
