"""Tests of tables of what is refused: a row is a call, the error that it raises, and words of the message."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.rows import rows

Row = tuple[Any, type[BaseException], str]


def refused(
    table: Mapping[str, Row],
    run: Callable[[Any], Any] = lambda call: call(),
    by: type[BaseException] = BaseException,
) -> Callable[..., None]:
    """A test that the call of each row, or what `run` makes of it, raises the error.

    by: A class that the error is besides, such as HoglibError.
    """

    @rows(("call", "error", "words"), table.values(), ids=table)
    def test(call: Any, error: type[BaseException], words: str) -> None:
        with pytest.raises(error, match=words) as caught:
            run(call)
        assert isinstance(caught.value, by)

    return test
