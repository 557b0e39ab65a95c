"""Reductions by segments and by index, and hardsigmoid: torch's values and gradients, and all above."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import hoglib as hog
from tests.ops.checks import MODES, in_every_mix, same
from tests.rows import rows
from tests.tensors import F64, randn

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce\\(\\) is in beta")  # torch's own

DATA = torch.tensor([[1.0, 2.0], [1.0, -1.0], [3.0, 0.0], [0.0, 0.0], [2.0, 2.0]], dtype=F64)
SEGMENTS: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": torch.tensor([2, 0, 3])},
    "lengths, 32 bits": {"lengths": torch.tensor([4, 1], dtype=torch.int32)},
    "offsets": {"offsets": torch.tensor([0, 2, 2, 5])},
    "offsets inside": {"offsets": torch.tensor([1, 3, 4])},
    "lengths that leave a rest": {"lengths": torch.tensor([2, 0, 1]), "unsafe": True},
    "lengths of a batch": {"lengths": torch.tensor([[1, 1], [2, 0], [0, 2], [1, 1], [0, 2]]), "axis": 1},
    "offsets of a batch": {"offsets": torch.tensor([[0, 1, 2]] * 5), "axis": -1},
}  # fmt: skip
each_segments = rows("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
reductions = rows("reduce", ["sum", "mean", "max", "min", "prod"])
PLACES = torch.tensor([[0, 1, 0], [1, 1, 2], [2, 0, 0], [0, 0, 0], [1, 2, 3], [3, 3, 3]])
INDEX = torch.tensor([0, 1, 0, 3, 1, 0])
with_self = rows("include_self", [True, False], ids=["with self", "without self"])


def with_zeros() -> Tensor:
    x = randn(6, 3, seed=1)
    x[1, 1] = x[2, 0] = x[2, 1] = x[3, 0] = 0.0
    return x


@reductions
@each_segments
@rows("initial", [None, 0, 1.0, 1.5], ids=["none", "zero", "tied", "one and a half"])
def test_segments_have_the_values_and_gradients_of_torch(
    reduce: str, segments: Any, initial: Any
) -> None:
    ours, theirs = (
        lambda x, f=f: f(x, reduce, initial=initial, **segments)
        for f in (hog.ops.segment_reduce, torch.segment_reduce)
    )
    same(ours, theirs, DATA)


def test_products_of_segments_with_zeros_are_right_in_all_modes() -> None:
    data = randn(5, 2)
    data[0, 0] = data[2, 1] = data[3, 1] = 0.0
    hog.verify(
        lambda x: hog.ops.segment_reduce(x, "prod", initial=1.5, **SEGMENTS["lengths"]),
        data,
        orders=(1, 2, 3),
        modes=MODES,
    ).raise_if_failed()


def test_equal_extremes_share_gradients_of_either_sign() -> None:
    """torch divides only those that are greater than 0, and so has a gradient that is not linear."""
    x = torch.ones(2, dtype=F64, requires_grad=True)
    y = hog.ops.segment_reduce(x, "max", lengths=torch.tensor([2]))
    for g in (1.0, -1.0):
        (grad,) = torch.autograd.grad(y, x, torch.full((1,), g).double(), retain_graph=True)
        assert grad.tolist() == [g / 2, g / 2]


@rows("reduce", ["max", "min"])
def test_ties_have_second_derivatives_zero(reduce: str) -> None:
    def total(x: Tensor) -> Tensor:
        return hog.ops.segment_reduce(x, reduce, lengths=torch.tensor([2, 3])).sum()

    for order in (2, 3):
        assert all(d == 0 for d in in_every_mix(total, torch.ones(5, 2, dtype=F64), DATA, order))


def test_empty_segments_and_no_data() -> None:
    assert (
        hog.ops.segment_reduce(DATA[:0], "max", lengths=torch.tensor([0, 0])).eq(-torch.inf).all()
    )
    assert hog.ops.segment_reduce(DATA[:0], "prod", lengths=torch.tensor([0])).eq(1).all()
    assert hog.ops.segment_reduce(DATA[:0], "mean", lengths=torch.tensor([0])).isnan().all()
    assert hog.ops.segment_reduce(DATA[:0], "sum", lengths=torch.tensor([0, 0])).eq(0).all()
    x = DATA.clone().requires_grad_()
    y = hog.ops.segment_reduce(x, "mean", lengths=torch.tensor([0, 5]))
    assert torch.autograd.grad(y.nansum(), x)[0].isfinite().all()


@rows("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
@rows("autocast", [False, True], ids=["plain", "autocast"])
@reductions
def test_segments_of_narrow_dtypes(reduce: str, autocast: bool, dtype: torch.dtype) -> None:
    x, lengths = DATA.to(dtype), torch.tensor([2, 3])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = (
            f(x, reduce, lengths=lengths) for f in (hog.ops.segment_reduce, torch.segment_reduce)
        )
    assert_close(ours, theirs)


def test_a_nan_is_the_extreme_of_its_segment_only() -> None:
    x = DATA.clone()
    x[1, 0] = torch.nan
    for initial in (None, 5.0):
        ours, theirs = (
            f(x, "max", lengths=torch.tensor([2, 3]), initial=initial)
            for f in (hog.ops.segment_reduce, torch.segment_reduce)
        )
        assert_close(ours, theirs, equal_nan=True)


WRONG: dict[str, tuple[Tensor, str, dict[str, Any]]] = {
    "neither lengths nor offsets": (DATA, "sum", {}),
    "indices": (DATA, "sum", {"lengths": torch.tensor([5]), "indices": torch.tensor([0])}),
    "another sum": (DATA, "sum", {"lengths": torch.tensor([2, 2])}),
    "negative lengths": (DATA, "sum", {"lengths": torch.tensor([-1, 6])}),
    "lengths of a batch that is none": (DATA, "sum", {"lengths": torch.tensor([[2, 3]])}),
    "lengths for another axis": (DATA, "sum", {"lengths": torch.tensor([5]), "axis": 1}),
    "unknown reduction": (DATA, "median", {"lengths": torch.tensor([5])}),
}


@rows(("data", "reduce", "options"), WRONG.values(), ids=WRONG.keys())
def test_errors_of_segments_are_of_the_type_of_torchs(
    data: Tensor, reduce: str, options: Any
) -> None:
    with pytest.raises(RuntimeError, match=r"."):
        torch.segment_reduce(data, reduce, **options)
    with pytest.raises(RuntimeError, match="expected"):
        hog.ops.segment_reduce(data, reduce, **options)


def test_lengths_of_another_batch_are_refused() -> None:
    """torch reads beyond the end of lengths there."""
    with pytest.raises(RuntimeError, match="as in data"):
        hog.ops.segment_reduce(DATA, "sum", lengths=torch.tensor([[1, 1]]), axis=1)


@rows("dtype", [torch.int64, torch.complex64], ids=["whole", "complex"])
def test_data_that_is_not_real_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="expected a"):
        hog.ops.segment_reduce(DATA.to(dtype), "sum", lengths=torch.tensor([5]))


@with_self
@rows("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce_has_the_values_and_gradients_of_torch(
    reduce: str, include_self: bool
) -> None:
    for dim, index in ((0, PLACES), (-1, PLACES.clamp(max=2)[:4])):
        ours, theirs = (
            lambda x, s, f=f, dim=dim, index=index: f(
                x, dim, index, s, reduce, include_self=include_self
            )
            for f in (hog.ops.scatter_reduce, torch.scatter_reduce)
        )
        same(ours, theirs, randn(4, 3), with_zeros()[: len(index)])


@with_self
def test_scatter_reduce_of_an_index_smaller_than_the_source(include_self: bool) -> None:
    given = (randn(4, 3), 0, PLACES[:4, :2], with_zeros(), "prod")
    assert_close(
        hog.ops.scatter_reduce(*given, include_self=include_self),
        torch.scatter_reduce(*given, include_self=include_self),
    )


@with_self
@rows("reduce", ["prod", "mean", "amax", "amin"])
def test_index_reduce_has_the_values_and_gradients_of_torch(
    reduce: str, include_self: bool
) -> None:
    for index in (INDEX, INDEX.int()) if include_self else (INDEX,):  # torch's refuses int32 there
        ours, theirs = (
            lambda x, s, f=f, index=index: f(x, 0, index, s, reduce, include_self=include_self)
            for f in (hog.ops.index_reduce, torch.index_reduce)
        )
        same(ours, theirs, randn(4, 3), with_zeros())
    ours, theirs = (
        lambda x, s, f=f: f(x, 1, torch.tensor([2, 2]), s, reduce, include_self=include_self)
        for f in (hog.ops.index_reduce, torch.index_reduce)
    )
    same(ours, theirs, randn(4, 3), randn(4, 2, seed=2))


@with_self
def test_products_by_index_with_zeros_are_right_in_all_modes(include_self: bool) -> None:
    """To the third order with `self`; without it they are those with a factor 1 in its place."""
    for function, places in ((hog.ops.index_reduce, INDEX), (hog.ops.scatter_reduce, PLACES)):
        hog.verify(
            lambda x, s, f=function, i=places: f(x, 0, i, s, "prod", include_self=include_self),
            (randn(4, 3), with_zeros()),
            orders=(1, 2, 3) if include_self else (1, 2),
            modes=MODES,
        ).raise_if_failed()


def test_no_dimensions_and_nothing_to_scatter() -> None:
    x, zero = torch.tensor(3.0), torch.tensor(0)
    assert hog.ops.scatter_reduce(x, 0, zero, x, "prod") == 9
    assert hog.ops.index_reduce(x, 0, zero, x, "prod") == 9
    assert_close(hog.ops.scatter_reduce(DATA, 0, PLACES[:0, :2], DATA, "prod"), DATA)
    assert_close(
        hog.ops.index_reduce(DATA, 0, INDEX[:0], DATA[:0], "prod", include_self=False), DATA
    )


def test_whole_numbers_are_torchs_own() -> None:
    x = torch.arange(4)
    found = hog.ops.scatter_reduce(x, 0, torch.tensor([1, 1]), x[2:], "prod")
    assert found.tolist() == [0, 6, 2, 3]


def test_errors_by_index_are_of_the_type_of_torchs() -> None:
    x, s = randn(4, 3), randn(6, 3, seed=1)
    for given in ((x, 0, PLACES + 1, s, "prod"), (x, 0, PLACES, s[:2], "prod"), (x, 0, PLACES, s, "median"), (x, 0, PLACES, s.float(), "prod"), (x, 2, PLACES, s, "prod"), (x, 0, PLACES - 1, s, "prod")):  # fmt: skip
        with pytest.raises((RuntimeError, IndexError)) as theirs:
            torch.scatter_reduce(*given)
        with pytest.raises(type(theirs.value)):
            hog.ops.scatter_reduce(*given)
    for given in ((x, 0, PLACES, s, "prod"), (x, 0, INDEX, s[:2], "prod"), (x, 0, INDEX, s, "sum"), (x, 0, INDEX, s.float(), "prod"), (x, 0, INDEX.double(), s, "prod")):  # fmt: skip
        with pytest.raises((RuntimeError, IndexError)) as theirs:
            torch.index_reduce(*given)
        with pytest.raises(type(theirs.value), match="expected"):
            hog.ops.index_reduce(*given)


POINTS = torch.tensor([-5.0, -3.0, -2.9, 0.0, 1.0, 3.0, 4.0], dtype=F64)


@rows("dtype", [F64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hardsigmoid_has_the_values_and_gradients_of_torch(dtype: torch.dtype) -> None:
    same(hog.ops.hardsigmoid, F.hardsigmoid, POINTS.to(dtype))
    same(hog.ops.hardsigmoid, F.hardsigmoid, POINTS.to(dtype)[:0])
    same(hog.ops.hardsigmoid, F.hardsigmoid, POINTS.to(dtype)[2])


def test_hardsigmoid_in_place_is_that_of_torch() -> None:
    results = []
    for function in (hog.ops.hardsigmoid, F.hardsigmoid):
        leaf = POINTS.clone().requires_grad_()
        x = leaf * 1.5
        y = function(x, inplace=True)
        assert y is x
        results.append([y.detach(), *torch.autograd.grad((y * y.detach()).sum(), leaf)])
    assert_close(*results)


@rows("dtype", [torch.int64, torch.complex64], ids=["whole", "complex"])
def test_hardsigmoid_of_what_is_not_real_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="hardsigmoid"):
        F.hardsigmoid(torch.ones(2).to(dtype))
    with pytest.raises(RuntimeError, match="expected a"):
        hog.ops.hardsigmoid(torch.ones(2).to(dtype))
