"""Penalties on gradients by inputs and parameters, and on Jacobians; forces; a check of penalties."""

from hoglib.penalties.checking import check
from hoglib.penalties.critics import dragan, r1, r1_r2, r2, wgan_gp, zero_centred
from hoglib.penalties.energies import EnergyForces, EnergyForcesHessian, forces
from hoglib.penalties.jacobians import input_gradient, jacobian, lipschitz, sobolev
from hoglib.penalties.module import GradientPenalty
from hoglib.penalties.options import Options
from hoglib.penalties.parameters import parameter_gradient
from hoglib.penalties.terms import PenaltyWithOutputs

__all__ = [
    "EnergyForces",
    "EnergyForcesHessian",
    "GradientPenalty",
    "Options",
    "PenaltyWithOutputs",
    "check",
    "dragan",
    "forces",
    "input_gradient",
    "jacobian",
    "lipschitz",
    "parameter_gradient",
    "r1",
    "r1_r2",
    "r2",
    "sobolev",
    "wgan_gp",
    "zero_centred",
]
