"""Gradient descent and the spectrum of its Hessian."""

from experiments.curvature.experiment import Descent

__all__ = ["Descent"]
