"""Spectral densities against dense eigenvalues, exact moments and known laws."""

import math

import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature.algebra import estimates
from tests.curvature.problems import F64, Given, matrix, problem, seeded
from tests.refused import refused
from tests.rows import rows

VALUES = [-3.0, -0.2, 0.0, 0.1, 0.4, 0.9, 1.5, 2.5, *([0.05] * 30)]


def smoothed(eigenvalues, grid, width):
    z = (grid[:, None] - eigenvalues) / width
    return torch.exp(-z.square() / 2).mean(1) / (width * math.sqrt(2 * math.pi))


@rows(
    ("name", "kind"), [("LayerNorm", hog.HessianOperator), ("transformer block", hog.GGNOperator)]
)
def test_the_density_of_a_network_is_the_dense_one(name, kind):
    operator = kind(*problem(name))
    found = operator.spectral_density(60, steps=20, generator=seeded())
    true = smoothed(torch.linalg.eigvalsh(operator.to_dense()), found.grid, found.width)
    assert float(((found.density - true).abs() / (found.error + 1e-3 * true.max())).max()) < 6
    assert float((found.error / true.max()).max()) < 0.25  # so that the above says something
    whole = torch.trapezoid(found.density, found.grid)
    assert_close(whole, torch.tensor(1.0, dtype=F64), rtol=1e-5, atol=0)


@rows("dtype", [F64, torch.float32])
@rows("steps", [1, 3, 8])
def test_moments_below_twice_the_steps_are_exact(steps, dtype):
    A, samples = matrix(torch.linspace(-1, 1, 40, dtype=F64)), 5
    found = Given(A.to(dtype)).spectral_density(samples, steps=steps, generator=seeded(3))
    assert found.nodes.shape == found.weights.shape == (samples, steps)
    assert found.products == samples * steps
    bits = torch.randint(2, (samples, 40), generator=seeded(3))
    v = (2 * bits - 1).double() / 40**0.5
    powers, worst = v, 0.0
    for power in range(2 * steps + 1):
        exact = (powers * v).sum(1)
        off = float(((found.weights * found.nodes**power).sum(1) - exact).abs().max())
        if power < 2 * steps:
            worst = max(worst, off)
        else:
            assert off > 5 * worst  # a quadrature of so many nodes knows no more
        powers = powers @ A
    assert worst < (1e-12 if dtype == F64 else 1e-5)


@rows("scale", [1e-20, 1e20])
def test_the_unit_of_the_matrix_does_not_matter(scale):
    A = matrix(torch.tensor(VALUES, dtype=F64))  # of fewer distinct values than steps
    pairs = (Given(A * unit) for unit in (scale, 1.0))
    ours, plain = (one.spectral_density(4, steps=20, generator=seeded()) for one in pairs)
    for power in (1, 2, 3):
        moments = ((each.weights * each.nodes**power).sum(1) for each in (ours, plain))
        assert_close(next(moments) / scale**power, next(moments), rtol=1e-6, atol=1e-9)


def test_averages_of_functions_and_their_errors():
    A = matrix(VALUES)
    eigenvalues = torch.linalg.eigvalsh(A)
    density = Given(A).spectral_density(4000, steps=12, generator=seeded())
    for f in (torch.ones_like, torch.exp, torch.square, lambda x: x):
        value, error = density.average(f)
        assert abs(value - f(eigenvalues).mean()) <= 4 * error + 1e-12
        assert error < 0.05
    one = Given(A).spectral_density(1, generator=seeded())
    assert float(one.average(torch.exp)[1]) == math.inf
    assert bool(one.error.isinf().all())


def test_standard_errors_are_those_of_many_runs():
    A = matrix(VALUES)
    runs = [Given(A).spectral_density(4, steps=9, generator=seeded(s)).average(torch.exp) for s in range(300)]  # fmt: skip
    values, errors = (torch.stack(part) for part in zip(*runs, strict=True))
    # a mean of squared errors has the variance of the estimates: 300 degrees of freedom and 900
    assert 0.75 < float(errors.square().mean() / values.var()) < 1.3
    off = values.mean() - torch.linalg.eigvalsh(A).exp().mean()
    assert abs(off) < 4 * values.std() / 300**0.5


