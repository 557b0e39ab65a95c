"""Verified custom Functions: tensors first, options keyword-only, differentiable to any order."""

from hoglib.ops._conv import conv1d, conv2d, conv3d
from hoglib.ops._cross_entropy import softmax_cross_entropy
from hoglib.ops._define import define
from hoglib.ops._distance import cdist, pairwise_distance, pdist
from hoglib.ops._embedding_bag import embedding_bag
from hoglib.ops._external import external
from hoglib.ops._gradient import (
    clip_gradient,
    clipped_gradient_linear,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)
from hoglib.ops._hardsigmoid import hardsigmoid
from hoglib.ops._kinks import clamp, relu, scaled_activation, smooth_l1, split_signs
from hoglib.ops._linear import linear, linear_act
from hoglib.ops._pointwise import exp, power, quadratic, sigmoid, square, swish, tanh
from hoglib.ops._products import bias_add, matmul, mul
from hoglib.ops._reduce import amax, logsumexp, mean, sum
from hoglib.ops._remat import remat
from hoglib.ops._scatter_reduce import index_reduce, scatter_reduce
from hoglib.ops._segment_reduce import segment_reduce
from hoglib.ops._sinh import sinh
from hoglib.ops._sparse import sparse_mm

__all__ = [
    "amax",
    "bias_add",
    "cdist",
    "clamp",
    "clip_gradient",
    "clipped_gradient_linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "define",
    "embedding_bag",
    "exp",
    "external",
    "hardsigmoid",
    "index_reduce",
    "linear",
    "linear_act",
    "logsumexp",
    "matmul",
    "mean",
    "mul",
    "pairwise_distance",
    "pdist",
    "power",
    "quadratic",
    "relu",
    "remat",
    "reverse_gradient",
    "scale_gradient",
    "scaled_activation",
    "scatter_reduce",
    "segment_reduce",
    "sigmoid",
    "sinh",
    "smooth_l1",
    "softmax_cross_entropy",
    "sparse_mm",
    "split_signs",
    "square",
    "stop_gradient",
    "straight_through",
    "sum",
    "swish",
    "tanh",
]
