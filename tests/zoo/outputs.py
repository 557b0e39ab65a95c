"""Functions of several outputs."""

import torch
from torch.autograd import Function

from tests.functions import by_saved, save_inputs
from tests.zoo.exhibit import Exhibit, normal


class Sinh(Function):
    """y = (p - q) / 2 with p = e^x and q = e^-x as outputs too, whose gradients are counted."""

    @staticmethod
    def forward(ctx, x):
        p, q = torch.exp(x), torch.exp(-x)
        ctx.save_for_backward(p, q)
        return (p - q) / 2, p, q

    backward = by_saved(lambda g, gp, gq, p, q: g * (p + q) / 2 + gp * p - gq * q)


class SinhForgets(Sinh):
    """y = (p - q) / 2, but the gradients of the extra outputs are left out."""

    backward = by_saved(lambda g, gp, gq, p, q: g * (p + q) / 2)


class SinhMarked(SinhForgets):
    """y = (p - q) / 2, but p and q are marked as not differentiable, which cuts what was saved."""

    @staticmethod
    def forward(ctx, x):
        p, q = torch.exp(x), torch.exp(-x)
        ctx.mark_non_differentiable(p, q)
        ctx.save_for_backward(p, q)
        return (p - q) / 2, p, q


class Polar(Function):
    """(cos x, sin x), with gradients that may be undefined."""

    forward = staticmethod(lambda x: (torch.cos(x), torch.sin(x)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gc, gs):
        (x,) = ctx.saved_tensors
        if gc is None and gs is None:
            return None
        by_cos = 0 if gc is None else -gc * torch.sin(x)
        by_sin = 0 if gs is None else gs * torch.cos(x)
        return by_cos + by_sin


class PolarUndefined(Polar):
    """(cos x, sin x), but a gradient that is None is multiplied like any other."""

    backward = by_saved(lambda gc, gs, x: -gc * torch.sin(x) + gs * torch.cos(x))


class Moments(Function):
    """(mean, variance) of each row; x receives gm / n + 2 gv (x - m) / n."""

    @staticmethod
    def forward(x):
        m = x.mean(-1)
        return m, (x - m[..., None]).square().mean(-1)

    setup_context = save_inputs

    @staticmethod
    def backward(ctx, gm, gv):
        (x,) = ctx.saved_tensors
        n = x.shape[-1]
        d = x - x.mean(-1, keepdim=True)
        return (gm[..., None] + 2 * gv[..., None] * d) / n


class MomentsFirstOnly(Moments):
    """(mean, variance) of each row, but the gradient of the variance is left out."""

    backward = by_saved(lambda gm, gv, x: (gm[..., None] / x.shape[-1]).expand(x.shape))


EXHIBITS = [
    Exhibit("the gradients of extra outputs left out", wrong=SinhForgets, right=Sinh, inputs=normal((3, 4)), says=("output",)),
    Exhibit("extra outputs marked as not differentiable", wrong=SinhMarked, right=Sinh, inputs=normal((3, 4)), says=("saved_tensors[0]",)),
    Exhibit("the gradient of a second output left out", wrong=MomentsFirstOnly, right=Moments, inputs=normal((3, 4)), says=("output",)),
    Exhibit("an undefined gradient not handled", wrong=PolarUndefined, right=Polar, inputs=normal((3, 4)), says=("undefined gradient",)),
]  # fmt: skip
