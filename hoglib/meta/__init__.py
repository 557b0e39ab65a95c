"""Meta-learning: inner loops that can be differentiated, on unmodified modules."""

from hoglib.meta.hypergradient import Hypergradient, hypergradient
from hoglib.meta.imaml import IMAML
from hoglib.meta.implicit import Residual
from hoglib.meta.inner import adapt, inner_step
from hoglib.meta.maml import MAML, multi_step_weights
from hoglib.meta.reptile import Reptile
from hoglib.meta.rules import RULES, Rule, adam, adamw, momentum, rmsprop, sgd
from hoglib.meta.tasks import shard

__all__ = [
    "IMAML",
    "MAML",
    "RULES",
    "Hypergradient",
    "Reptile",
    "Residual",
    "Rule",
    "adam",
    "adamw",
    "adapt",
    "hypergradient",
    "inner_step",
    "momentum",
    "multi_step_weights",
    "rmsprop",
    "sgd",
    "shard",
]
