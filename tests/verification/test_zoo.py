"""Every mistake of the zoo is found and named; its right twin raises no alarm."""

from pathlib import Path

import pytest

from tests.zoo import ZOO, table
from tests.zoo.published import PUBLISHED

# torch says so where a kernel without a formula is differentiated, which is what that exhibit shows
pytestmark = pytest.mark.filterwarnings("ignore:hoglib_zoo..cube_grad. an autograd kernel")

PAGE = Path(__file__).parents[2] / "docs/zoo.md"


def names(rows):
    return [row.name for row in rows]


@pytest.mark.parametrize("exhibit", ZOO, ids=names(ZOO))
def test_the_mistake_is_named(exhibit):
    judged = table.mistake(exhibit)
    assert judged.right, judged.texts
    # a Function that spoils the graph of its caller stops other checks too; nothing else may
    spoiled = ("modified by an inplace operation", "backward through the graph a second time")
    assert all(any(words in text for words in spoiled) for text in judged.raised), judged.raised


@pytest.mark.parametrize("exhibit", ZOO, ids=names(ZOO))
def test_the_right_twin_raises_no_alarm(exhibit):
    judged = table.twin(exhibit)
    assert judged.right, judged.texts
    assert not judged.raised
    if exhibit.verdict == "warn":
        warned = table.mistake(exhibit).named
        assert not any(text.startswith(f"warn {row}:") for row in warned for text in judged.texts)


@pytest.mark.parametrize("specimen", PUBLISHED, ids=names(PUBLISHED))
def test_published_functions_are_judged_right(specimen):
    judged = table.specimen(specimen)
    assert judged.right, judged.texts
    assert not judged.raised


def test_the_page_shows_every_row():
    # the whole table is made by `python -m tests.zoo.table`; here its rows and its sums
    page = PAGE.read_text()
    for judged in (*ZOO, *PUBLISHED):
        assert f"| {judged.name} | {judged.verdict} |" in page
    wrong = len(ZOO) + sum(s.verdict != "right" for s in PUBLISHED)
    right = len(ZOO) + sum(s.verdict == "right" for s in PUBLISHED)
    assert f"Named: {wrong} of {wrong} mistakes. False alarms: 0 of {right}." in page
    assert "MISSED" not in page
