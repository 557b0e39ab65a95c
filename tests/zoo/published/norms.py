"""Fused normalisation: the statistics saved by the forward are the best-known bug of its kind."""

from torch.autograd import Function

from tests.functions import by_saved
from tests.zoo.exhibit import normal
from tests.zoo.published.specimen import Specimen


def _standardised(x, dim):
    d = x - x.mean(dim, keepdim=True)
    r = (d.square().mean(dim, keepdim=True) + 1e-5).rsqrt()
    return d * r, r


def _gradients(h, r, w, g, dim):
    """Those of x, w and b, with h = (x - mean x) r."""
    u = g * w
    by_x = r * (u - u.mean(dim, keepdim=True) - h * (u * h).mean(dim, keepdim=True))
    return by_x, (g * h).sum(0), g.sum(0)


class LayerNorm(Function):
    """y = w h + b, h = (x - mean) r over the last dimension, computed again in the backward."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return _standardised(x, -1)[0] * w + b

    backward = by_saved(lambda g, x, w: _gradients(*_standardised(x, -1), w, g, -1))


class BatchNorm(Function):
    """y = h w + b over the first dimension, in the new style, statistics computed again."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x, w, b: _standardised(x, 0)[0] * w + b)

    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))

    backward = by_saved(lambda g, x, w: _gradients(*_standardised(x, 0), w, g, 0))


class BatchNormKeepsStatistics(Function):
    """The same, but h and r are attributes of ctx."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.h, ctx.r = _standardised(x, 0)
        ctx.save_for_backward(w)
        return ctx.h * w + b

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return _gradients(ctx.h, ctx.r, w, g, 0)


SPECIMENS = [
    Specimen("layer norm", LayerNorm, normal((3, 4), (4,), (4,))),
    Specimen("batch norm", BatchNorm, normal((5, 3), (3,), (3,))),
    Specimen("batch norm, statistics on ctx", BatchNormKeepsStatistics, normal((5, 3), (3,), (3,)), "fail", ("ctx.r",)),
]  # fmt: skip
