"""Verified custom Functions: tensors first, options keyword-only, differentiable to any order."""

from hoglib.ops._attention import scaled_dot_product_attention
from hoglib.ops._batch_norm import batch_norm
from hoglib.ops._cholesky_inverse import cholesky_inverse
from hoglib.ops._conv import conv1d, conv2d, conv3d
from hoglib.ops._cross_entropy import softmax_cross_entropy
from hoglib.ops._ctc_loss import ctc_loss
from hoglib.ops._define import define
from hoglib.ops._distance import cdist, pairwise_distance, pdist
from hoglib.ops._embedding_bag import embedding_bag
from hoglib.ops._external import external
from hoglib.ops._glu import glu
from hoglib.ops._gradient import (
    clip_gradient,
    clipped_gradient_linear,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)
from hoglib.ops._grid_sample import grid_sample
from hoglib.ops._hardsigmoid import hardsigmoid
from hoglib.ops._instance_norm import instance_norm
from hoglib.ops._kinks import clamp, relu, scaled_activation, smooth_l1, split_signs
from hoglib.ops._layer_norm import layer_norm
from hoglib.ops._linalg_det import det, logdet, slogdet
from hoglib.ops._linalg_solve import solve, solve_ex, tensorsolve
from hoglib.ops._linear import linear, linear_act
from hoglib.ops._linear_cross_entropy import linear_cross_entropy
from hoglib.ops._margin import multi_margin_loss, multilabel_margin_loss
from hoglib.ops._pointwise import exp, power, quadratic, sigmoid, square, swish, tanh
from hoglib.ops._products import bias_add, matmul, mul
from hoglib.ops._reduce import amax, logsumexp, mean, sum
from hoglib.ops._regression import huber_loss, mse_loss
from hoglib.ops._remat import remat
from hoglib.ops._scatter_reduce import index_reduce, scatter_reduce
from hoglib.ops._segment_reduce import segment_reduce
from hoglib.ops._sinh import sinh
from hoglib.ops._soft_margin import soft_margin_loss
from hoglib.ops._sparse import sparse_mm
from hoglib.ops._weight_norm import weight_norm

__all__ = [
    "amax",
    "batch_norm",
    "bias_add",
    "cdist",
    "cholesky_inverse",
    "clamp",
    "clip_gradient",
    "clipped_gradient_linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "ctc_loss",
    "define",
    "det",
    "embedding_bag",
    "exp",
    "external",
    "glu",
    "grid_sample",
    "hardsigmoid",
    "huber_loss",
    "index_reduce",
    "instance_norm",
    "layer_norm",
    "linear",
    "linear_act",
    "linear_cross_entropy",
    "logdet",
    "logsumexp",
    "matmul",
    "mean",
    "mse_loss",
    "mul",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "pairwise_distance",
    "pdist",
    "power",
    "quadratic",
    "relu",
    "remat",
    "reverse_gradient",
    "scale_gradient",
    "scaled_activation",
    "scaled_dot_product_attention",
    "scatter_reduce",
    "segment_reduce",
    "sigmoid",
    "sinh",
    "slogdet",
    "smooth_l1",
    "soft_margin_loss",
    "softmax_cross_entropy",
    "solve",
    "solve_ex",
    "sparse_mm",
    "split_signs",
    "square",
    "stop_gradient",
    "straight_through",
    "sum",
    "swish",
    "tanh",
    "tensorsolve",
    "weight_norm",
]
