"""Least squares by LSMR, and singular triplets by bidiagonalization, against dense ones and SciPy."""

import pytest
import scipy.sparse.linalg
import torch
from torch.testing import assert_close

import hoglib as hog
from tests.curvature.problems import F64, Given, columns, draw, matrix, problem, relative
from tests.refused import refused
from tests.rows import rows


def jacobian_of(A):
    """An operator whose matrix is A."""
    return hog.JacobianOperator(lambda p, x: x @ p, torch.zeros(A.shape[1], dtype=A.dtype), A)


def of_values(values, M, P):
    """A matrix [M, P] of these singular values."""
    k = len(values)
    U, V = (torch.linalg.qr(draw(n, k, seed=n))[0] for n in (M, P))
    return U * torch.as_tensor(values, dtype=F64) @ V.T


MATRICES = {
    "tall": draw(40, 12),
    "wide": draw(12, 40),
    "of rank four": of_values([3.0, 2.0, 1.0, 0.5], 30, 20),
    "ill-conditioned": of_values(torch.logspace(0, -4, 20), 50, 20),
}


@rows("damping", [0.0, 0.1])
@rows("A", MATRICES.values(), ids=MATRICES)
def test_the_minimizer_of_dense_least_squares(A, damping):
    b = draw(len(A), 3, seed=7)
    expected = torch.linalg.pinv(A, rtol=1e-10) @ b
    if damping:
        expected = torch.linalg.solve(A.T @ A + damping * torch.eye(A.shape[1], dtype=F64), A.T @ b)
    J = jacobian_of(A)
    x, info = J.lstsq(b, damping=damping, tol=1e-13, return_info=True)
    assert relative(x, expected) < 1e-7
    assert bool(info.converged.all())
    assert_close(info.residual, (b - A @ x).norm(dim=0) / b.norm(dim=0), rtol=1e-8, atol=1e-12)
    assert info.products == 6 * info.iterations + 9
    assert relative(J.lstsq(b[:, 1], damping=damping, tol=1e-13), x[:, 1]) < 1e-6


def test_as_many_iterations_as_scipy():
    A, b = MATRICES["ill-conditioned"], draw(50)
    theirs = scipy.sparse.linalg.lsmr(A.numpy(), b.numpy(), damp=0.1, atol=1e-9, btol=1e-9)
    _, info = jacobian_of(A).lstsq(b, damping=0.01, tol=1e-9, return_info=True)
    assert abs(info.iterations - theirs[2]) <= 2
    assert float(info.gradient) < 1e-9


# squares of such numbers are not in the range of float32
@rows("scale", [1e-25, 1.0, 1e25])
def test_single_precision_of_any_size(scale):
    A, b = MATRICES["tall"], draw(40)
    x = jacobian_of(A.float() * scale).lstsq(b.float() / scale**0.3)
    assert x.dtype == torch.float32
    expected = torch.linalg.lstsq(A, b[:, None]).solution[:, 0]
    assert relative(x.double() * scale * scale**0.3, expected) < 1e-4


@rows("scale", [1e-300, 1e300])
def test_a_right_side_of_any_size(scale):
    A, b = MATRICES["tall"], draw(40)
    found, info = jacobian_of(A).lstsq(b * scale, return_info=True)
    assert relative(found / scale, torch.linalg.lstsq(A, b[:, None]).solution[:, 0]) < 1e-7
    assert 0 < float(info.residual) < 1


def test_damping_of_a_small_matrix_in_single_precision():
    A, b = MATRICES["tall"], draw(40)
    expected = torch.linalg.solve(A.T @ A + 0.5 * torch.eye(12, dtype=F64), A.T @ b)
    x, info = jacobian_of(A.float() * 1e-25).lstsq(b.float(), damping=0.5e-50, return_info=True)
    assert relative(x.double() * 1e-25, expected) < 1e-4
    assert bool(info.converged)


def test_a_model_over_a_loader_in_the_structure_of_its_outputs():
    loss, params, (x, _) = problem("LayerNorm")
    batches = [(x[:4], None), (x[4:], None)]
    J, b = hog.JacobianOperator(loss, params, batches), draw(7, 3)
    A = columns(lambda p: loss.outputs(p, (x, None)), params)
    found = J.lstsq(b, damping=0.1)
    assert {n: v.shape for n, v in found.items()} == {n: p.shape for n, p in params.items()}
    flat = J.lstsq(b.reshape(-1), damping=0.1)
    expected = torch.linalg.solve(
        A.T @ A + 0.1 * torch.eye(A.shape[1], dtype=F64), A.T @ b.reshape(-1)
    )
    for one in (flat, torch.cat([v.reshape(-1) for v in found.values()])):
        assert relative(one, expected) < 1e-6
    left, values, right = J.svd(3)
    assert_close(values, torch.linalg.svdvals(A)[:3], rtol=1e-7, atol=0)
    assert relative(left * values @ right.T @ right, A @ right) < 1e-6


