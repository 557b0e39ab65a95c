"""Meta-learning: inner loops that can be differentiated, on unmodified modules."""

from hoglib.meta import optimizers
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.hypergradient import Hypergradient, LeaveKOut, hypergradient, leave_k_out
from hoglib.meta.implicit import Residual, fixed_point, root
from hoglib.meta.inner_loop import adapt, inner_step
from hoglib.meta.learner import Learner
from hoglib.meta.learners import IMAML, MAML, Reptile, multi_step_weights
from hoglib.meta.module_loop import LearnerOptions
from hoglib.meta.optimizers import *
from hoglib.meta.tasks import Shard, shard
from hoglib.meta.training import TrainingOptions

__all__ = [
    "IMAML",
    "MAML",
    "GradientTransformation",
    "Hypergradient",
    "Learner",
    "LearnerOptions",
    "LeaveKOut",
    "Reptile",
    "Residual",
    "Shard",
    "TrainingOptions",
    "adapt",
    "fixed_point",
    "hypergradient",
    "inner_step",
    "leave_k_out",
    "multi_step_weights",
    "root",
    "shard",
    *optimizers.__all__,
]
