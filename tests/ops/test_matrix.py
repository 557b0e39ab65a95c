"""Every cell of the matrix for every sample of every op, but those for which its entry says why not."""

import itertools
from collections.abc import Iterator

import pytest

from hoglib import ops
from tests.long_tail import FULL, all_but
from tests.ops.matrix import CELLS, ONCE, Case, in_one_graph
from tests.ops.opinfo import CATALOGUE, OpInfo, SampleInput

# What each sample of an op goes through in `make test`; the other cells get the first one. That ops
# are compiled is tested with all ops of a theme in one graph.
EVERY_SAMPLE = (
    "first derivative", "second derivative", "third derivative", "forward mode",
    "forward over forward", "batched gradients", "func vmap", "non-contiguous", "complex", "plain operations",
)  # fmt: skip
MARKS = {"cuda": pytest.mark.gpu}


def rows() -> Iterator[object]:
    for info in CATALOGUE:
        for cell in CELLS:
            if cell in info.skips:
                continue
            marks = [MARKS[cell]] if cell in MARKS else []
            once = cell in ONCE
            for i, sample in enumerate(info.samples[:1] if once else info.samples):
                name = f"{info.name}-{cell}" + ("" if once else f"-{sample.name}")
                tail = [FULL] if cell == "compile" or (i and cell not in EVERY_SAMPLE) else []
                yield pytest.param(info, sample, cell, id=name, marks=[*marks, *tail])


@pytest.mark.parametrize(("info", "sample", "cell"), list(rows()))
def test_cell(info: OpInfo, sample: SampleInput, cell: str) -> None:
    CELLS[cell](info, sample)


THEMES = sorted({info.theme for info in CATALOGUE})
GRAPHS = itertools.product(THEMES, ["aot_eager", "inductor"])
# What inductor gets are torch's own operations, whatever the theme: two themes show that it takes them.
BY_INDUCTOR = ("pointwise", "reduce")


@pytest.mark.parametrize(
    ("theme", "backend"),
    all_but(lambda theme, backend: (theme in BY_INDUCTOR) == (backend == "inductor"), GRAPHS),
)
def test_a_theme_is_one_graph(theme: str, backend: str) -> None:
    """One graph for all ops of a theme: inductor takes seconds for each graph, whatever is in it."""
    in_one_graph(
        [
            Case(info, info.samples[0])
            for info in CATALOGUE
            if info.theme == theme and "compile" not in info.skips
        ],
        backend,
    )


@pytest.mark.parametrize("info", CATALOGUE, ids=lambda info: info.name)
def test_a_skip_names_a_cell_and_gives_its_reason(info: OpInfo) -> None:
    assert set(info.skips) <= set(CELLS)
    assert all(len(reason.split()) > 3 for reason in info.skips.values())


def test_every_op_is_in_the_catalogue() -> None:
    others = {
        "define",
        "external",
        "remat",
        "attention_dropout_mask",
    }  # make ops, or a boolean mask
    known = {info.op.__name__ for info in CATALOGUE}
    assert set(ops.__all__) - others <= known


def test_names_are_distinct() -> None:
    names = [info.name for info in CATALOGUE]
    assert len(set(names)) == len(names)
