"""Docstrings of public names: sections that tools can parse, every argument described, and an example that
runs."""

import doctest
import importlib
import inspect
import re
from dataclasses import is_dataclass

import pytest
import torch
from docstring_parser import DocstringStyle, parse
from torch import nn
from torch.nn import functional as F

import hoglib as hog
from tests.rows import each, rows
from tests.test_site import PUBLIC

SECTIONS = ("Args", "Returns", "Yields", "Raises", "Shape", "References", "Example", "Attributes")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _objects():
    """Every public function and class, by its name; one that several modules export stands here once."""
    found = {}
    for module in PUBLIC:
        module_object = importlib.import_module(module)
        for name in module_object.__all__:
            value = getattr(module_object, name)
            home = getattr(value, "__module__", "") or ""
            is_class = inspect.isclass(value)
            if not (home.startswith("hoglib") and (is_class or inspect.isfunction(value))):
                continue
            if not (is_class and issubclass(value, Exception)):
                found.setdefault(value, f"{module}.{name}")
    return {name: value for value, name in found.items()}


OBJECTS = _objects()
MODULES = {}
for _name in OBJECTS:
    MODULES.setdefault(_name.rpartition(".")[0], []).append(_name)


def _methods(cls):
    for name, value in vars(cls).items():
        if name.startswith("_") or _is_lightning_hook(cls, name):
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function):
            yield name, function


def _is_lightning_hook(cls, name):
    """Whether Lightning calls the method, and documents its arguments."""
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("lightning.")]
    return any(name in vars(base) for base in bases)


def _arguments(function):
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.name not in ("self", "cls")]


def _described(doc):
    """The names in an Args section; one line may describe several, `a, b: ...`."""
    names = set()
    for parameter in parse(doc, style=DocstringStyle.GOOGLE).params:
        if parameter.args[0] == "param":
            names |= {name.strip().lstrip("*") for name in parameter.arg_name.split(",")}
    return names


def _check_arguments(label, function, doc):
    missing = [name for name in _arguments(function) if name not in _described(doc)]
    assert not missing, f"{label}: not described in Args: {', '.join(missing)}"


@rows("name", OBJECTS)
def test_each_argument_is_described(name):
    value = OBJECTS[name]
    doc = inspect.cleandoc(value.__doc__)
    if inspect.isclass(value):
        own_constructor = "__init__" in vars(value) or "__new__" in vars(value)
        is_result = issubclass(value, tuple) or is_dataclass(value)  # users read it, not make it
        if own_constructor and not is_result:
            _check_arguments(name, value, doc)
        for method, function in _methods(value):
            assert function.__doc__, f"{name}.{method}: no docstring"
            if _arguments(function):
                _check_arguments(f"{name}.{method}", function, inspect.cleandoc(function.__doc__))
    else:
        _check_arguments(name, value, doc)
        assert re.search(r"^(Returns|Yields):", doc, re.M), f"{name}: no Returns"


@rows("name", OBJECTS)
def test_headings_are_those_that_tools_know(name):
    headings = re.findall(r"^([A-Z][a-z]+):\s*$", inspect.cleandoc(OBJECTS[name].__doc__), re.M)
    assert set(headings) <= set(SECTIONS)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's, on torch 2.13
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")  # Lightning's advice
@pytest.mark.parametrize("module", MODULES)
def test_the_examples_run(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for what an example writes
    each([(name, {"name": name}) for name in MODULES[module]], run_example)


def run_example(name):
    value = OBJECTS[name]
    if inspect.isclass(value) and issubclass(value, tuple):
        return  # a result, which the example of what returns it shows
    doc = inspect.cleandoc(value.__doc__)
    assert re.search(r"^Example:\s*$", doc, re.M), f"{name}: no Example"
    torch.manual_seed(0)
    names = {"torch": torch, "nn": nn, "F": F, "hog": hog}
    test = doctest.DocTestParser().get_doctest(doc, names, name, None, None)
    assert test.examples, f"{name}: an Example without >>> lines"
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