def test_a_symmetric_operator():
    A = matrix([1.0, 2.0, -3.0, 0.0])
    b = draw(4)
    x, info = Given(A).lstsq(b, return_info=True)
    assert relative(x, torch.linalg.pinv(A, rtol=1e-10) @ b) < 1e-7
    assert info.products == 2 * info.iterations + 3
    assert_close(Given(A).svd(4).values, torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=F64))


def test_a_zero_vector_and_a_tolerance_that_is_missed():
    J = jacobian_of(MATRICES["ill-conditioned"])
    x, info = J.lstsq(torch.zeros(50, dtype=F64), return_info=True)
    assert float(x.abs().max()) == 0
    assert bool(info.converged)
    with pytest.warns(UserWarning, match=r"got .* after 3 iterations; give more damping"):
        J.lstsq(draw(50), max_iter=3)
    assert not J.lstsq(draw(50), max_iter=3, return_info=True)[1].converged


TRIPLETS = {
    "tall": draw(200, 120),
    "wide": draw(120, 200),
    "small": draw(9, 30),
    "decaying": of_values(torch.logspace(0, -8, 150), 160, 150),
    "of rank three": of_values([3.0, 2.0, 1.0], 90, 80),
    "orthogonal": of_values([1.0] * 70, 90, 70),
    "zero": torch.zeros(40, 50, dtype=F64),
}


@rows("A", TRIPLETS.values(), ids=TRIPLETS)
def test_triplets_in_no_more_products_than_arpack(A):
    J, k = jacobian_of(A), 5
    found, size = J.svd(k), float(torch.linalg.matrix_norm(A, 2))
    assert_close(found.values, torch.linalg.svdvals(A)[:k], rtol=1e-9, atol=1e-13 * size)
    left, values, right = found
    for vectors in (left, right):
        assert_close(vectors.T @ vectors, torch.eye(k, dtype=F64), atol=1e-12, rtol=0)
    off = (A @ right - left * values).norm(dim=0), (A.T @ left - right * values).norm(dim=0)
    assert_close(found.residuals, torch.hypot(*off), rtol=1e-3, atol=1e-14 * size)
    assert float(found.residuals.max()) <= max(1e-10 * float(values[0]), 1e-13 * size)
    if size and min(A.shape) > 22:
        count = 0

        def times(matrix, v):
            nonlocal count
            count += 1
            return matrix.numpy() @ v

        theirs = scipy.sparse.linalg.LinearOperator(
            A.shape, lambda v: times(A, v), lambda v: times(A.T, v), dtype="float64"
        )
        scipy.sparse.linalg.svds(theirs, k, tol=1e-10, rng=0)
        assert found.products <= count
    assert len(repr(found)) < 140


@rows("scale", [1e-25, 1.0, 1e25])
def test_triplets_in_single_precision_of_any_size(scale):
    A = of_values(torch.linspace(3, 0, 80), 90, 80)
    found = jacobian_of(A.float() * scale).svd(4)
    assert_close(found.values.double() / scale, torch.linalg.svdvals(A)[:4], rtol=1e-5, atol=0)
    assert 0 < float(found.residuals.max() / scale) < 1e-4


def test_triplets_are_those_of_the_generator_alone():
    J, state = jacobian_of(TRIPLETS["tall"]), torch.get_rng_state()
    first = J.svd(2)
    assert torch.equal(J.svd(2).right, first.right)
    assert not torch.equal(J.svd(2, generator=torch.Generator().manual_seed(4)).right, first.right)
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_is_shown(capfd):
    J = hog.JacobianOperator(
        lambda p, x: x @ p, torch.zeros(12, dtype=F64), draw(40, 12), progress=True
    )
    J.lstsq(draw(40)), J.svd(2)
    shown = capfd.readouterr().err
    assert "JacobianOperator lstsq" in shown
    assert "JacobianOperator svd" in shown


TALL = jacobian_of(MATRICES["tall"])
test_what_is_refused = refused({
    "a vector on the parameters": (lambda: TALL.lstsq(draw(12)), ValueError, r"b: expected \(40,\), \(40, k\)"),
    "integers": (lambda: TALL.lstsq(torch.ones(40, dtype=torch.int64)), TypeError, "b: expected torch.float64"),
    "not finite": (lambda: TALL.lstsq(draw(40) / 0), ArithmeticError, "b: expected a finite number"),
    "negative damping": (lambda: TALL.lstsq(draw(40), damping=-1.0), ValueError, "damping: expected .* at least 0"),
    "infinite damping": (lambda: TALL.lstsq(draw(40), damping=float("inf")), ValueError, "damping: expected a finite number"),
    "more than there are": (lambda: TALL.svd(13), ValueError, "k: expected at most 12 singular values"),
    "no convergence": (lambda: jacobian_of(draw(300, 250)).svd(5, max_iter=1, tol=1e-14), RuntimeError, r"svd: expected 5 singular values, got [0-4] after 126 products"),
})  # fmt: skip
