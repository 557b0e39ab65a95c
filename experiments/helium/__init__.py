"""The ground state of helium by variational Monte Carlo."""

from experiments.helium.experiment import Helium, Moves

__all__ = ["Helium", "Moves"]
