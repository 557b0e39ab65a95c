"""embedding_bag: torch's values and gradients, and every derivative above."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import hoglib as hog
from tests.ops.checks import REPLACES, in_every_mix, refused_as_by_torch, same
from tests.rows import rows

F64 = torch.float64
INDICES = torch.tensor([2, 0, 1, 3, 0, 1])
OFFSETS = torch.tensor([0, 3, 3, 5])
ROWS = INDICES.reshape(2, 3)

OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "default": {},
    "max": {"mode": "max"},
    "sum with padding": {"mode": "sum", "padding_idx": 0},
    "mean with padding": {"mode": "mean", "padding_idx": -4},
    "max with padding": {"mode": "max", "padding_idx": 1},
}
each_option = rows("options", OPTIONS.values(), ids=OPTIONS.keys())
BAGS: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "rows": (ROWS, {}),
    "one long row": (INDICES[None], {}),
    "offsets": (INDICES, {"offsets": OFFSETS}),
    "offsets, 32 bits": (INDICES.int(), {"offsets": OFFSETS.int()}),
    "last offset": (INDICES, {"offsets": torch.tensor([0, 2, 6]), "include_last_offset": True}),
    "empty bags": (INDICES, {"offsets": torch.tensor([0, 0, 6, 6])}),
    "no entries": (INDICES[:0], {"offsets": torch.tensor([0, 0])}),
    "no bags": (ROWS[:0], {}),
    "only padding": (torch.tensor([[0, 0], [1, 1]]), {}),
}
each_bags = rows(("input", "bags"), BAGS.values(), ids=BAGS.keys())


BOTH = hog.ops.embedding_bag, F.embedding_bag


def table(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(
        *(shape or (4, 3)), dtype=F64, generator=torch.Generator().manual_seed(1)
    ).to(dtype)


@each_option
@each_bags
def test_values_and_gradients_are_those_of_torch(input: Tensor, bags: Any, options: Any) -> None:
    ours, theirs = (lambda w, f=f: f(input, w, **bags, **options) for f in BOTH)
    same(ours, theirs, table())


@each_bags
@rows("padding_idx", [None, 0])
def test_weighted_sums_are_those_of_torch(
    input: Tensor, bags: Any, padding_idx: int | None
) -> None:
    options = {"mode": "sum", "padding_idx": padding_idx, **bags}
    ours, theirs = (lambda w, s, f=f: f(input, w, per_sample_weights=s, **options) for f in BOTH)
    same(ours, theirs, table(), table(*input.shape))


@rows(("input", "offsets"), [(ROWS, None), (INDICES, OFFSETS)], ids=["rows", "offsets"])
def test_of_equal_maxima_the_first_has_the_gradient(input: Tensor, offsets: Any) -> None:
    ours, theirs = (lambda w, f=f: f(input, w, offsets, mode="max") for f in BOTH)
    same(ours, theirs, torch.ones(4, 3, dtype=F64))


def test_a_last_offset_before_the_end_ends_the_last_bag() -> None:
    """torch divides by the number of all entries there, those behind the end too."""
    w = table()
    y = hog.ops.embedding_bag(INDICES, w, torch.tensor([0, 2]), include_last_offset=True)
    assert_close(y, w[INDICES[:2]].mean(0, keepdim=True))


@rows("mode", ["sum", "mean", "max"])
def test_empty_bags_have_derivatives_zero(mode: str) -> None:
    def total(w: Tensor) -> Tensor:
        return hog.ops.embedding_bag(INDICES[:0], w, torch.tensor([0, 0]), mode=mode).exp().sum()

    for order in (1, 2, 3):
        assert all(d == 0 for d in in_every_mix(total, table(), table() + 1, order))


@rows("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["half", "bfloat16", "float32"])
@rows("autocast", [False, True], ids=["plain", "autocast"])
@rows("mode", ["sum", "mean", "max"])
@rows("name", ["rows", "offsets"])
def test_narrow_dtypes(name: str, mode: str, autocast: bool, dtype: torch.dtype) -> None:
    (input, bags), w = BAGS[name], table(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = (f(input, w, mode=mode, **bags) for f in BOTH)
    assert_close(ours, theirs)


def test_many_ones_in_half_precision_are_summed_in_float32() -> None:
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    y = hog.ops.embedding_bag(
        torch.zeros(1024, dtype=torch.long), ones, torch.tensor([0]), mode="sum"
    )
    assert (y == 1024).all()


def test_rows_are_scaled_down_to_max_norm_in_the_table() -> None:
    ours, theirs = 10 * table(), 10 * table()
    before = ours.clone()
    y = hog.ops.embedding_bag(ROWS[:1, :2], ours, max_norm=1.0)
    assert_close(y, F.embedding_bag(ROWS[:1, :2], theirs, max_norm=1.0))
    assert_close(ours, theirs)
    assert torch.equal(ours[1], before[1])
    assert not torch.equal(ours[0], before[0])


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a vector for a table": ((ROWS, torch.ones(3)), {}),
    "offsets of rows": ((ROWS, table(), OFFSETS), {}),
    "no offsets": ((INDICES, table()), {}),
    "offsets of two dimensions": ((INDICES, table(), OFFSETS[None]), {}),
    "three dimensions": ((ROWS[None], table()), {}),
    "unknown mode": ((ROWS, table()), {"mode": "median"}),
    "scales of another shape": ((ROWS, table()), {"mode": "sum", "per_sample_weights": table(2, 2)}),
    "scales of another dtype": ((ROWS, table()), {"mode": "sum", "per_sample_weights": table(2, 3).float()}),
    "scales of a mean": ((ROWS, table()), {"per_sample_weights": table(2, 3)}),
    "padding that is no row": ((ROWS, table()), {"padding_idx": 4}),
    "integers for a table": ((ROWS, table().long()), {}),
    "complex numbers": ((ROWS, table() * 1j), {}),
    "no indices": ((ROWS.double(), table()), {}),
}  # fmt: skip


test_errors_are_of_the_type_of_torchs = refused_as_by_torch(*BOTH, WRONG, "expected")


@rows("option", ["sparse", "scale_grad_by_freq"])
def test_gradients_that_cannot_be_differentiated_are_refused(option: str) -> None:
    with pytest.raises(NotImplementedError, match=option):
        hog.ops.embedding_bag(ROWS, table(), **{option: True})


def test_an_index_beyond_the_table_raises() -> None:
    with pytest.raises(IndexError, match="out of range"):
        hog.ops.embedding_bag(ROWS + 2, table())


@rows("mode", [0, 1, 2], ids=["sum", "mean", "max"])
def test_the_adapter_returns_what_torchs_operation_does(mode: int) -> None:
    given = (table(), INDICES, OFFSETS, False, mode, False, None, False, 0)
    ours, theirs = (REPLACES[torch.embedding_bag](*given), torch.embedding_bag(*given))
    assert_close(ours[0], theirs[0])
    assert_close(ours[1][INDICES != 0], theirs[1][INDICES != 0])
    if mode:
        assert_close(ours[2], theirs[2])
    if mode == 2:
        assert_close(ours[3][theirs[2] > 0], theirs[3][theirs[2] > 0])
    assert REPLACES[F.embedding_bag] is hog.ops.embedding_bag
