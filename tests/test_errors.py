"""The public errors: each is also a built-in error, as its docstring says; and the page of torch's errors."""

import inspect
import mmap
import re
from pathlib import Path

import pytest
import torch

from hoglib import errors
from hoglib._core.torch_api.torch_version import TORCH_VERSION

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
def test_its_docstring_and_that_of_the_module_say_what_else_it_is(name):
    cls = getattr(errors, name)
    first = cls.__bases__[-1].__name__
    overview = dict(re.findall(r"^    (\w+) {2,}(.*)$", inspect.cleandoc(errors.__doc__), re.M))
    assert first in cls.__doc__
    words = set(re.findall(r"\w+Error", overview[name]))
    assert first in words
    assert words <= also(cls) | set(CHILDREN)


# Quoted messages that torch 2.11 does not have, and the release that the page is of.
SINCE = {"An input that has been returned as-is as output": (2, 13)}


def test_torch_still_says_what_the_page_of_its_errors_quotes():
    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    cells = re.findall(r"^\| (.*?) \|", page.split("## No error")[0], re.M)
    cells += re.findall(r"^\| warning (.*?) \|", page, re.M)
    quoted = [text for cell in cells for text in re.findall(r"`(.+?)`", cell)]
    assert len(quoted) > 60
    quoted = [text for text in quoted if SINCE.get(text, (0, 0)) <= TORCH_VERSION]
    torchs = Path(torch.__file__).parent
    folders = ("autograd", "_functorch", "_dynamo", "_library", "utils")
    files = [*torchs.glob("_*.py"), *(f for name in folders for f in (torchs / name).rglob("*.py"))]
    # a message is often written as strings on several lines
    code = "".join(re.sub(r'"\s*[bfr]*"', "", file.read_text()) for file in files)
    missing = [text for text in quoted if text not in code]
    libraries = [file for file in (torchs / "lib").glob("*.*") if file.is_file()]
    for library in sorted(libraries, key=lambda file: file.stat().st_size):
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as all_of,
        ):
            missing = [text for text in missing if all_of.find(text.encode()) < 0]
    assert not missing
