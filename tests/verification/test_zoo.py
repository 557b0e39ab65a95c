"""Every mistake of the zoo is found and named; its right twin raises no alarm, nor do right Functions of
many kinds: none fails, no derivative is doubted, and no entry point warns of one."""

import re
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

import hoglib as hog
from hoglib._core.torch_api import pytree
from hoglib.verification.entry_points import examined_functions
from tests.rows import as_in_a_new_process
from tests.zoo import ZOO, table
from tests.zoo.published import PUBLISHED
from tests.zoo.right import RIGHT

# torch says so where a kernel without a formula is differentiated, which is what that exhibit shows
pytestmark = pytest.mark.filterwarnings("ignore:hoglib_zoo..cube_grad. an autograd kernel")

PAGE = Path(__file__).parents[2] / "docs/zoo.md"


def names(rows):
    return [row.name for row in rows]


@pytest.mark.parametrize("exhibit", ZOO, ids=names(ZOO))
def test_the_mistake_is_named_and_its_right_twin_raises_no_alarm(exhibit):
    judged, twin = table.mistake(exhibit), twin_of(exhibit.right)
    assert judged.right, judged.texts
    # a Function that spoils the graph of its caller stops other checks too; nothing else may
    spoiled = ("modified by an inplace operation", "backward through the graph a second time")
    assert all(any(words in text for words in spoiled) for text in judged.raised), judged.raised
    assert twin.right, twin.texts
    assert not twin.raised
    if exhibit.verdict == "warn":
        assert not any(
            text.startswith(f"warn {row}:") for row in judged.named for text in twin.texts
        )


@cache
def twin_of(right):
    """The verdict on a right Function, which is the twin of several mistakes, at the same inputs."""
    return table.twin(next(e for e in ZOO if e.right is right))


@pytest.mark.parametrize("specimen", PUBLISHED, ids=names(PUBLISHED))
def test_published_functions_are_judged_right(specimen):
    judged = table.specimen(specimen)
    assert judged.right, judged.texts
    assert not judged.raised


def test_the_page_shows_every_row():
    # the whole table is made by `python -m tests.zoo.table`; here its rows and its sums
    page = PAGE.read_text()
    for judged in (*ZOO, *(s for s in PUBLISHED if s.verdict != "right")):
        name = judged.name + " (warn)" * (judged.verdict == "warn")
        assert re.search(rf"(\| |; |: ){re.escape(name)}( \||;|\.\n)", page), name
    wrong = len(ZOO) + sum(s.verdict != "right" for s in PUBLISHED)
    right = len(ZOO) + sum(s.verdict == "right" for s in PUBLISHED)
    assert f"Named: {wrong} of {wrong} mistakes. False alarms: 0 of {right}." in page
    assert "MISSED" not in page


@pytest.mark.parametrize("one", RIGHT, ids=names(RIGHT))
def test_it_is_right_and_no_entry_point_warns_of_it(one):
    report = hog.verify(one.function, one.inputs(), **one.options)
    doubts = [row for row in report.warnings if " derivative: " in row.name or row.name == "finite"]
    assert not report.failed, report
    assert not doubts, report
    assert report.judged
    assert warned_of(one) == []


def warned_of(one):
    as_in_a_new_process()
    leaves, structure = pytree.flatten(one.inputs())
    asked = any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
    leaves = [
        x.detach().contiguous().requires_grad_() if pytree.is_float(x) and not asked else x
        for x in leaves
    ]
    apply = one.function.apply if isinstance(one.function, type) else one.function
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with examined_functions("hvp"):
            outputs = pytree.leaves(apply(*pytree.unflatten(leaves, structure)))
            live = [y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad]
            by = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            torch.autograd.grad(
                live, by, list(map(torch.ones_like, live)), create_graph=True, allow_unused=True
            )
    return [str(w.message) for w in found]
