"""Callbacks and a mix-in for second-order training. The only part of hoglib that imports lightning."""

from hoglib.lightning.annealing import MetaAnnealing
from hoglib.lightning.audit import SecondOrderAudit, second_order_problems
from hoglib.lightning.curvature import CurvatureMonitor, Measurement
from hoglib.lightning.eval_gradients import EvalGradients
from hoglib.lightning.rng import RNGState

__all__ = [
    "CurvatureMonitor",
    "EvalGradients",
    "Measurement",
    "MetaAnnealing",
    "RNGState",
    "SecondOrderAudit",
    "second_order_problems",
]
