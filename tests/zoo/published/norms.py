"""Fused normalisation: the statistics saved by the forward are the best-known bug of its kind."""

from torch.autograd import Function

from tests.functions import by_saved, saving_inputs
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


class LayerNormSavesStatistics(Function):
    """The same, but mean and r come from the forward."""

    @staticmethod
    def forward(ctx, x, w, b):
        m = x.mean(-1, keepdim=True)
        r = (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()
        ctx.save_for_backward(x, w, m, r)
        return (x - m) * r * w + b

    backward = by_saved(lambda g, x, w, m, r: _gradients((x - m) * r, r, w, g, -1))


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


def _rms(x):
    return (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def _rms_gradients(x, w, r, g):
    gh = g * w
    return r * gh - x * r**3 * (gh * x).mean(-1, keepdim=True), (g * x * r).sum(0)


class RMSNorm(Function):
    """y = w x r, r = (mean x^2 + eps)^(-1/2), computed again in the backward."""

    forward = saving_inputs(lambda x, w: x * _rms(x) * w)

    backward = by_saved(lambda g, x, w: _rms_gradients(x, w, _rms(x), g))


class RMSNormSavesScale(Function):
    """The same, but r is saved."""

    @staticmethod
    def forward(ctx, x, w):
        r = _rms(x)
        ctx.save_for_backward(x, w, r)
        return x * r * w

    backward = by_saved(lambda g, x, w, r: _rms_gradients(x, w, r, g))


class Unit(Function):
    """y = x / |x| along rows; x receives (g - y (y.g)) / |x|, with |x| computed again."""

    @staticmethod
    def forward(ctx, x):
        y = x / x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return (g - y * (y * g).sum(-1, keepdim=True)) / x.norm(dim=-1, keepdim=True)


class UnitSavesNorm(Function):
    """The same, but |x| is saved."""

    @staticmethod
    def forward(ctx, x):
        n = x.norm(dim=-1, keepdim=True)
        y = x / n
        ctx.save_for_backward(y, n)
        return y

    backward = by_saved(lambda g, y, n: (g - y * (y * g).sum(-1, keepdim=True)) / n)


SPECIMENS = [
    Specimen("layer norm", LayerNorm, normal((3, 4), (4,), (4,))),
    Specimen("layer norm, statistics saved", LayerNormSavesStatistics, normal((3, 4), (4,), (4,)), "fail", ("saved_tensors[3]",)),
    Specimen("batch norm", BatchNorm, normal((5, 3), (3,), (3,))),
    Specimen("batch norm, statistics on ctx", BatchNormKeepsStatistics, normal((5, 3), (3,), (3,)), "fail", ("ctx.r",)),
    Specimen("RMS norm", RMSNorm, normal((3, 4), (4,))),
    Specimen("RMS norm, scale saved", RMSNormSavesScale, normal((3, 4), (4,)), "fail", ("saved_tensors[2]",)),
    Specimen("unit vectors", Unit, normal((3, 4))),
    Specimen("unit vectors, norm saved", UnitSavesNorm, normal((3, 4)), "fail", ("saved_tensors[1]",)),
]  # fmt: skip
