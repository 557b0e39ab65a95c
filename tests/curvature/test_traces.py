"""XTrace against its definition, known traces, and Hutchinson's estimator."""

import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from tests.curvature.problems import Given, problem

SIZE = 60
FAST, POLYNOMIAL = 0.6 ** torch.arange(SIZE).double(), 1 / torch.arange(1, SIZE + 1).double() ** 2
NAMES = ["geometric", "polynomial", "flat"]
FLAT = torch.linspace(1, 2, SIZE, dtype=torch.float64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def matrix(eigenvalues):
    """Symmetric, with these eigenvalues."""
    size = len(eigenvalues)
    Q = torch.linalg.qr(torch.randn(size, size, generator=seeded(), dtype=torch.float64))[0]
    return (Q * eigenvalues) @ Q.T


def by_definition(A, count, generator):
    """The mean over i of tr(Q_i^T A Q_i) and what is estimated beside, with Q_i of all others."""
    size = len(A)
    w = torch.randn(count, size, generator=generator).double()
    w *= size**0.5 / w.norm(dim=1, keepdim=True)
    found = []
    for i in range(count):
        others = torch.cat([w[:i], w[i + 1 :]])
        Q = torch.linalg.qr((others @ A).T)[0]
        rest = w[i] - Q @ (Q.T @ w[i])
        rest = rest * (size - count + 1) ** 0.5 / rest.norm()
        found.append((Q.T @ A @ Q).trace() + rest @ A @ rest)
    found = torch.stack(found)
    return found.mean(), found.std() / count**0.5


@pytest.mark.parametrize(
    "eigenvalues", [FAST, POLYNOMIAL, FLAT, FLAT - 1.5], ids=[*NAMES, "indefinite"]
)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_it_is_the_estimator_of_its_definition(eigenvalues, count):
    A = matrix(eigenvalues)
    for products in (2 * count, 2 * count + 1):
        operator = Given(A)
        ours = hog.curvature.xtrace(operator, products, generator=seeded(1), return_error=True)
        assert_close(ours, by_definition(A, count, seeded(1)), rtol=1e-6, atol=1e-9)
        assert operator.count == 2 * count


@pytest.mark.parametrize(
    ("eigenvalues", "to_hutchinson"), [(FAST, 0.05), (POLYNOMIAL, 0.1), (FLAT, 1.9)], ids=NAMES
)
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


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_a_matrix_of_low_rank_has_its_trace_exactly(rank):
    eigenvalues = torch.cat([torch.linspace(-1, 2, rank), torch.zeros(SIZE - rank)]).double()
    operator = Given(matrix(eigenvalues))
    trace, error = operator.trace(14, method="xtrace", generator=seeded(), return_error=True)
    assert_close(trace, eigenvalues.sum(), rtol=1e-12, atol=1e-12)
    assert error == 0
    assert operator.count == 7 + rank


def test_as_many_samples_as_rows_make_it_dense():
    A = matrix(FLAT)
    for products in (SIZE, 200):
        trace, error = Given(A).trace(products, method="xtrace", return_error=True)
        assert_close(trace, FLAT.sum())
        assert error == 0
    operator = Given(A)
    assert abs(float(operator.trace(SIZE - 1, method="xtrace") - FLAT.sum())) < 3


def test_of_a_network_in_float32_and_float64():
    operator = hog.GGNOperator(*problem("LayerNorm"))
    exact = operator.to_dense().trace()
    for dtype in (torch.float64, torch.float32):
        A = Given(operator.to_dense().to(dtype))
        trace, error = A.trace(20, method="xtrace", generator=seeded(), return_error=True)
        assert trace.dtype is error.dtype is dtype
        assert abs(float(trace - exact)) < 5 * float(error) + 1e-4 * float(exact)


def test_the_generator_decides():
    A = Given(matrix(POLYNOMIAL))
    first, again, other = (A.trace(8, method="xtrace", generator=seeded(s)) for s in (0, 0, 1))
    assert first == again != other
    torch.manual_seed(0)
    drawn = A.trace(8, method="xtrace")
    torch.manual_seed(0)
    assert A.trace(8, method="xtrace") == drawn


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"method": "hutch"}, ValueError, "method: expected one of"),
        ({"method": "xtrace", "num_samples": 3}, ValueError, "num_samples"),
        ({"method": "xtrace", "generator": 3}, TypeError, "torch.Generator"),
    ],
)
def test_bad_arguments_raise(options, kind, words):
    with pytest.raises(kind, match=words):
        Given(matrix(FLAT)).trace(**options)
