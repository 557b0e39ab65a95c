"""Pytree algebra against the same algebra on one vector."""

from collections import namedtuple

import pytest
import torch

from hoglib._core import pytree

Pair = namedtuple("Pair", ["first", "second"])


def tree(seed):
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {"a": rand(2, 3), "b": [rand(4), Pair(rand(), (rand(0), rand(1, 2)))]}


def vector(t):
    return torch.cat([leaf.reshape(-1) for leaf in pytree.leaves(t)])


def test_algebra_is_that_of_vectors():
    a, b = tree(0), tree(1)
    torch.testing.assert_close(vector(pytree.add(a, b, alpha=-0.5)), vector(a) - 0.5 * vector(b))
    torch.testing.assert_close(vector(pytree.scale(a, 3.0)), 3 * vector(a))
    torch.testing.assert_close(pytree.dot(a, b), vector(a) @ vector(b))
    torch.testing.assert_close(pytree.norm(a), vector(a).norm())


def test_dot_of_complex_leaves_is_hermitian():
    a = {"z": torch.tensor([1 + 2j])}
    assert pytree.dot(a, a) == 5
    assert pytree.norm(a) == pytest.approx(5**0.5)
