"""Finite differences: their steps, and the error that an element's difference knows of itself."""

import pytest
import torch

from hoglib._core import element_differences, finite_differences


@pytest.mark.parametrize("length", [1e-8, 1.0, 1e8])
def test_the_directional_derivative_of_a_smooth_function(length):
    x, v = torch.tensor([0.3, -1.2]).double(), length * torch.tensor([2.0, 0.5]).double()
    (found,) = finite_differences.directional_derivative(lambda p: [p[0].sin()], [x], [v])
    torch.testing.assert_close(found, x.cos() * v, rtol=1e-9, atol=0.0)


def test_random_numbers_are_the_same_on_both_sides():
    x, v = torch.ones(3).double(), torch.ones(3).double()

    def noisy(p):
        return [p[0] + torch.rand(3, dtype=torch.float64)]

    before = torch.get_rng_state()
    (slope,) = finite_differences.central_differences(noisy, [x], [v], (1e-3,))
    torch.testing.assert_close(slope[0], v, rtol=1e-9, atol=0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_differences_know_their_error():
    def f(t):
        return [t.sin(), (1e3 * t).sin(), t.abs()]

    at = torch.tensor([0.3, 1.2], dtype=torch.float64)
    v = torch.ones_like(at)
    slope = element_differences.slope(f, [at], 0, v)
    for value, right, error in zip(
        slope.values, [at.cos(), 1e3 * (1e3 * at).cos(), v], slope.errors, strict=True
    ):
        assert bool(((value - right).abs() <= 5 * error).all())
        assert bool((error < 1e-4 * right.abs().max()).all())


def test_differences_of_what_rounds_to_float32_know_their_error():
    """Its values move in steps: the slopes at short steps are zero, agree with one another, and are wrong."""
    at = torch.linspace(-1.0, 2.0, 50, dtype=torch.float64)
    slope = element_differences.slope(
        lambda t: [(t.float() + 1e3).sin().double()], [at], 0, torch.ones_like(at)
    )
    off = (slope.values[0] - (at + 1e3).cos()).abs()
    assert bool((off <= 5 * slope.errors[0]).all())
    assert float(off.max()) < 0.1


def test_differences_see_kinks():
    at = torch.zeros(2, dtype=torch.float64)
    slope = element_differences.slope(lambda t: [t.abs(), t.sin()], [at], 0, torch.ones_like(at))
    assert slope.kinks[0].all()
    assert not slope.kinks[1].any()
