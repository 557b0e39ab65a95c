"""The training digits behind a classifier's errors."""

from experiments.influence.experiment import Influence

__all__ = ["Influence"]
