"""XTrace against its definition, known traces, and Hutchinson's estimator."""

import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature.algebra import estimates
from tests.curvature.problems import Given, matrix, problem, seeded
from tests.refused import refused
from tests.rows import rows

SIZE = 60
FAST, POLYNOMIAL = 0.6 ** torch.arange(SIZE).double(), 1 / torch.arange(1, SIZE + 1).double() ** 2
NAMES = ["geometric", "polynomial", "flat"]
FLAT = torch.linspace(1, 2, SIZE, dtype=torch.float64)


def by_definition(A, count, generator):
    """The mean over i of tr(Q_i^T A Q_i) and what is estimated beside, with Q_i of all others."""
    size = len(A)
    w = torch.randn(count, size, generator=generator).double()
    w *= size**0.5 / w.norm(dim=1, keepdim=True)

    def estimate(i, without=None):
        others = w[[j for j in range(count) if j not in (i, without)]]
        Q = torch.linalg.qr((others @ A).T)[0]
        rest = w[i] - Q @ (Q.T @ w[i])
        left = size - len(others)
        rest = rest * left**0.5 / rest.norm()
        Br = A @ rest - Q @ (Q.T @ A @ rest)
        variance = 2 * (Br @ Br - (rest @ Br) ** 2 / left)
        return (Q.T @ A @ Q).trace() + rest @ A @ rest, variance

    found, variances = map(torch.stack, zip(*map(estimate, range(count)), strict=True))
    change = torch.zeros(count, count).double()
    for i in range(count):
        for j in {*range(count)} - {i}:
            change[i, j] = found[i] - estimate(i, j)[0]
    most = variances.outer(variances).sqrt()
    squared = variances.sum() + (change * change.T).clamp(-most, most).sum().clamp(min=0)
    return found.mean(), squared.sqrt() / count


@rows("eigenvalues", [FAST, POLYNOMIAL, FLAT, FLAT - 1.5], ids=[*NAMES, "indefinite"])
@rows("count", [2, 3, 8])
def test_it_is_the_estimator_of_its_definition(eigenvalues, count):
    A = matrix(eigenvalues)
    for products in (2 * count, 2 * count + 1):
        operator = Given(A)
        ours = operator.trace(products, method="xtrace", generator=seeded(1), return_error=True)
        assert_close(ours, by_definition(A, count, seeded(1)), rtol=1e-6, atol=1e-9)
        assert operator.count == 2 * count


@rows(("eigenvalues", "to_hutchinson"), [(FAST, 0.05), (POLYNOMIAL, 0.1), (FLAT, 1.9)], ids=NAMES)
def test_its_mean_and_its_error_are_as_said(eigenvalues, to_hutchinson):
    generator, A, many = seeded(2), Given(matrix(eigenvalues)), 150
    found = {
        method: [
            A.trace(20, method=method, generator=generator, return_error=True) for _ in range(many)
        ]
        for method in ("xtrace", "hutchinson")
    }
    off = {m: torch.stack([v for v, _ in runs]) - eigenvalues.sum() for m, runs in found.items()}
    size = {m: float(x.square().mean().sqrt()) for m, x in off.items()}
    assert abs(float(off["xtrace"].mean())) < 4 * size["xtrace"] / many**0.5
    assert size["xtrace"] < to_hutchinson * size["hutchinson"]
    said = torch.stack([e for _, e in found["xtrace"]]).square().mean().sqrt()
    assert 0.5 < float(said) / size["xtrace"] < 1.5


OUTLIER = torch.cat([torch.tensor([1000.0]), torch.linspace(0, 1, SIZE - 1)]).double()
SPECTRA = {
    "flat": FLAT, "an outlier": OUTLIER, "a power law": 100 / torch.arange(1, SIZE + 1).double(),
    "low rank": torch.cat([torch.linspace(1, 10, 12), torch.zeros(SIZE - 12)]).double(),
    "indefinite": torch.cat([torch.linspace(-1, 1, SIZE - 1), torch.tensor([-300.0])]).double(),
    "outliers of a network": torch.cat([torch.linspace(20, 100, 6), torch.rand(SIZE - 6, generator=seeded())]).double(),
}  # fmt: skip


