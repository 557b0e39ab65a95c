"""Meta-learning: inner loops that can be differentiated, on unmodified modules."""

from hoglib.meta.inner import adapt, inner_step
from hoglib.meta.maml import MAML
from hoglib.meta.rules import Rule, sgd

__all__ = ["MAML", "Rule", "adapt", "inner_step", "sgd"]
