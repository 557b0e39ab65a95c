"""Approximations by a few eigenvectors, on known spectra, and as preconditioners."""

import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from tests.curvature.problems import Given, matrix, seeded
from tests.curvature.test_traces import FAST, POLYNOMIAL, SIZE
from tests.refused import refused
from tests.rows import rows

SPECTRA = {"geometric": FAST, "polynomial": POLYNOMIAL}


@rows("name", SPECTRA)
def test_the_largest_eigenvalues_are_found(name):
    """Better than the bound of Halko, Martinsson and Tropp (theorem 10.5), and ordered."""
    spectrum, rank = SPECTRA[name], 10
    A = matrix(spectrum)
    L = Given(A).low_rank(rank, oversampling=10, generator=seeded())
    assert L.values.shape == (rank,)
    assert (L.values.diff() <= 0).all()
    below = spectrum[:rank] - L.values  # by Weyl, and because both are compressions of A
    assert (below > -1e-12).all()
    assert (below <= torch.linalg.matrix_norm(A - L.to_dense(), 2) + 1e-12).all()
    assert_close(L.values[:2], spectrum[:2], rtol=0.02, atol=0)
    U = L.vectors
    assert_close(U.T @ U, torch.eye(rank, dtype=torch.float64))
    assert_close(L.to_dense(), (U * L.values) @ U.T)
    best = spectrum[rank:].square().sum().sqrt()
    error = torch.linalg.matrix_norm(A - L.to_dense())
    assert best * (1 - 1e-9) <= error <= (1 + rank / 9) ** 0.5 * best + best
    estimate = (Given(A) - L).squared_frobenius(400, generator=seeded(1))
    assert_close(estimate.sqrt(), error, rtol=0.1, atol=0)


def nystrom_by_definition(A, S):
    """A S (S^T A S)^+ (A S)^T by a pseudo-inverse."""
    Y = A @ S
    return Y @ torch.linalg.pinv(S.T @ Y, hermitian=True) @ Y.T


def test_nystrom_is_that_of_its_definition():
    A = matrix(POLYNOMIAL)
    noise = torch.randn(SIZE, 8, generator=seeded(3), dtype=torch.float64)
    expected = nystrom_by_definition(A, torch.linalg.qr(noise)[0])
    operator = Given(A)
    found = operator.low_rank(8, oversampling=0, generator=seeded(3))
    assert operator.count == 8
    assert_close(found.to_dense(), expected, rtol=1e-9, atol=1e-11)


@rows("dtype", [torch.float32, torch.float64], ids=str)
def test_a_matrix_of_low_rank_is_exact(dtype):
    spectrum = torch.zeros(SIZE, dtype=torch.float64)
    spectrum[:4] = torch.tensor([5.0, 3.0, 2.0, 1e-2], dtype=torch.float64)
    A = matrix(spectrum).to(dtype)
    L = Given(A).low_rank(6, generator=seeded())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert_close(L.to_dense(), A, rtol=0, atol=5 * tolerance)
    assert (L.values[4:].abs() < tolerance * 5).all()
    damped = A + 0.1 * torch.eye(SIZE, dtype=dtype)
    assert_close(L.inverse(0.1).to_dense(), torch.linalg.inv(damped), rtol=0, atol=1e3 * tolerance)
    whole = Given(A).low_rank(SIZE)
    assert_close(whole.to_dense(), A, rtol=0, atol=5 * tolerance)
    nothing = Given(torch.zeros_like(A)).low_rank(3)
    assert not nothing.values.any()


def test_products_in_bfloat16_are_right_to_their_rounding():
    spectrum = 100 * FAST
    L = Given(matrix(spectrum).bfloat16()).low_rank(5, generator=seeded())
    rounding = torch.finfo(torch.bfloat16).eps * SIZE**0.5 * float(spectrum[0])
    assert_close(L.values.double(), spectrum[:5], rtol=0, atol=rounding)


def test_an_indefinite_matrix_is_refused():
    A = matrix(FAST * torch.where(torch.arange(SIZE) % 2 == 0, 1.0, -1.0))
    with pytest.raises(hog.errors.NotPositiveDefiniteError, match="either sign"):
        Given(A).low_rank(6)
    with pytest.raises(hog.errors.NotPositiveDefiniteError, match="smallest eigenvalue is 0 with"):
        Given(matrix(FAST)).low_rank(6).inverse()


def test_the_preconditioner_is_its_formula_and_saves_products():
    spectrum = torch.cat([torch.logspace(3, 0, 20), torch.full((SIZE - 20,), 1e-3)]).double()
    A, damping = matrix(spectrum), 1e-2
    L = Given(A).low_rank(20, generator=seeded())
    U, values = L.vectors, L.values
    rest = torch.eye(SIZE, dtype=torch.float64) - U @ U.T
    expected = (U / (values + damping)) @ U.T + rest / (values.min() + damping)
    assert_close(L.preconditioner(damping).to_dense(), expected)
    b = torch.randn(SIZE, generator=seeded(1), dtype=torch.float64)
    plain, without = Given(A).solve(b, damping=damping, return_info=True)
    near = L.preconditioner(damping)
    found, info = Given(A).solve(b, damping=damping, preconditioner=near, return_info=True)
    assert_close(found, plain, rtol=1e-5, atol=1e-6)
    assert 4 * info.products < without.products


BAD = {
    "rank": (lambda A: A.low_rank(0), hog.errors.ArgumentValueError, "rank"),
    "too many": (lambda A: A.low_rank(SIZE + 1), hog.errors.ArgumentValueError, f"at most {SIZE}"),
    "oversampling": (lambda A: A.low_rank(3, oversampling=-1), hog.errors.ArgumentValueError, "oversampling"),
    "generator": (lambda A: A.low_rank(3, generator=0), hog.errors.ArgumentTypeError, "generator"),
    "damping": (lambda A: A.low_rank(3).preconditioner(0.0), hog.errors.ArgumentValueError, "damping"),
}  # fmt: skip
test_what_is_refused = refused(BAD, lambda call: call(Given(matrix(FAST))))
