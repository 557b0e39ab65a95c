"""Tests of tables of what is refused: a row is a call, the error that it raises, and words of the message."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

Row = tuple[Callable[..., Any], type[BaseException], str]


def refused(table: Mapping[str, Row], given: Callable[[], Any] = tuple) -> Callable[..., None]:
    """A test with a case for each row, whose call is made with what `given` returns."""

    @pytest.mark.parametrize(("call", "error", "words"), table.values(), ids=table)
    def test(call: Callable[..., Any], error: type[BaseException], words: str) -> None:
        arguments = given()
        with pytest.raises(error, match=words):
            call(*arguments)

    return test