@rows("products", [4, 8, 16])
@rows("method", ["hutchinson", "xtrace"])
@rows("name", SPECTRA)
def test_two_standard_errors_are_beyond_one_case_in_ten_at_most(name, method, products):
    """The spread of the samples themselves left out up to 40% of the cases."""
    A, true = Given(matrix(SPECTRA[name])), SPECTRA[name].sum()
    options = {"method": method, "return_error": True}
    found = [A.trace(products, generator=seeded(n), **options) for n in range(300)]
    off, said = (torch.stack(x) for x in zip(*((v - true, e) for v, e in found), strict=True))
    few = 0.12 if products == 4 else 0.02
    assert 0.88 - few < float((off.abs() <= 2 * said).double().mean())
    ratio = said.square().mean().sqrt() / off.square().mean().sqrt()
    assert 0.8 - few < float(ratio) < 1.5 + few


def test_by_default_it_is_xtrace_where_it_has_samples_and_memory(monkeypatch):
    A, true = matrix(OUTLIER), OUTLIER.sum()
    found = [Given(A).trace(16, generator=seeded(n)) - true for n in range(20)]
    assert torch.stack(found).abs().max() < 10  # by Hutchinson's 350 on average
    for products in (1, 2, 3):
        operator = Given(A)
        value, error = operator.trace(products, generator=seeded(1), return_error=True)
        by_name = operator.trace(products, generator=seeded(1), method="hutchinson")
        assert_close(value, by_name, rtol=0, atol=0)
        assert operator.count == 2 * products
        assert bool(error.isinf()) == (products == 1)
    exact = Given(torch.eye(SIZE, dtype=torch.float64)).trace(3, return_error=True)
    assert_close(exact, (torch.tensor(60.0).double(), torch.tensor(0.0).double()))
    monkeypatch.setattr(estimates, "BASES_AT_ONCE", 32 * SIZE * 8 - 1)
    by_name = Given(A).trace(16, generator=seeded(1), method="hutchinson")
    assert_close(Given(A).trace(16, generator=seeded(1)), by_name, rtol=0, atol=0)


@rows("rank", [0, 1, 5])
def test_a_matrix_of_low_rank_has_its_trace_exactly(rank):
    eigenvalues = torch.cat([torch.linspace(-1, 2, rank), torch.zeros(SIZE - rank)]).double()
    operator = Given(matrix(eigenvalues))
    trace, error = operator.trace(14, method="xtrace", generator=seeded(), return_error=True)
    assert_close(trace, eigenvalues.sum(), rtol=1e-12, atol=1e-12)
    assert error == 0
    assert operator.count == 7 + rank


@rows("rank", [5, SIZE])
@rows("scale", [1e-17, 1e17])
def test_the_unit_of_the_matrix_does_not_matter(rank, scale):
    eigenvalues = torch.cat([FLAT[:rank], torch.zeros(SIZE - rank)]).double()
    found = [
        Given(matrix(eigenvalues) * unit).trace(14, method="xtrace", generator=seeded())
        for unit in (scale, 1.0)
    ]
    assert_close(found[0] / scale, found[1], rtol=1e-6, atol=0)


def test_as_many_samples_as_rows_make_it_dense():
    A = matrix(FLAT)
    for products in (SIZE, 200):
        trace, error = Given(A).trace(products, method="xtrace", return_error=True)
        assert_close(trace, FLAT.sum())
        assert error == 0
    operator = Given(A)
    assert abs(float(operator.trace(SIZE - 1, method="xtrace") - FLAT.sum())) < 3


BAD = {
    "an unknown method": ({"method": "hutch"}, ValueError, "method: expected one of"),
    "too few samples": ({"method": "xtrace", "num_samples": 3}, ValueError, "num_samples"),
    "a seed": ({"method": "xtrace", "generator": 3}, TypeError, "torch.Generator"),
}
test_bad_arguments_raise = refused(BAD, lambda options: Given(matrix(FLAT)).trace(**options))


