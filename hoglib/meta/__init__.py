"""Meta-learning: inner loops that can be differentiated, on unmodified modules."""

from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.hypergradient import Hypergradient, LeaveKOut, hypergradient, leave_k_out
from hoglib.meta.implicit import Residual, fixed_point, root
from hoglib.meta.inner_loop import adapt, inner_step
from hoglib.meta.learner import Learner
from hoglib.meta.learners import IMAML, MAML, Reptile, multi_step_weights
from hoglib.meta.module_loop import LearnerOptions
from hoglib.meta.optimizers import (
    RULES,
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    momentum,
    radam,
    rmsprop,
    scheduled,
    sgd,
)
from hoglib.meta.tasks import Shard, shard
from hoglib.meta.training import TrainingOptions

__all__ = [
    "IMAML",
    "MAML",
    "RULES",
    "GradientTransformation",
    "Hypergradient",
    "Learner",
    "LearnerOptions",
    "LeaveKOut",
    "Reptile",
    "Residual",
    "Shard",
    "TrainingOptions",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adapt",
    "fixed_point",
    "hypergradient",
    "inner_step",
    "leave_k_out",
    "momentum",
    "multi_step_weights",
    "radam",
    "rmsprop",
    "root",
    "scheduled",
    "sgd",
    "shard",
]
