"""Assertions for tests of code that is differentiated twice."""

from hoglib._core.tolerances import TOLERANCES, Tolerance
from hoglib.testing.assertions import assert_double_differentiable

__all__ = ["TOLERANCES", "Tolerance", "assert_double_differentiable"]
