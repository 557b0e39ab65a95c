"""Custom Functions with verified derivatives: tensors first, differentiable to any order."""

from hoglib._core.recomputation import remat
from hoglib.ops._attention import attention_dropout_mask, scaled_dot_product_attention
from hoglib.ops._batch_norm import batch_norm, instance_norm
from hoglib.ops._conv import conv1d, conv2d, conv3d
from hoglib.ops._cross_entropy import softmax_cross_entropy
from hoglib.ops._ctc_loss import ctc_loss
from hoglib.ops._define import define
from hoglib.ops._determinants import det, logdet, slogdet
from hoglib.ops._distance import cdist, pairwise_distance, pdist
from hoglib.ops._embedding_bag import embedding_bag
from hoglib.ops._external import external
from hoglib.ops._gradient_ops import (
    clip_gradient,
    clipped_gradient_linear,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)
from hoglib.ops._grid_sample import grid_sample
from hoglib.ops._indexing import index_reduce, scatter_reduce, segment_reduce
from hoglib.ops._layer_norm import layer_norm
from hoglib.ops._linear import linear, linear_act
from hoglib.ops._linear_cross_entropy import linear_cross_entropy
from hoglib.ops._losses import (
    huber_loss,
    mse_loss,
    multi_margin_loss,
    multilabel_margin_loss,
    soft_margin_loss,
)
from hoglib.ops._piecewise import (
    clamp,
    hardsigmoid,
    relu,
    scaled_activation,
    smooth_l1,
    split_signs,
)
from hoglib.ops._pointwise import exp, glu, power, quadratic, sigmoid, sinh, square, swish, tanh
from hoglib.ops._products import bias_add, matmul, mul, sparse_mm
from hoglib.ops._reductions import amax, logsumexp, mean, sum
from hoglib.ops._solve import cholesky_inverse, solve, solve_ex, tensorsolve
from hoglib.ops._weight_norm import weight_norm

__all__ = [
    "amax",
    "attention_dropout_mask",
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
