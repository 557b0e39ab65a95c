"""Functions that write into what is not theirs."""

import torch
from torch.autograd import Function

from tests.functions import by_saved, saving_output
from tests.zoo.exhibit import Exhibit, normal


class Relu(Function):
    """y = max(x, 0), dy/dx = [y > 0]."""

    forward = saving_output(lambda x: x.clamp(min=0))

    backward = by_saved(lambda g, y: g * (y > 0))


class ReluInPlace(Relu):
    """y = max(x, 0), but written into x, and not marked dirty."""

    @staticmethod
    def forward(ctx, x):
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x


class ReluZeroesGradient(Relu):
    """y = max(x, 0), but the backward writes zeros into the gradient it received."""

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        g[y <= 0] = 0
        return g


class Sigmoid(Function):
    """y = 1 / (1 + e^-x), dy/dx = y (1 - y)."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: torch.sigmoid(x))

    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(output))

    backward = by_saved(lambda g, y: g * y * (1 - y))


class SigmoidWritesSaved(Sigmoid):
    """y = 1 / (1 + e^-x), but the backward works in the saved output."""

    backward = by_saved(lambda g, y: y.mul_(1 - y).mul_(g))


class SigmoidScalesGradient(Sigmoid):
    """y = 1 / (1 + e^-x), but the backward works in the gradient it received."""

    backward = by_saved(lambda g, y: g.mul_(y * (1 - y)))


class Affine(Function):
    """y = w x + b with a scalar b."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x * w + b

    backward = by_saved(lambda g, x, w: (g * w, g * x, g.sum()))


class AffineCounts(Affine):
    """y = w x + b, but the forward decays b on its way, a buffer as it seems."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        y = x * w + b
        b.mul_(0.9)
        return y


EXHIBITS = [
    Exhibit("in-place on the input", wrong=ReluInPlace, right=Relu, inputs=normal((3, 4)), says=("in place", "input")),
    Exhibit("in-place on another input", wrong=AffineCounts, right=Affine, inputs=normal((3, 4), (3, 4), ()), says=("in place", "input")),
    Exhibit("in-place on grad_output, by index", wrong=ReluZeroesGradient, right=Relu, inputs=normal((3, 4)), says=("in place", "grad_output")),
    Exhibit("in-place on grad_output", wrong=SigmoidScalesGradient, right=Sigmoid, inputs=normal((3, 4)), says=("in place", "grad_output")),
    Exhibit("in-place on a saved tensor", wrong=SigmoidWritesSaved, right=Sigmoid, inputs=normal((3, 4)), says=("in place", "saved")),
]  # fmt: skip
