"""Classifiers under adversarial attack."""

from experiments.robust.experiment import Robustness

__all__ = ["Robustness"]
