"""Functions that take memory for contiguous: inputs may be transposed, gradients expanded."""

import torch
from torch.autograd import Function

from tests.functions import by_saved, made, save_inputs, saving_inputs
from tests.zoo.exhibit import Exhibit, normal

# y = x^2 as one row; x receives 2 x g.
Flat = made("Flat", lambda x: x.square().reshape(-1), lambda g, x: 2 * x * g.reshape(x.shape))


class FlatViewsInput(Flat):
    """y = x^2 as one row, but by a view, which a transposed input does not have."""

    forward = saving_inputs(lambda x: x.view(-1).square())


class Spread(Function):
    """y = x^2; the backward works on rows."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: x * x)

    setup_context = save_inputs

    backward = by_saved(lambda g, x: (2 * x.reshape(-1) * g.reshape(-1)).reshape(x.shape))


class SpreadViewsGradient(Spread):
    """y = x^2, but by g.view(-1), which the expanded gradient of a sum over rows does not have."""

    backward = by_saved(lambda g, x: (2 * x.reshape(-1) * g.view(-1)).reshape(x.shape))


class Transpose(Function):
    """Y = X^T; X receives G^T."""

    forward = staticmethod(lambda ctx, x: x.mT.clone())

    backward = staticmethod(lambda ctx, g: g.mT)


class TransposeByStrides(Transpose):
    """Y = X^T, but by strides that only a contiguous X has: silently wrong for others."""

    @staticmethod
    def forward(ctx, x):
        m, n = x.shape
        return torch.as_strided(x, (n, m), (1, n)).clone()


class TransposeGradientByStrides(Transpose):
    """Y = X^T, but the gradient is read with strides that only a contiguous G has."""

    @staticmethod
    def backward(ctx, g):
        n, m = g.shape
        return torch.as_strided(g, (m, n), (1, m))


EXHIBITS = [
    Exhibit("the input viewed as contiguous", wrong=FlatViewsInput, right=Flat, inputs=normal((3, 4)), says=("non-contiguous", "refuses"), verdict="warn"),
    Exhibit("the gradient viewed as contiguous", wrong=SpreadViewsGradient, right=Spread, inputs=normal((3, 4)), says=("contiguous",)),
    Exhibit("strides of a contiguous input assumed", wrong=TransposeByStrides, right=Transpose, inputs=normal((3, 4)), says=("contiguous",)),
    Exhibit("strides of a contiguous gradient assumed", wrong=TransposeGradientByStrides, right=Transpose, inputs=normal((3, 4)), says=("contiguous",)),
]  # fmt: skip
