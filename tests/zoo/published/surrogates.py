"""Gradients that are not those of the forward, on purpose: quantisers, reversal, clipping."""

import torch
from torch.autograd import Function

from tests.functions import by_saved, saving_inputs
from tests.zoo.exhibit import normal, positive
from tests.zoo.published.specimen import SURROGATE, Specimen


class RoundStraightThrough(Function):
    """y = round(x); x receives g."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: torch.round(x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(lambda ctx, g: g)


class SignStraightThrough(Function):
    """y = sign(x); x receives g where |x| <= 1, by index into a copy."""

    forward = saving_inputs(lambda x: x.sign())

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        gx = g.clone()
        gx[x.abs() > 1] = 0
        return gx


class SignStraightThroughInPlace(SignStraightThrough):
    """y = sign(x), but the index is into the gradient that came in."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g[x.abs() > 1] = 0
        return g


def _lsq_gradient(v, g, lo=-4, hi=3):
    inside = (v >= lo) & (v <= hi)
    slope = torch.where(inside, torch.round(v) - v, v.clamp(lo, hi))
    return g * inside, (g * slope).sum()


class LearnedStep(Function):
    """y = s round(clamp(v, -4, 3)), v = x / s; s receives the sum of g (round(v) - v) inside."""

    forward = saving_inputs(lambda x, s: torch.round((x / s).clamp(-4, 3)) * s)

    backward = by_saved(lambda g, x, s: _lsq_gradient(x / s, g))


class LearnedStepSavesRatio(Function):
    """The same, but v = x / s is saved."""

    @staticmethod
    def forward(ctx, x, s):
        v = x / s
        ctx.save_for_backward(v)
        return torch.round(v.clamp(-4, 3)) * s

    backward = by_saved(lambda g, v: _lsq_gradient(v, g))


class Reversal(Function):
    """y = x; x receives -0.3 g."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = 0.3
        return x.view_as(x)

    backward = staticmethod(lambda ctx, g: g.neg() * ctx.scale)


class ClipGradient(Function):
    """y = x; x receives g clamped to [-1/2, 1/2]."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: x.clone())

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(lambda ctx, g: g.clamp(-0.5, 0.5))


def _activations_and_step():
    return torch.randn(3, 4), 0.2 + 0.1 * torch.rand(())


SPECIMENS = [
    Specimen("straight-through rounding", RoundStraightThrough, normal((3, 4)), options=SURROGATE),
    Specimen("straight-through sign", SignStraightThrough, normal((3, 4)), options=SURROGATE),
    Specimen("straight-through sign, gradient in place", SignStraightThroughInPlace, normal((3, 4)), "fail", ("in place", "grad_output"), SURROGATE),
    Specimen("learned step size", LearnedStep, _activations_and_step, options=SURROGATE),
    Specimen("learned step size, ratio saved", LearnedStepSavesRatio, _activations_and_step, "fail", ("saved_tensors[0]",), SURROGATE),
    Specimen("gradient reversal", Reversal, normal((3, 4)), options=SURROGATE),
    Specimen("gradient clipping", ClipGradient, positive((3, 4)), options=SURROGATE),
]  # fmt: skip
