"""Stand-ins for linear algebra: torch's values, errors and first gradients, and derivatives that torch has wrong."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.testing import assert_close

import hoglib as hog
from hoglib.ops._stand_in import TABLE
from tests.rows import rows

F64, C128 = torch.float64, torch.complex128


def regular(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, dtype=dtype) + 3 * torch.eye(shape[-1], dtype=dtype)


def leibniz(A: Tensor) -> Tensor:
    """The determinant as a polynomial, which has all its derivatives everywhere."""
    orders = torch.tensor(list(itertools.permutations(range(A.shape[-1]))))
    inversions = sum(
        orders[:, i] > orders[:, j] for i, j in itertools.combinations(range(A.shape[-1]), 2)
    )
    terms = (1 - 2 * (inversions % 2)).to(A.dtype)
    for i, columns in enumerate(orders.T):
        terms = terms * A[..., i, columns]
    return terms.sum(-1)


def as_torch(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Tensor) -> None:
    """Values and first gradients, plain and with a graph, agree to rounding."""
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        values = function(*leaves)
        values = values if isinstance(values, tuple) else (values,)
        total = sum((v * v.detach().cos()).real.sum() for v in values if v.requires_grad)
        grads = grad(total, leaves, create_graph=True, materialize_grads=True)
        results.append([*(v.detach() for v in values), *grads])
    narrow = values[0].dtype in (torch.float32, torch.complex64)
    bounds = {"atol": 1e-4, "rtol": 1e-4} if narrow else {}
    assert_close(*results, equal_nan=True, **bounds)


SOLVES = {
    "matrix": ((3, 3), (3, 2), {}),
    "vector": ((3, 3), (3,), {}),
    "batch of vectors": ((2, 3, 3), (2, 3), {}),
    "one vector for a batch": ((2, 3, 3), (3,), {}),
    "from the right": ((2, 3, 3), (2, 4, 3), {"left": False}),
    "broadcast": ((2, 1, 2, 2), (3, 2, 1), {}),
    "one matrix for a batch": ((2, 2), (3, 2, 2), {}),
    "no unknowns": ((0, 0), (0, 2), {}),
    "no right-hand sides": ((2, 2), (2, 0), {}),
}


@rows("name", SOLVES)
@rows("dtype", [F64, torch.float32, C128, torch.complex64], ids=str)
def test_solve_gives_what_torch_gives(name: str, dtype: torch.dtype) -> None:
    a, b, options = SOLVES[name]
    A, B = regular(*a, dtype=dtype), torch.randn(b, dtype=dtype)
    as_torch(
        lambda A, B: hog.ops.solve(A, B, **options),
        lambda A, B: torch.linalg.solve(A, B, **options),
        A,
        B,
    )
    tangents = (torch.randn_like(A), torch.randn_like(B))
    both = [
        torch.func.jvp(lambda A, B, f=f: f(A, B, **options), (A, B), tangents)
        for f in (hog.ops.solve, torch.linalg.solve)
    ]
    assert_close(*both)


def test_solve_keeps_its_digits_where_the_matrix_is_ill_conditioned() -> None:
    i = torch.arange(1.0, 9.0, dtype=F64)
    A = 1 / (i + i[:, None] - 1)  # Hilbert's, of condition 1e10
    B, tangents = A.sum(1, True), (torch.zeros_like(A), A @ torch.ones(8, 1, dtype=F64))
    X, tangent = torch.func.jvp(hog.ops.solve, (A, B), tangents)
    residual = (A @ X - B).abs().max()
    assert residual <= 4 * (A @ torch.linalg.solve(A, B) - B).abs().max() + 1e-15
    assert_close(tangent, torch.ones(8, 1, dtype=F64), atol=1e-5, rtol=0)


def test_solve_ex_tells_of_singular_matrices() -> None:
    A, B = torch.zeros(2, 2), torch.ones(2, 1)
    info = hog.ops.solve_ex(A, B).info
    assert info.item() == torch.linalg.solve_ex(A, B).info.item() == 1
    with pytest.raises(torch.linalg.LinAlgError):
        hog.ops.solve_ex(A, B, check_errors=True)
    result = torch.func.jvp(lambda A: hog.ops.solve_ex(A, B).result, (torch.eye(2),), (A,))
    assert_close(result, (B, 0 * B))
    assert type(hog.ops.solve_ex(torch.eye(2), B)) is type(torch.linalg.solve_ex(torch.eye(2), B))


DETS = {
    "det": (hog.ops.det, torch.linalg.det),
    "slogdet": (hog.ops.slogdet, torch.linalg.slogdet),
    "logdet": (hog.ops.logdet, torch.logdet),
}


@rows("name", DETS)
@rows("shape", [(1, 1), (2, 2), (3, 3), (5, 5), (2, 4, 4), (0, 3, 3), (2, 0, 0)], ids=str)
@rows("dtype", [F64, torch.float32, C128, torch.complex64], ids=str)
def test_determinants_are_what_torch_gives(name: str, shape: Any, dtype: torch.dtype) -> None:
    ours, theirs = DETS[name]
    A = regular(*shape, dtype=dtype)
    as_torch(ours, theirs, A)
    tangents = [
        torch.func.jvp(lambda A, f=f: tuple_of(f(A)), (A,), (A.cos(),)) for f in (ours, theirs)
    ]
    narrow = dtype in (torch.float32, torch.complex64)
    assert_close(*tangents, equal_nan=True, atol=1e-4, rtol=1e-4 if narrow else 1e-7)


def tuple_of(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple) else value


def test_a_negative_determinant() -> None:
    A = -torch.eye(3, dtype=F64)
    assert hog.ops.det(A) == -1
    assert tuple(hog.ops.slogdet(A)) == (-1, 0)
    assert hog.ops.logdet(A).isnan()
    value, tangent = torch.func.jvp(hog.ops.logdet, (A,), (A,))
    assert value.isnan()
    assert tangent == torch.func.jvp(torch.logdet, (A,), (A,))[1] == 0


def of_rank(n: int, rank: int) -> Tensor:
    return torch.randn(n, rank, dtype=F64) @ torch.randn(rank, n, dtype=F64)


SINGULAR = {
    "zero 2": lambda: torch.zeros(2, 2),
    "ones 3": lambda: torch.ones(3, 3),
    "counting": lambda: torch.arange(1.0, 17.0).reshape(4, 4),
    "zero 4": lambda: torch.zeros(4, 4),
    "ones 4": lambda: torch.ones(4, 4),
    "zero column": lambda: torch.randn(4, 4) * torch.tensor([1, 0, 1, 1]),
    "zeros on the diagonal": lambda: torch.diag(torch.tensor([0.0, 2, 0, 1])),
    "rank 3 of 5": lambda: of_rank(5, 3),
    "rank 1 of 5": lambda: torch.ones(5, 5),
    "equal rows": lambda: torch.randn(4, 4)[[0, 1, 1, 2]],
    "small": lambda: 1e-5 * torch.eye(4),
    "nearly singular": lambda: of_rank(4, 3) + 1e-9 * torch.randn(4, 4),
    "graded": lambda: torch.diag(torch.tensor([1e3, 1, 1, 1e-3])) + 1e-4 * torch.ones(4, 4),
}


@rows("name", SINGULAR)
def test_det_of_a_singular_matrix_has_the_derivatives_of_the_polynomial(name: str) -> None:
    """To the third order, reverse over reverse and forward over forward, alone and in a batch."""
    A = SINGULAR[name]().to(F64)
    A = torch.stack([A, regular(*A.shape)])
    v = torch.randn_like(A)
    results = []
    for function in (hog.ops.det, leibniz):

        def along(f: Any) -> Any:
            return lambda A: torch.func.jvp(f, (A,), (v,))[1]

        leaf = A.clone().requires_grad_()
        orders = [function(leaf)]
        for _ in range(3):
            (g,) = grad(orders[-1].sum(), leaf, create_graph=True)
            orders.append((g * v + 0 * leaf).sum((-1, -2)))
        forward = [along(function)(A), along(along(function))(A), along(along(along(function)))(A)]
        mixed = [along(torch.func.grad(lambda A, f=function: f(A).sum()))(A)]
        mixed.append(torch.func.grad(lambda A, f=function: along(f)(A).sum())(A))
        results.append([*(o.detach() for o in orders), *forward, *mixed])
    size = max(1.0, A.abs().amax().item())
    for ours, theirs in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert_close(ours, theirs, atol=1e-10 * size, rtol=1e-9)


def test_det_beyond_the_deficiency_that_it_can_do_is_zero_and_never_nan() -> None:
    A = torch.zeros(6, 6, dtype=F64, requires_grad=True)
    (g,) = grad(hog.ops.det(A), A, create_graph=True)
    (h,) = grad((g * torch.randn_like(g)).sum(), A)
    assert not g.any()
    assert not h.any()


def test_slogdet_of_a_singular_matrix() -> None:
    assert tuple(hog.ops.slogdet(torch.ones(2, 2))) == (0, -torch.inf)
    (value, _) = torch.func.jvp(hog.ops.logdet, (torch.ones(2, 2),), (torch.ones(2, 2),))
    assert value == -torch.inf


CALLS = {
    "not square": lambda f, *more: f(torch.zeros(2, 3), *more),
    "a vector": lambda f, *more: f(torch.zeros(3), *more),
    "integers": lambda f, *more: f(torch.eye(2, dtype=torch.long), *more),
    "half": lambda f, *more: f(torch.eye(2, dtype=torch.bfloat16), *more),
}
PAIRS = {
    "solve": (hog.ops.solve, torch.linalg.solve, (torch.ones(2, 1),)),
    "cholesky inverse": (hog.ops.cholesky_inverse, torch.cholesky_inverse, ()),
    **{name: (*pair, ()) for name, pair in DETS.items()},
}


@rows("forward", [False, True], ids=["plain", "in forward mode"])
@rows("call", CALLS)
@rows("pair", PAIRS)
def test_errors_are_those_of_torch(pair: str, call: str, forward: bool) -> None:
    ours, theirs, more = PAIRS[pair]
    with pytest.raises(RuntimeError) as expected:
        CALLS[call](theirs, *more)
    with (
        pytest.raises(type(expected.value)) as got,
        torch.autograd.forward_ad.dual_level() if forward else torch.enable_grad(),
    ):
        CALLS[call](ours, *more)
    assert str(got.value) == str(expected.value)


SINGULAR_CALLS = {
    "solve": (hog.ops.solve, torch.linalg.solve, torch.ones(2, 1)),
    "solve from the right": (
        lambda A, B: hog.ops.solve(A, B, left=False),
        lambda A, B: torch.linalg.solve(A, B, left=False),
        torch.ones(1, 2),
    ),
    "cholesky inverse": (hog.ops.cholesky_inverse, torch.cholesky_inverse, False),
}  # fmt: skip


@rows("name", SINGULAR_CALLS)
def test_singular_matrices_are_refused_as_by_torch(name: str) -> None:
    ours, theirs, more = SINGULAR_CALLS[name]
    with pytest.raises(torch.linalg.LinAlgError) as expected:
        theirs(torch.zeros(2, 2), more)
    for context in (torch.enable_grad(), torch.autograd.forward_ad.dual_level()):
        with context, pytest.raises(torch.linalg.LinAlgError) as got:
            ours(torch.zeros(2, 2), more)
        assert str(got.value) == str(expected.value)


@rows("dtype", [torch.float32, torch.bfloat16], ids=str)
@rows("name", PAIRS)
def test_autocast_changes_what_it_changes_for_torch(name: str, dtype: torch.dtype) -> None:
    ours, theirs, more = PAIRS[name]
    A = regular(4, 4).to(dtype)
    more = tuple(torch.ones(4, 1, dtype=dtype) for _ in more)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            expected = theirs(A, *more)
        except RuntimeError as refused:
            with pytest.raises(RuntimeError, match=str(refused)[:20]):
                ours(A, *more)
            return
        assert_close(tuple_of(ours(A, *more)), tuple_of(expected))
        value, _ = torch.func.jvp(lambda A: tuple_of(ours(A, *more)), (A,), (A,))
        assert_close(value, tuple_of(expected))


def test_vmap_aligns_batches() -> None:
    A, B = regular(3, 2, 1, 2, 2), torch.randn(3, 4, 2, 1, dtype=F64)
    got = torch.func.vmap(hog.ops.solve)(A, B)
    assert_close(got, torch.stack([torch.linalg.solve(a, b) for a, b in zip(A, B, strict=True)]))


REPLACED = {
    theirs: ours
    for name in ("det", "linalg.solve", "cholesky_inverse")
    for theirs, ours in TABLE[name].replaces.items()
}
NAMES = {  # of the first argument, where it may be named
    torch.linalg.det: "A", torch.linalg.slogdet: "A", torch.det: "input", torch.slogdet: "input",
    torch.logdet: "input", torch.cholesky_inverse: "input",
}  # fmt: skip


@rows("theirs", REPLACED, ids=lambda theirs: theirs.__name__)
def test_replacements_take_what_the_replaced_take(theirs: Any) -> None:
    ours, A, B = REPLACED[theirs], regular(2, 2), torch.ones(2, 2, dtype=F64)
    more = {"linalg_solve": (B,), "linalg_solve_ex": (B,), "linalg_tensorsolve": (B[0],)}
    given = (A, *more.get(theirs.__name__, ()))
    assert_close(tuple_of(ours(*given)), tuple_of(theirs(*given)))
    if theirs in NAMES:
        named = {NAMES[theirs]: A}
        assert_close(tuple_of(ours(**named)), tuple_of(theirs(**named)))
