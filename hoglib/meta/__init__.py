"""Meta-learning: inner loops that can be differentiated, on unmodified modules."""

from hoglib.meta.inner import adapt, inner_step
from hoglib.meta.maml import MAML
from hoglib.meta.rules import RULES, Rule, adam, adamw, momentum, rmsprop, sgd

__all__ = [
    "MAML",
    "RULES",
    "Rule",
    "adam",
    "adamw",
    "adapt",
    "inner_step",
    "momentum",
    "rmsprop",
    "sgd",
]
