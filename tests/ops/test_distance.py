"""cdist, pdist and pairwise_distance: torch's values and gradients, and every derivative above."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import hoglib as hog
from tests.ops.checks import in_every_mix, refused_as_by_torch, same
from tests.rows import rows
from tests.tensors import F64, randn

INFINITY = float("inf")
POWERS = {
    "counts": 0.0, "half powers": 0.5, "sums": 1.0, "powers of one and a half": 1.5, "Euclidean": 2.0,
    "powers of two and a half": 2.5, "cubes": 3.0, "fourth powers": 4.0, "maxima": INFINITY,
}  # fmt: skip
each_power = rows("p", POWERS.values(), ids=POWERS.keys())
modes = ["use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"]
by = rows("mode", modes, ids=["products", "differences"])
ROWS = {
    "matrices": ((4, 3), (5, 3)),
    "one entry": ((4, 1), (5, 1)),
    "many rows": ((30, 3), (5, 3)),
    "batches": ((2, 4, 3), (2, 5, 3)),
    "broadcast batches": ((2, 1, 4, 3), (3, 5, 3)),
    "no rows": ((0, 3), (5, 3)),
    "no batches": ((0, 4, 3), (0, 5, 3)),
}


@each_power
@rows("shapes", ROWS.values(), ids=ROWS.keys())
def test_cdist_has_the_values_and_gradients_of_torch(p: float, shapes: Any) -> None:
    x, y = (randn(*shape, seed=i) for i, shape in enumerate(shapes))
    same(lambda a, b: hog.ops.cdist(a, b, p), lambda a, b: torch.cdist(a, b, p), x, y)


@each_power
@rows("shape", [(5, 3), (1, 3), (2, 1)], ids=["matrix", "one row", "one entry"])
def test_pdist_has_the_values_and_gradients_of_torch(p: float, shape: tuple[int, int]) -> None:
    same(lambda x: hog.ops.pdist(x, p), lambda x: F.pdist(x, p), randn(*shape))


@each_power
@rows("keepdim", [False, True], ids=["dropped", "kept"])
@rows("shapes", [((4, 3), (4, 3)), ((2, 1, 3), (4, 3)), ((3,), (3,))], ids=["matrices", "broadcast", "vectors"])  # fmt: skip
def test_pairwise_distance_has_the_values_and_gradients_of_torch(
    p: float, keepdim: bool, shapes: Any
) -> None:
    x, y = (randn(*shape, seed=i) for i, shape in enumerate(shapes))
    if p == 0:  # torch's has no gradient at all
        assert_close(hog.ops.pairwise_distance(x, y, 0.0), F.pairwise_distance(x, y, 0.0))
        return
    same(
        lambda a, b: hog.ops.pairwise_distance(a, b, p, 1e-3, keepdim),
        lambda a, b: F.pairwise_distance(a, b, p, 1e-3, keepdim),
        x,
        y,
    )


def test_negative_powers_are_torchs_own() -> None:
    x, y = randn(4, 3), randn(4, 3, seed=1)
    same(
        lambda a, b: hog.ops.pairwise_distance(a, b, -1.0),
        lambda a, b: F.pairwise_distance(a, b, -1.0),
        x,
        y,
    )


@each_power
@by
def test_ties_zeros_and_equal_rows_have_the_gradients_of_torch(p: float, mode: str) -> None:
    x = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 2.0]], dtype=F64)
    y = torch.tensor([[0.0, 0.0, 0.0], [2.0, -2.0, 1.0]], dtype=F64)
    same(lambda a, b: hog.ops.cdist(a, b, p, mode), lambda a, b: torch.cdist(a, b, p, mode), x, y)
    same(lambda a: hog.ops.pdist(a, p), lambda a: F.pdist(a, p), x)


# of a distance that is not squared, second derivatives at 0 do not exist, and are told
@pytest.mark.filterwarnings("ignore:second derivatives:UserWarning")
@each_power
@rows("order", [1, 2, 3])
def test_distance_zero_has_derivatives_zero(p: float, order: int) -> None:
    x, v = torch.ones(2, 3, dtype=F64), randn(2, 3, seed=2)
    here = x.clone()
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda t: hog.ops.cdist(t, here, p).sum(),
        lambda t: hog.ops.pdist(t, p).sum(),
        lambda t: hog.ops.pairwise_distance(t, here, p, 0.0).sum(),
    ]
    if p == 2:
        other = "donot_use_mm_for_euclid_dist"
        functions.append(lambda t: hog.ops.cdist(t, here, p, other).sum())
    for function in functions:
        for derivative in in_every_mix(function, x, v, order):
            assert derivative == 0


@pytest.mark.filterwarnings("ignore:second derivatives:UserWarning")
@by
def test_one_pair_at_distance_zero_leaves_the_others_right(mode: str) -> None:
    """The second derivative of |x - y| along v is (|v|^2 - (u v)^2) / |x - y|, u its unit vector."""
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=F64)
    v = torch.tensor([[1.0, 2.0], [1.0, 0.0]], dtype=F64)
    y = torch.zeros(1, 2, dtype=F64)
    for derivative in in_every_mix(lambda t: hog.ops.cdist(t, y, 2.0, mode).sum(), x, v, 2):
        assert_close(derivative, torch.tensor((1 - 0.6**2) / 5, dtype=F64))


def test_values_of_near_points_are_exact_where_torch_loses_them() -> None:
    x = randn(30, 3) * 1e-4 + 100
    narrow = x.float()
    right = torch.cdist(narrow.double(), narrow.double(), 2.0, "donot_use_mm_for_euclid_dist")
    assert (torch.cdist(narrow, narrow).double() - right).abs().max() > 1e-2
    assert_close(hog.ops.cdist(narrow, narrow).double(), right, rtol=1e-6, atol=0.0)


def test_gradients_far_from_the_origin_keep_their_digits() -> None:
    """By products of the rows as they come, all digits would be lost."""
    x = (randn(30, 3) * 1e-3 + 100).float()
    grads = [
        torch.autograd.grad(hog.ops.cdist(t, t.detach()).sum(), t)[0].double()
        for t in (x.clone().requires_grad_(), x.double().requires_grad_())
    ]
    assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-3)


def test_differences_are_exact_for_rows_that_nearly_coincide() -> None:
    x = torch.cat([randn(40, 3), torch.full((1, 3), 2.0)]).float()
    y = x[-1:] + torch.tensor([3e-6, -2e-6, 1e-6])
    gaps = (x[-1:].double() - y.double())[0]
    t = x.clone().requires_grad_()
    total = hog.ops.cdist(t, y, 2.0, "donot_use_mm_for_euclid_dist").sum()
    (grad,) = torch.autograd.grad(total, t)
    assert_close(grad[-1].double(), gaps / gaps.norm(), rtol=1e-6, atol=0.0)


@by
def test_a_row_that_is_not_finite_spoils_no_others(mode: str) -> None:
    x, y = randn(3, 2), randn(4, 2, seed=1)
    x[1, 0] = float("nan")
    leaf = x.clone().requires_grad_()
    d = hog.ops.cdist(leaf, y, 2.0, mode)
    assert d[1].isnan().all()
    assert_close(d[[0, 2]].detach(), torch.cdist(x[[0, 2]], y))
    (grad,) = torch.autograd.grad(d[[0, 2]].sum(), leaf)
    assert grad[[0, 2]].isfinite().all()


@rows("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """torch refuses it where it does not take products."""
    x, y = randn(4, 3, dtype=dtype), randn(5, 3, seed=1, dtype=dtype)
    d = hog.ops.cdist(x, y)
    assert torch.equal(d, torch.cdist(x.float(), y.float()).to(dtype))
    assert torch.equal(hog.ops.pdist(x), F.pdist(x.float()).to(dtype))
    assert_close(hog.ops.pairwise_distance(x, x + 1), F.pairwise_distance(x, x + 1))


@rows("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@by
def test_dtypes_under_autocast_are_those_of_torch(dtype: torch.dtype, mode: str) -> None:
    x, y = randn(4, 3, dtype=dtype), randn(4, 3, seed=1, dtype=dtype)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = hog.ops.cdist(leaf, y, 2.0, mode), torch.cdist(x, y, 2.0, mode)
        pairs = hog.ops.pairwise_distance(x, y), F.pairwise_distance(x, y)
    assert ours.dtype == theirs.dtype == torch.float32
    assert_close(ours.detach(), torch.cdist(x.float(), y.float()))
    (grad,) = torch.autograd.grad(ours.sum(), leaf)
    wide = x.float().requires_grad_()
    assert_close(grad, torch.autograd.grad(torch.cdist(wide, y.float()).sum(), wide)[0].to(dtype))
    assert_close(*pairs)


WRONG: dict[str, tuple[Any, ...]] = {
    "one dimension": (torch.ones(3), torch.ones(4, 3)),
    "other lengths of rows": (torch.ones(4, 2), torch.ones(4, 3)),
    "other dtypes": (torch.ones(4, 3), torch.ones(4, 3, dtype=F64)),
    "integers": (torch.ones(4, 3).long(), torch.ones(4, 3).long()),
    "complex numbers": (torch.ones(4, 3) * 1j, torch.ones(4, 3) * 1j),
    "negative power": (torch.ones(4, 3), torch.ones(4, 3), -1.0),
    "power not a number": (torch.ones(4, 3), torch.ones(4, 3), float("nan")),
    "unknown mode": (torch.ones(4, 3), torch.ones(4, 3), 2.0, "fast"),
    "batches that do not broadcast": (torch.ones(2, 4, 3), torch.ones(3, 4, 3)),
    "no tensor": (torch.ones(4, 3), 1),
}


test_errors_are_of_the_type_of_torchs = refused_as_by_torch(
    hog.ops.cdist, torch.cdist, WRONG, "expected|must match"
)


def test_errors_of_pdist_are_of_the_type_of_torchs() -> None:
    for given in ((torch.ones(2, 2, 2),), (torch.ones(2, 2), -1.0), (torch.ones(2, 2).long(),)):
        with pytest.raises(RuntimeError, match="pdist"):
            F.pdist(*given)
        with pytest.raises(RuntimeError, match="expected"):
            hog.ops.pdist(*given)
