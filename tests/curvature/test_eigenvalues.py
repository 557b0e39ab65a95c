"""Eigenpairs by thick-restart Lanczos against dense ones, and against SciPy in products."""

import math

import pytest
import scipy.sparse.linalg
import torch
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature.algebra import eigenvalues
from hoglib.curvature.algebra.eigenvalues import Basis
from tests.curvature.problems import F64, Given, draw, matrix
from tests.refused import refused
from tests.rows import rows

ENDS = ["LM", "LA", "SA", "BE", "SM"]


def at(values, k, which):
    """k of ascending values, as SciPy counts them."""
    if which == "BE":
        return torch.cat([values[: k // 2], values[len(values) - (k - k // 2) :]])
    order = {"LM": -values.abs(), "SM": values.abs(), "LA": -values, "SA": values}[which]
    return values[order.argsort()[:k]].sort().values


def random_symmetric(size):
    A = draw(size, size)
    return (A + A.T) / (2 * size) ** 0.5


MATRICES = {
    "random": random_symmetric(120),
    "random, of 21": random_symmetric(21),
    "decaying": matrix(torch.logspace(0, -6, 100)),
    "outliers over a bulk": matrix([10.0, 5, 3, 2, 1.5, *(0.01 * draw(150)).tolist()]),
    "clustered": matrix([*(1 + 1e-2 * draw(10).abs()).tolist(), *draw(120, seed=1).sigmoid().tolist()]),
    "evenly spaced": matrix(torch.linspace(-1, 1.1, 150, dtype=F64)),
    "of rank three": matrix([3.0, 2.0, -1.0, *([0.0] * 80)]),
    "a multiple of the identity": 2 * torch.eye(60, dtype=F64),
    "zero": torch.zeros(40, 40, dtype=F64),
}  # fmt: skip
EASY = {name: A for name, A in MATRICES.items() if name not in ("decaying", "of rank three")}


@pytest.mark.parametrize("cached", [eigenvalues.CHEAP, 0], ids=["a larger basis", "SciPy's basis"])
@pytest.mark.parametrize("which", ["LM", "LA", "SA", "BE"])
@pytest.mark.parametrize("name", MATRICES)
def test_eigenpairs_in_no_more_products_than_scipy(name, which, cached, monkeypatch):
    monkeypatch.setattr(eigenvalues, "CHEAP", cached)
    A = MATRICES[name]
    which = {"SA": "LM", "BE": "LA"}.get(which, which) if name not in EASY else which
    true, size = torch.linalg.eigvalsh(A), float(torch.linalg.matrix_norm(A, 2))
    for k in (2, 5):
        pairs = Given(A).eigsh(k, which=which)
        assert_close(pairs.values, at(true, k, which), rtol=1e-8, atol=1e-8 * size)
        bound = (1e-10 * pairs.values.abs()).clamp(min=1e-14 * size)
        assert bool((pairs.residuals <= 1.1 * bound).all())
        assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(k, dtype=F64), atol=1e-12, rtol=0)
        theirs = Given(A)
        start = torch.randn(len(A), dtype=F64, generator=torch.Generator().manual_seed(0))
        if name != "zero":  # which ARPACK refuses
            scipy.sparse.linalg.eigsh(
                theirs.to_scipy(), k, which=which, tol=1e-10, v0=start.numpy()
            )
            assert pairs.products <= theirs.count


@rows("which", ENDS)
def test_eigenvalues_nearest_to_zero_and_of_few_dimensions(which):
    for size, k in ((2, 1), (3, 2), (9, 4), (20, 20), (40, 30), (24, 2)):
        A = random_symmetric(size)
        pairs = Given(A).eigsh(k, which=which)
        assert_close(pairs.values, at(torch.linalg.eigvalsh(A), k, which), rtol=1e-7, atol=1e-9)
        assert float(pairs.residuals.max()) < 1e-9
        assert pairs.products <= size or which == "SM"


@rows("block", [1, 3, 8])
def test_a_repeated_eigenvalue_is_found_as_often_as_it_is(block):
    values = [3.0, 3.0, 3.0, *torch.linspace(0, 2, 150).tolist()]
    pairs = Given(matrix(values)).eigsh(4, which="LA", block=block)
    assert "which='LA'" in repr(pairs)
    assert len(repr(pairs)) < 120
    assert_close(pairs.values, torch.tensor([2.0, 3.0, 3.0, 3.0], dtype=F64))
    assert float(pairs.residuals.max()) < 1e-9


# squares of numbers above 1e19 and below 1e-22 are not in the range of float32
@rows(
    ("scale", "dtype"),
    [
        (1e-150, F64),
        (1e150, F64),
        (1e-30, torch.float32),
        (1e-23, torch.float32),
        (1e25, torch.float32),
    ],
)
def test_the_size_of_a_matrix_changes_nothing(scale, dtype):
    A = MATRICES["outliers over a bulk"].to(dtype)
    one, other = Given(A).eigsh(3), Given(scale * A).eigsh(3)
    assert_close(other.values / scale, one.values)
    assert abs(one.products - other.products) <= 1
    assert 0 < float(other.residuals.max() / scale) < 1e-4
    positive = (
        Given(A @ A + torch.eye(len(A), dtype=dtype)),
        Given((A @ A + torch.eye(len(A), dtype=dtype)) * scale),
    )
    logs = [float(H.logdet(generator=torch.Generator().manual_seed(0))) for H in positive]
    assert abs(logs[1] - len(A) * math.log(scale) - logs[0]) < 1e-5 * abs(logs[1])


@rows("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    A = MATRICES["outliers over a bulk"].to(dtype)
    pairs = Given(A.to(dtype)).eigsh(3)
    assert pairs.values.dtype == pairs.vectors.dtype == dtype
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.05}[dtype]
    expected = torch.tensor([3.0, 5, 10], dtype=F64)
    assert_close(pairs.values.double(), expected, rtol=tolerance, atol=0)
    assert float(pairs.residuals.max()) < 10 * tolerance


def test_results_are_those_of_the_generator_alone():
    operator, state = Given(MATRICES["random"]), torch.get_rng_state()
    first = operator.eigsh(2)
    assert torch.equal(operator.eigsh(2).vectors, first.vectors)
    other = operator.eigsh(2, generator=torch.Generator().manual_seed(4))
    assert not torch.equal(other.vectors, first.vectors)
    assert_close(other.values, first.values)
    assert torch.equal(torch.get_rng_state(), state)


def test_too_few_fillings_of_the_basis():
    operator = Given(matrix(torch.linspace(1, 2, 300, dtype=F64)))
    with pytest.raises(RuntimeError, match=r"got [0-4] after \d+ products .*raise max_iter or tol"):
        operator.eigsh(5, max_iter=2)
    with pytest.raises(ValueError, match="max_iter: expected an integer of at least 1"):
        operator.eigsh(5, max_iter=0)
    for options, words in (({"block": 0}, "at least 1"), ({"k": 301}, "at most 300"), ({"which": "largest"}, "LM, LA, SA, BE, SM")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            operator.eigsh(**options)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")], ids=str)
def test_a_basis_on_a_device(device, monkeypatch):
    """It has the dtype of the operator, and residuals of its rounding."""
    made = []

    def basis(*args):
        made.append(Basis(*args))
        return made[-1]

    monkeypatch.setattr(eigenvalues, "Basis", basis)
    monkeypatch.setattr(eigenvalues, "CHEAP", 0)  # 21 vectors are multiplied, in either dtype
    A = MATRICES["random"]
    true = at(torch.linalg.eigvalsh(A), 3, "LM")
    pairs = Given(A).eigsh(3, basis_device=device)
    assert made[-1].V.nbytes == 22 * len(A) * 8
    assert pairs.values.dtype == pairs.vectors.dtype == F64
    assert_close(pairs.values, true, rtol=1e-10, atol=0)
    assert float((pairs.residuals / pairs.values.abs()).max()) < 2e-10


OF_THE_BASIS = {
    "a disk": ({"basis_device": "disk"}, TypeError, "basis_device"),
    "half a device": ({"basis_device": 1.5}, TypeError, "basis_device"),
}
test_wrong_options_of_the_basis = refused(
    OF_THE_BASIS, lambda option: Given(MATRICES["random"]).eigsh(3, **option)
)


@pytest.mark.gpu
@rows("name", ["random", "of rank three", "zero", "outliers over a bulk"])
def test_vectors_stay_on_the_device(name):
    A = MATRICES[name]
    func = lambda p, b: p @ b @ p / 2  # noqa: E731
    operator = hog.HessianOperator(func, torch.zeros(len(A), dtype=F64, device="cuda"), A.cuda())
    pairs = operator.eigsh(3)
    assert pairs.values.device.type == pairs.vectors.device.type == "cuda"
    assert_close(pairs.values.cpu(), at(torch.linalg.eigvalsh(A), 3, "LM"), rtol=1e-7, atol=1e-12)
    hosted = operator.eigsh(3, basis_device="cpu")
    assert hosted.values.device.type == hosted.vectors.device.type == "cuda"
    assert_close(hosted.values, pairs.values, rtol=1e-7, atol=1e-12)
