"""Verified custom Functions: tensors first, options keyword-only, differentiable to any order."""

from hoglib.ops._conv import conv1d, conv2d, conv3d
from hoglib.ops._external import external
from hoglib.ops._linear import linear, linear_act
from hoglib.ops._pointwise import sigmoid, swish, tanh
from hoglib.ops._remat import remat

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "external",
    "linear",
    "linear_act",
    "remat",
    "sigmoid",
    "swish",
    "tanh",
]
