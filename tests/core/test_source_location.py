"""Lines of the user's code: in warnings, in errors, and around torch calls."""

import os
import sys

import pytest
import torch
from torch import nn

import hoglib as hog
from hoglib._core.runtime import source_location
from hoglib._core.runtime.source_location import SourceLine


def here():
    frame = sys._getframe(1)
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


def test_a_line_shows_its_source_and_a_relative_path():
    line = here()
    path = os.path.relpath(__file__)
    assert (
        str(line)
        == f"{path if not path.startswith('..') else __file__}:{line.line}: `line = here()`"
    )
    assert str(SourceLine("<string>", 3)) == "<string>:3"


@pytest.mark.parametrize(
    ("file", "user_file", "user_code"),
    [
        (__file__, True, True),
        (torch.__file__, False, False),
        (hog.__file__, False, False),
        (nn.functional.__file__, False, False),
        (hog.ops.__file__, False, True),  # its Functions are verified as a user's are
        (os.__file__, True, False),
        ("<string>", False, True),
    ],
)
def test_which_files_are_the_users(file, user_file, user_code):
    assert source_location.is_user_file(file) == user_file
    assert source_location.is_user_code(file) == user_code


def test_an_error_has_the_line_that_raised_it():
    def fails():
        return nn.Linear(2, 3)(torch.ones(4))

    with pytest.raises(RuntimeError) as caught:
        fails()
    line = source_location.error_line(caught.value)
    assert line.source == "return nn.Linear(2, 3)(torch.ones(4))"
    assert str(line) in source_location.format_error(caught.value)
    assert source_location.format_error(ValueError("no traceback. ")) == "ValueError: no traceback"
