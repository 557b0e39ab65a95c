"""Verified custom Functions: tensors first, options keyword-only, differentiable to any order."""

from hoglib.ops._conv import conv1d, conv2d, conv3d
from hoglib.ops._cross_entropy import softmax_cross_entropy
from hoglib.ops._ctc_loss import ctc_loss
from hoglib.ops._define import define
from hoglib.ops._external import external
from hoglib.ops._gradient import (
    clip_gradient,
    clipped_gradient_linear,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)
from hoglib.ops._grid_sample import grid_sample
from hoglib.ops._kinks import clamp, relu, scaled_activation, smooth_l1, split_signs
from hoglib.ops._linear import linear, linear_act
from hoglib.ops._pointwise import exp, power, quadratic, sigmoid, square, swish, tanh
from hoglib.ops._products import bias_add, matmul, mul
from hoglib.ops._reduce import amax, logsumexp, mean, sum
from hoglib.ops._remat import remat
from hoglib.ops._sinh import sinh

__all__ = [
    "amax",
    "bias_add",
    "clamp",
    "clip_gradient",
    "clipped_gradient_linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "ctc_loss",
    "define",
    "exp",
    "external",
    "grid_sample",
    "linear",
    "linear_act",
    "logsumexp",
    "matmul",
    "mean",
    "mul",
    "power",
    "quadratic",
    "relu",
    "remat",
    "reverse_gradient",
    "scale_gradient",
    "scaled_activation",
    "sigmoid",
    "sinh",
    "smooth_l1",
    "softmax_cross_entropy",
    "split_signs",
    "square",
    "stop_gradient",
    "straight_through",
    "sum",
    "swish",
    "tanh",
]
