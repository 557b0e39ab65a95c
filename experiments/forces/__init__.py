"""Potentials learned from energies and forces."""

from experiments.forces.clusters import Clusters
from experiments.forces.experiment import Potentials

__all__ = ["Clusters", "Potentials"]
