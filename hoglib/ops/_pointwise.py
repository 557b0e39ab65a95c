"""Pointwise ops: each one is a formula and its partial derivatives."""

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops._define import define


def tanh(x: Tensor) -> Tensor:
    r"""Hyperbolic tangent.

        y = tanh(x)        dy/dx = 1 - y^2

    Shapes: x any; y like x. Only y is kept for the derivatives. Differentiable to any order, in
    reverse and forward mode, under vmap.
    Raises TypeError for an integer x.
    """
    arguments.differentiable("x", x)
    result: Tensor = _tanh(x)
    return result


def sigmoid(x: Tensor) -> Tensor:
    r"""Logistic function.

        y = 1 / (1 + exp(-x))        dy/dx = y (1 - y)

    Shapes: x any; y like x. Only y is kept for the derivatives. Differentiable to any order, in
    reverse and forward mode, under vmap.
    Raises TypeError for an integer x.
    """
    arguments.differentiable("x", x)
    result: Tensor = _sigmoid(x)
    return result


def swish(x: Tensor, beta: Tensor | float = 1.0) -> Tensor:
    r"""Swish with a learnable slope.

        y = x s(beta x)        s(z) = 1 / (1 + exp(-z))
        dy/dx = s (1 + beta x (1 - s))        dy/dbeta = x^2 s (1 - s)

    Shapes: x any; beta broadcasts to x, or x to beta; y like the two broadcast together. Only x and
    beta are kept. Differentiable to any order in both variables, in reverse and forward mode, under
    vmap; a beta that is a Python number is a constant.
    Raises TypeError for an integer x or beta tensor.
    Source: Ramachandran, Zoph and Le, Searching for Activation Functions, 2017, eq. 1.
    """
    arguments.differentiable("x", x)
    if isinstance(beta, Tensor):
        arguments.differentiable("beta", beta)
    result: Tensor = _swish(x, beta)
    return result


def _swish_forward(x: Tensor, beta: Tensor | float) -> Tensor:
    return x * torch.sigmoid(beta * x)


def _swish_by_x(x: Tensor, beta: Tensor | float, _: None) -> Tensor:
    s = torch.sigmoid(beta * x)
    return s * (1 + beta * x * (1 - s))


def _swish_by_beta(x: Tensor, beta: Tensor | float, _: None) -> Tensor:
    s = torch.sigmoid(beta * x)
    return x * (x * (s * (1 - s)))  # grouped so that a huge x meets its zero before its square


_tanh = define(torch.tanh, [lambda _, y: 1 - y * y], reference=torch.tanh, keep="output")
_sigmoid = define(torch.sigmoid, [lambda _, y: y * (1 - y)], reference=torch.sigmoid, keep="output")
_swish = define(
    _swish_forward, [_swish_by_x, _swish_by_beta], reference=_swish_forward, keep="inputs"
)
