"""Values of digits through a whole training."""

from experiments.data_values.experiment import DataValues
from experiments.shared.mislabelled import Mislabelled

__all__ = ["DataValues", "Mislabelled"]
