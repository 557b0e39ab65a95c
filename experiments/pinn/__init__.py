"""Equations solved by networks (PINN): Poisson, heat, a clamped plate, Allen-Cahn."""

from experiments.pinn.experiment import Pinn
from experiments.pinn.least_squares import LeastSquares
from experiments.pinn.squares import Square

__all__ = ["LeastSquares", "Pinn", "Square"]
