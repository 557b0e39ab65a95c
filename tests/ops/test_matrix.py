"""Every cell of the matrix for every sample of every op, or the reason why not."""

from collections.abc import Iterator

import pytest
import torch

from hoglib import ops
from hoglib.testing.opinfo.catalogue import CATALOGUE
from hoglib.testing.opinfo.entry import Op, Sample
from tests.ops.matrix import CELLS, ONCE, Case, in_one_graph

MARKS = {"cuda": pytest.mark.gpu}


def rows() -> Iterator[object]:
    for op in CATALOGUE:
        for cell in CELLS:
            marks = [MARKS[cell]] if cell in MARKS else []
            if cell in op.skips:
                marks = [*marks, pytest.mark.skip(reason=op.skips[cell])]
            once = cell in ONCE or cell in op.skips
            for sample in op.samples[:1] if once else op.samples:
                name = f"{op.name}-{cell}" + ("" if once else f"-{sample.name}")
                yield pytest.param(op, sample, cell, id=name, marks=marks)


@pytest.mark.parametrize(("op", "sample", "cell"), list(rows()))
def test_cell(op: Op, sample: Sample, cell: str) -> None:
    if cell == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    CELLS[cell](op, sample)


@pytest.mark.slow
@pytest.mark.parametrize("theme", sorted({op.theme for op in CATALOGUE}))
def test_inductor_takes_a_theme_as_one_graph(theme: str) -> None:
    """One graph for all ops of a theme: inductor takes seconds for each graph, whatever is in it."""
    in_one_graph(
        [
            Case(op, op.samples[0])
            for op in CATALOGUE
            if op.theme == theme and "compile" not in op.skips
        ],
        "inductor",
    )


@pytest.mark.parametrize("op", CATALOGUE, ids=lambda op: op.name)
def test_a_skip_names_a_cell_and_gives_its_reason(op: Op) -> None:
    assert set(op.skips) <= set(CELLS)
    assert all(len(reason.split()) > 3 for reason in op.skips.values())


def test_every_op_is_in_the_catalogue() -> None:
    makers = {"define", "external", "remat"}  # they make ops
    known = {op.function.__name__ for op in CATALOGUE}
    assert set(ops.__all__) - makers <= known


def test_names_are_distinct() -> None:
    names = [op.name for op in CATALOGUE]
    assert len(set(names)) == len(names)
