"""The public errors: each is also a built-in error, and is listed where users look for it."""

import inspect
import re
from pathlib import Path

import pytest

from hoglib import errors

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
CHILDREN = [name for name in errors.__all__ if name != "HoglibError"]


def also(cls):
    """The built-in errors that a class is, but for those that every error is."""
    return {
        c.__name__ for c in cls.__mro__ if c.__module__ == "builtins" and issubclass(c, Exception)
    } - {"Exception"}


def test_all_lists_every_class():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes == set(errors.__all__)


@pytest.mark.parametrize("name", CHILDREN)
def test_each_is_a_hoglib_error_and_a_built_in_one(name):
    cls = getattr(errors, name)
    assert issubclass(cls, errors.HoglibError)
    assert also(cls)


@pytest.mark.parametrize("name", CHILDREN)
def test_module_docstring_class_docstring_and_page_say_what_else_it_is(name):
    cls = getattr(errors, name)
    first = cls.__bases__[-1].__name__
    page = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE.read_text(), re.M))
    overview = dict(re.findall(r"^    (\w+) {2,}(.*)$", inspect.cleandoc(errors.__doc__), re.M))
    assert first in cls.__doc__
    for named in (page[name], overview[name]):
        words = set(re.findall(r"\w+Error", named))
        assert first in words
        assert words <= also(cls) | set(CHILDREN)


def test_the_page_lists_nothing_else():
    listed = re.findall(r"^\| `(\w+)` \| `", PAGE.read_text(), re.M)
    assert set(listed) == set(CHILDREN)
