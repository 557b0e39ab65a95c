"""Learning to reweight wrong labels."""

from experiments.reweight.experiment import Reweighting

__all__ = ["Reweighting"]
