"""A deep autoencoder by NewtonCG and KFAC, beside Adam."""

from experiments.autoencoder.experiment import Race

__all__ = ["Race"]
