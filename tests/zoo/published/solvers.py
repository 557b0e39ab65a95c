"""Layers that solve something: fixed points, and reversible blocks."""

import torch
from torch.autograd import Function

from tests.zoo.exhibit import normal
from tests.zoo.published.specimen import Specimen


def _fixed_point(x, w):
    z = torch.zeros_like(x)
    for _ in range(80):
        z = torch.tanh(z @ w.mT + x)
    return z


class Equilibrium(Function):
    """z = tanh(w z + x); x receives u = D (g + w^T u), D = 1 - z^2, w receives u z^T."""

    @staticmethod
    def forward(ctx, x, w):
        z = _fixed_point(x, w)
        ctx.save_for_backward(z, w)
        return z

    @staticmethod
    def _adjoint(z, w, g):
        """u of u = D (g + w^T u), for each row, by iteration, which is differentiable."""
        u = torch.zeros_like(g)
        for _ in range(80):
            u = (1 - z * z) * (g + u @ w)
        return u

    @staticmethod
    def backward(ctx, g):
        z, w = ctx.saved_tensors
        u = Equilibrium._adjoint(z, w, g)
        return u, u.mT @ z


class Reversible(Function):
    """(y1, y2) with y1 = x1 + tanh(x2 v), y2 = x2 + tanh(y1 w), inverted from the outputs."""

    @staticmethod
    def forward(ctx, x1, x2, v, w):
        y1 = x1 + torch.tanh(x2 @ v)
        y2 = x2 + torch.tanh(y1 @ w)
        ctx.save_for_backward(y1, y2, v, w)
        return y1, y2

    @staticmethod
    def _gradients(y1, y2, v, w, g1, g2):
        t = torch.tanh(y1 @ w)
        x2 = y2 - t
        u = g2 * (1 - t * t)
        g1 = g1 + u @ w.mT
        s = g1 * (1 - torch.tanh(x2 @ v) ** 2)
        return g1, g2 + s @ v.mT, x2.mT @ s, y1.mT @ u

    backward = staticmethod(lambda ctx, g1, g2: Reversible._gradients(*ctx.saved_tensors, g1, g2))


def _state_and_weight():
    return torch.randn(2, 3), 0.3 * torch.randn(3, 3)


SPECIMENS = [
    Specimen("fixed point, implicit gradient", Equilibrium, _state_and_weight),
    Specimen("reversible block", Reversible, normal((2, 3), (2, 3), (3, 3), (3, 3))),
]  # fmt: skip
