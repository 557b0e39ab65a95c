"""The version, alone in a file so that building a wheel need not import torch."""

__version__ = "0.2.0"
