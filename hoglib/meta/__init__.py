"""Meta-learning: inner loops that can be differentiated, on unmodified modules."""

from hoglib.meta.first_order import IMAML, Reptile
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.hypergradient import Hypergradient, LeaveKOut, hypergradient, leave_k_out
from hoglib.meta.implicit import Residual
from hoglib.meta.inner_loop import adapt, inner_step
from hoglib.meta.learner import Learner
from hoglib.meta.maml import MAML, multi_step_weights
from hoglib.meta.optimizers import RULES, adam, adamw, momentum, rmsprop, scheduled, sgd
from hoglib.meta.tasks import Shard, shard

__all__ = [
    "IMAML",
    "MAML",
    "RULES",
    "GradientTransformation",
    "Hypergradient",
    "Learner",
    "LeaveKOut",
    "Reptile",
    "Residual",
    "Shard",
    "adam",
    "adamw",
    "adapt",
    "hypergradient",
    "inner_step",
    "leave_k_out",
    "momentum",
    "multi_step_weights",
    "rmsprop",
    "scheduled",
    "sgd",
    "shard",
]
