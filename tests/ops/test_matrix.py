"""Every cell of the matrix for every op, but those for which its entry says why not."""

import itertools
from collections.abc import Callable

import pytest

from hoglib import ops
from tests.device import simulation
from tests.long_tail import FULL, all_but
from tests.ops.matrix import CELLS, ONCE, Case, in_one_graph
from tests.ops.opinfo import CATALOGUE, OpInfo
from tests.rows import each, rows

# What each sample of an op goes through in `make test`; the other cells get the first one. That ops
# are compiled is tested with all ops of a theme in one graph.
EVERY_SAMPLE = (
    "first derivative", "second derivative", "third derivative", "forward over forward", "func vmap",
    "non-contiguous", "complex", "plain operations",
)  # fmt: skip
PROPERTIES = {
    "first order": ("first derivative", "func vjp", "func jvp", "subsets of inputs", "undefined gradients"),
    "second order": ("second derivative", "func hessian", "reverse over forward", "forward over forward", "hvp"),
    "third order": ("third derivative",),
    "vmap": ("func vmap",),
    "layouts and shapes": ("non-contiguous", "transposed", "stride 0", "zero size", "no dimensions", "broadcasting"),
    "dtypes": ("float32", "bfloat16", "complex"),
    "calls": ("plain operations", "nothing changed in place", "deterministic"),
}  # fmt: skip


def in_cells(info: OpInfo, cells: tuple[str, ...], wanted: Callable[[str, int], bool]) -> None:
    """The wanted ones of the cells and the numbers of samples of an op."""
    each(
        [
            (f"{cell}, {sample.name}", {"cell": cell, "sample": sample})
            for cell in cells
            for i, sample in enumerate(info.samples[:1] if cell in ONCE else info.samples)
            if cell not in info.skips and wanted(cell, i)
        ],
        lambda cell, sample: CELLS[cell](info, sample),
    )


def in_make_test(cell: str, i: int) -> bool:
    return cell != "compile" and (not i or cell in EVERY_SAMPLE)


@pytest.mark.parametrize(
    ("info", "cells"),
    [
        pytest.param(info, cells, id=f"{info.name}-{name}")
        for info in CATALOGUE
        for name, cells in PROPERTIES.items()
        if set(cells) - info.skips.keys()
    ],
)
def test_a_property(info: OpInfo, cells: tuple[str, ...]) -> None:
    in_cells(info, cells, in_make_test)


@pytest.mark.parametrize("info", CATALOGUE, ids=lambda info: info.name)
@FULL
def test_every_other_sample(info: OpInfo) -> None:
    cells = tuple(cell for cell in CELLS if cell != "cuda")
    in_cells(info, cells, lambda cell, i: not in_make_test(cell, i))


@rows("info", CATALOGUE, ids=[info.name for info in CATALOGUE])
@pytest.mark.gpu
def test_on_a_gpu(info: OpInfo) -> None:
    if simulation.C is not None and info.name == "sparse_mm":
        return  # the simulated GPU has no sparse tensors
    in_cells(info, ("cuda",), lambda cell, i: True)


def test_every_cell_is_of_a_property() -> None:
    shown = [cell for cells in PROPERTIES.values() for cell in cells]
    assert sorted([*shown, "compile", "cuda"]) == sorted(CELLS)


THEMES = sorted({info.theme for info in CATALOGUE})
GRAPHS = itertools.product(THEMES, ["eager", "aot_eager", "inductor"])
# What runs behind Dynamo gets torch's own operations, whatever the theme; where they are many, it takes seconds.
MANY = ("missing", "wrong")


@pytest.mark.parametrize(
    ("theme", "backend"),
    all_but(lambda theme, backend: backend == ("eager" if theme in MANY else "aot_eager"), GRAPHS),
)
def test_a_theme_is_one_graph(theme: str, backend: str) -> None:
    """One graph for all ops of a theme: compilers take seconds for each graph, whatever is in it."""
    in_one_graph(
        [
            Case(info, info.samples[0])
            for info in CATALOGUE
            if info.theme == theme and "compile" not in info.skips
        ],
        backend,
    )


@rows("info", CATALOGUE, ids=[info.name for info in CATALOGUE])
def test_a_skip_names_a_cell_and_gives_its_reason(info: OpInfo) -> None:
    assert set(info.skips) <= set(CELLS)
    assert all(len(reason.split()) > 3 for reason in info.skips.values())


def test_every_op_is_in_the_catalogue() -> None:
    # Make ops, or a boolean mask
    others = {"define", "external", "remat", "attention_dropout_mask"}
    known = {info.op.__name__ for info in CATALOGUE}
    assert set(ops.__all__) - others <= known


def test_names_are_distinct() -> None:
    names = [info.name for info in CATALOGUE]
    assert len(set(names)) == len(names)