def xdiag_by_definition(A, count, generator):
    w = (2 * torch.randint(2, (count, len(A)), generator=generator) - 1).double()
    found = []
    for i in range(count):
        Q = torch.linalg.qr((torch.cat([w[:i], w[i + 1 :]]) @ A).T)[0]
        near = Q @ Q.T @ A
        found.append(near.diagonal() + w[i] * ((A - near) @ w[i]))
    found = torch.stack(found)
    return found.mean(0), found.std(0) / count**0.5


@rows("eigenvalues", [FAST, POLYNOMIAL, FLAT - 1.5])
def test_xdiag_is_that_of_its_definition(eigenvalues):
    A = matrix(eigenvalues)
    ours = Given(A).diagonal(8, method="xdiag", generator=seeded(1), return_error=True)
    assert_close(ours, xdiag_by_definition(A, 4, seeded(1)), rtol=1e-6, atol=1e-9)


def test_of_low_rank_and_of_small_matrices_xdiag_is_exact():
    low = matrix(torch.cat([torch.tensor([3.0, 1.0]).double(), torch.zeros(SIZE - 2).double()]))
    assert_close(Given(low).diagonal(8, method="xdiag"), low.diagonal())
    G = hog.GGNOperator(*problem("ReLU"))
    assert_close(G.diagonal(500, method="xdiag"), G.to_dense().diagonal())


@rows("function", [torch.exp, torch.log, lambda x: x**3], ids=["exp", "log", "cube"])  # fmt: skip
def test_functions_of_matrices(function):
    A, b = matrix(FLAT), torch.randn(SIZE, 2, generator=seeded(5)).double()
    values, Q = torch.linalg.eigh(A)
    expected = Q @ torch.diag(function(values)) @ Q.T @ b
    assert_close(Given(A).matrix_function(b, function, steps=25), expected)
    cube = Given(A).matrix_function(b[:, 0], lambda x: x**3, steps=4)
    assert_close(cube, A @ A @ A @ b[:, 0])  # exact for a polynomial of degree 3
    few = matrix(torch.tensor([1.0, 2.0]).double().repeat(SIZE // 2))  # the space ends early
    found = Given(few).matrix_function(b, torch.log, steps=30)
    values, Q = torch.linalg.eigh(few)
    assert_close(found, Q @ torch.diag(values.log()) @ Q.T @ b)
    assert not Given(A).matrix_function(b * 0, function).any()


def test_what_functions_of_a_matrix_refuse():
    values = torch.cat([torch.zeros(SIZE - 3), torch.tensor([1.0, 2.0, 3.0])]).double()
    A, b = Given(matrix(values - 0.1)), torch.randn(SIZE, generator=seeded(5)).double()
    density = A.spectral_density(2, generator=seeded(6))
    for apply in (lambda f: A.matrix_function(b, f), density.average):
        with pytest.raises(hog.errors.NonFiniteError, match=r"got nan at the eigenvalue -0\.1"):
            apply(torch.sqrt)
        with pytest.raises(hog.errors.ArgumentValueError, match="element by element"):
            apply(torch.sum)
    for wrong in (torch.nan, torch.inf):
        b[3] = wrong
        with pytest.raises(hog.errors.NonFiniteError, match="b: expected a finite number"):
            A.matrix_function(b, torch.exp)


def test_determinants():
    A = matrix(FLAT)
    found = Given(A).logdet(20, generator=seeded(4), return_error=True)
    assert abs(found.value - A.logdet()) < 4 * found.error < 3.0
    with pytest.raises(hog.errors.NotPositiveDefiniteError, match="damping"):
        Given(matrix(FLAT - 1.5)).logdet()
    loss, params, batch = problem("ReLU")
    G = hog.GGNOperator(loss, params, batch).damped(0.1)
    found = G.logdet(40, generator=seeded(4), return_error=True)
    assert abs(found.value - G.to_dense().logdet()) < 4 * found.error
