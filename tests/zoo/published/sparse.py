"""Losses and projections: cross-entropy, entmax, soft thresholds."""

import torch
from torch.autograd import Function

from tests.functions import by_saved, save_inputs, saving_inputs, saving_output
from tests.zoo.published.specimen import Specimen


class CrossEntropy(Function):
    """y = -sum_i log p_i(t_i); the logits receive (p - onehot) g, with p computed again."""

    forward = saving_inputs(lambda z, t: -torch.log_softmax(z, -1).gather(-1, t[:, None]).sum())

    @staticmethod
    def backward(ctx, g):
        z, t = ctx.saved_tensors
        onehot = torch.zeros_like(z).scatter(-1, t[:, None], 1.0)
        return (torch.softmax(z, -1) - onehot) * g, None


class CrossEntropyGradientInForward(Function):
    """The same, but its gradient is computed in the forward, to free the logits."""

    @staticmethod
    def forward(ctx, z, t):
        p = torch.softmax(z, -1)
        loss = -p.log().gather(-1, t[:, None]).sum()
        ctx.save_for_backward(p - torch.zeros_like(z).scatter(-1, t[:, None], 1.0))
        return loss

    backward = by_saved(lambda g, gz: (gz * g, None))


def _entmax(z):
    """y = max(z/2 - tau, 0)^2 with rows that sum to one."""
    z = z / 2
    ordered = z.sort(-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    mean = ordered.cumsum(-1) / k
    spread = ordered.square().cumsum(-1) - k * mean**2
    tau = mean - ((1 - spread) / k).clamp(min=0).sqrt()
    size = (tau <= ordered).sum(-1, keepdim=True)
    return (z - tau.gather(-1, size - 1)).clamp(min=0).square()


def _entmax_gradient(r, g):
    return r * (g - (g * r).sum(-1, keepdim=True) / r.sum(-1, keepdim=True))


class Entmax(Function):
    """1.5-entmax; z receives r (g - sum(g r) / sum r), r = sqrt y where y > 0."""

    forward = saving_output(lambda z: _entmax(z))

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        inside = y > 0
        r = torch.where(inside, torch.where(inside, y, 1).sqrt(), 0)
        return _entmax_gradient(r, g)


class EntmaxNaN(Entmax):
    """The same, but sqrt y has an infinite slope at 0: the second derivative is NaN."""

    backward = by_saved(lambda g, y: _entmax_gradient(y.sqrt(), g))


class SoftThreshold(Function):
    """y = sign(x) max(|x| - c, 0) with c learnable."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x, c: x.sign() * (x.abs() - c).clamp(min=0))

    setup_context = save_inputs

    @staticmethod
    def backward(ctx, g):
        x, c = ctx.saved_tensors
        g = g * (x.abs() > c)
        return g if ctx.needs_input_grad[0] else None, -(g * x.sign()).sum()


def _logits_and_targets():
    return torch.randn(3, 4), torch.randint(4, (3,))


def _values_and_threshold():
    return torch.randn(3, 4), 0.2 + 0.2 * torch.rand(())


def _spread():
    return (2 * torch.randn(3, 6),)


SPECIMENS = [
    Specimen("cross-entropy", CrossEntropy, _logits_and_targets),
    Specimen("cross-entropy, gradient computed in the forward", CrossEntropyGradientInForward, _logits_and_targets, "fail", ("saved_tensors[0]",)),
    Specimen("1.5-entmax", Entmax, _spread),
    Specimen("1.5-entmax, square root of zero", EntmaxNaN, _spread, "fail", ("nan",)),
    Specimen("soft thresholding", SoftThreshold, _values_and_threshold),
]  # fmt: skip
