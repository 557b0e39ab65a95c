"""Finite differences: their steps, and the error that an element's difference knows of itself."""

import torch

from hoglib._core.numerics import element_differences


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
