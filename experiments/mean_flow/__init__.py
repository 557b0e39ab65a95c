"""Samples in one step, by mean flows."""

from experiments.mean_flow.experiment import MeanFlow

__all__ = ["MeanFlow"]
