"""What `make size` counts."""

from tests.size import lines_of_code

TEXT = '''"""A module
of three lines of code, and of a statement of two."""

import os  # counts


def f():
    """Does not count."""
    # neither does this
    return """a string that
that begins on one line"""
'''


def test_docstrings_comments_and_empty_lines_do_not_count():
    assert lines_of_code(TEXT) == 3