@pytest.mark.parametrize("samples_at_once", [1, 2, 7])
def test_samples_in_several_blocks_are_the_same(samples_at_once, monkeypatch):
    whole = Given(matrix(VALUES)).spectral_density(7, steps=6, generator=seeded())
    monkeypatch.setattr(estimates, "BASES_AT_ONCE", samples_at_once * 6 * len(VALUES) * 8)
    parts = Given(matrix(VALUES)).spectral_density(7, steps=6, generator=seeded())
    assert_close(parts.density, whole.density)
    assert_close(parts.nodes, whole.nodes)


KNOWN = {
    "zero": (torch.zeros(9, 9, dtype=F64), [0.0]),
    "a multiple of the identity": (3 * torch.eye(9, dtype=F64), [3.0]),
    "two values": (torch.diag(torch.tensor([1.0, 5, 5, 5], dtype=F64)), [1.0, 5.0]),
    "one number": (torch.tensor([[-2.0]], dtype=F64), [-2.0]),
    "a projection": (matrix([1.0] * 5 + [0.0] * 20), [0.0, 1.0]),
}


@rows("name", KNOWN)
def test_a_space_that_ends_before_the_steps(name):
    A, values = KNOWN[name]
    found = Given(A).spectral_density(3, steps=50, generator=seeded())
    assert found.products <= 3 * len(values)
    assert found.nodes.shape[1] == min(50, len(A))
    there = found.nodes[found.weights > 1e-12]
    distance = (there[:, None] - torch.tensor(values, dtype=F64)).abs().amin(1)
    assert float(distance.max()) < 1e-10
    assert_close(found.weights.sum(1), torch.ones(3, dtype=F64))
    assert found.grid[0] < min(values)
    assert found.grid[-1] > max(values)


def test_samples_of_different_lengths():
    # a sign vector with both signs alike in the first two spans one dimension, others two
    A = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=F64)
    found = Given(A).spectral_density(20, generator=seeded())
    assert_close((found.weights * found.nodes).sum(1).abs().sort().values.unique().round(), torch.tensor([1.0, 3.0], dtype=F64))  # fmt: skip
    assert found.products == 20
    mixed = torch.block_diag(A, torch.diag(torch.tensor([7.0, 9.0], dtype=F64)))
    found = Given(mixed).spectral_density(20, generator=seeded())
    assert found.products == 20 * 3
    bits = torch.randint(2, (20, 4), generator=seeded())
    v = (2 * bits - 1).double() / 2
    values, vectors = torch.linalg.eigh(mixed)
    exact = ((v @ vectors).square() * values.exp()).sum(1)
    assert_close((found.weights * found.nodes.exp()).sum(1), exact)


def test_lower_precision_and_repetition():
    A, state = matrix(VALUES), torch.get_rng_state()
    for dtype, atol in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        found = Given(A.to(dtype)).spectral_density(5, steps=10, generator=seeded())
        exact = Given(A).spectral_density(5, steps=10, generator=seeded())
        assert found.density.dtype == F64
        for f in (torch.square, torch.tanh):
            assert_close(found.average(f)[0], exact.average(f)[0], rtol=atol, atol=atol)
    again = Given(A).spectral_density(5, steps=10, generator=seeded())
    assert torch.equal(again.density, exact.density)
    assert torch.equal(torch.get_rng_state(), state)


ERRORS = {
    "no samples": ({"num_samples": 0}, ValueError, "num_samples: expected an integer of at least 1"),
    "no steps": ({"steps": 0}, ValueError, "steps: expected an integer of at least 1"),
    "a width of zero": ({"width": 0.0}, ValueError, "width: expected a number greater than 0"),
    "a seed": ({"generator": 3}, TypeError, "generator: expected a torch.Generator"),
}  # fmt: skip


test_errors = refused(ERRORS, lambda given: Given(matrix(VALUES)).spectral_density(**given))
