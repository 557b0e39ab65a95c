"""Penalties on gradients by inputs and parameters, and on Jacobians; forces; a check of penalties."""

from hoglib.penalties import critics, jacobians
from hoglib.penalties.checking import check
from hoglib.penalties.critics import *
from hoglib.penalties.energies import EnergyForces, EnergyForcesHessian, forces
from hoglib.penalties.evaluation import PenaltyWithOutputs
from hoglib.penalties.jacobians import *
from hoglib.penalties.module import GradientPenalty
from hoglib.penalties.options import Options

__all__ = [
    "EnergyForces",
    "EnergyForcesHessian",
    "GradientPenalty",
    "Options",
    "check",
    "forces",
    "PenaltyWithOutputs",
    *critics.__all__,
    *jacobians.__all__,
]
