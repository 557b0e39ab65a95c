"""The training digits behind a classifier's errors."""

from experiments.influence.experiment import Influence
from experiments.shared.mislabelled import Mislabelled

__all__ = ["Influence", "Mislabelled"]
