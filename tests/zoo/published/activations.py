"""Activations, gates and dropout."""

import torch
from torch.autograd import Function

from tests.functions import by_saved
from tests.zoo.exhibit import normal
from tests.zoo.published.specimen import Specimen


class PReLUKeepsInput(Function):
    """y = max(x, 0) + a min(x, 0); right at any order, with x as an attribute of ctx."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.input = x
        ctx.save_for_backward(a)
        return x.clamp(min=0) + a * x.clamp(max=0)

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        gx = torch.where(ctx.input > 0, g, a * g) if ctx.needs_input_grad[0] else None
        ga = (g * ctx.input.clamp(max=0)).sum(0) if ctx.needs_input_grad[1] else None
        return gx, ga


def _cell_gradients(i, f, o, n, c, t, gh, gc):
    """The gradients of an LSTM cell's gates, before their activations, and of its old state."""
    gc = gc + gh * o * (1 - t * t)
    gates = (gc * n * i * (1 - i), gc * c * f * (1 - f), gh * t * o * (1 - o), gc * i * (1 - n * n))
    return torch.cat(gates, -1), gc * f


def _activated(gates):
    i, f, o, n = gates.chunk(4, -1)
    return torch.sigmoid(i), torch.sigmoid(f), torch.sigmoid(o), torch.tanh(n)


class LSTMCell(Function):
    """c' = f c + i n, h = o tanh c'; gates i, f, o, n activated again in the backward."""

    @staticmethod
    def forward(ctx, gates, c):
        i, f, o, n = _activated(gates)
        new = f * c + i * n
        ctx.save_for_backward(gates, c, new)
        return o * torch.tanh(new), new

    @staticmethod
    def backward(ctx, gh, gc):
        gates, c, new = ctx.saved_tensors
        return _cell_gradients(*_activated(gates), c, torch.tanh(new), gh, gc)


class LSTMCellSavesGates(Function):
    """The same, but the activated gates are saved, as in fused cells."""

    @staticmethod
    def forward(ctx, gates, c):
        i, f, o, n = _activated(gates)
        new = f * c + i * n
        ctx.save_for_backward(i, f, o, n, c, new)
        return o * torch.tanh(new), new

    @staticmethod
    def backward(ctx, gh, gc):
        i, f, o, n, c, new = ctx.saved_tensors
        return _cell_gradients(i, f, o, n, c, torch.tanh(new), gh, gc)


class Dropout(Function):
    """y = 2 x m, m drawn with probability 1/2 and saved."""

    @staticmethod
    def forward(ctx, x):
        m = torch.rand(x.shape, device=x.device) < 0.5
        ctx.save_for_backward(m)
        return 2 * x * m

    backward = by_saved(lambda g, m: 2 * g * m)


class DropoutRedrawn(Dropout):
    """y = 2 x m, but the backward draws another m."""

    @staticmethod
    def backward(ctx, g):
        m = torch.rand(g.shape, device=g.device) < 0.5
        return 2 * g * m


SPECIMENS = [
    Specimen("PReLU, input as an attribute", PReLUKeepsInput, normal((3, 4), (4,)), "warn", ("ctx.input",)),
    Specimen("LSTM cell", LSTMCell, normal((3, 8), (3, 2))),
    Specimen("LSTM cell, gates saved", LSTMCellSavesGates, normal((3, 8), (3, 2)), "fail", ("saved_tensors[0]",)),
    Specimen("dropout, mask saved", Dropout, normal((3, 4))),
    Specimen("dropout, mask drawn twice", DropoutRedrawn, normal((3, 4)), "fail", ("deterministic",)),
]  # fmt: skip
