"""What is saved for the backward: intermediates have no graph, inputs and outputs have."""

import torch
from torch.autograd import Function

from tests.functions import by_saved, made, save_inputs_for_both, saving_output
from tests.zoo.exhibit import Exhibit, normal


def _swish_slope(x):
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)


# y = x s(x), dy/dx = s + x s (1 - s): saves x alone.
Swish = made("Swish", lambda x: x * torch.sigmoid(x), lambda g, x: g * _swish_slope(x))


class SwishSigmoidOnCtx(Function):
    """y = x s(x), but s, computed in the forward, is an attribute of ctx."""

    @staticmethod
    def forward(ctx, x):
        ctx.s = torch.sigmoid(x)
        ctx.save_for_backward(x)
        return x * ctx.s

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (ctx.s + x * ctx.s * (1 - ctx.s))


class SwishNestedOnCtx(Function):
    """y = x s(x), but s hides in a tuple in a dict on ctx, beside x."""

    @staticmethod
    def forward(ctx, x):
        s = torch.sigmoid(x)
        ctx.cache = {"kept": (x, s), "count": 2}
        return x * s

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.cache["kept"]
        return g * (s + x * s * (1 - s))


class SwishNew(Function):
    """y = x s(x), in the new style: saves x alone."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: x * torch.sigmoid(x))

    setup_context = save_inputs_for_both

    backward = by_saved(lambda g, x: g * _swish_slope(x))

    jvp = by_saved(lambda t, x: t * _swish_slope(x))


class SwishSavesSigmoid(Function):
    """y = x s(x), but setup_context computes s to save it, and no graph is recorded there."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: x * torch.sigmoid(x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x, torch.sigmoid(x))

    backward = by_saved(lambda g, x, s: g * (s + x * s * (1 - s)))


class Tanh(Function):
    """y = tanh x, dy/dx = 1 - y^2: saves its output."""

    forward = saving_output(lambda x: torch.tanh(x))

    backward = by_saved(lambda g, y: g * (1 - y * y))


class TanhSavesClone(Tanh):
    """y = tanh x, but saves a copy of the output, which is no output."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y.clone())
        return y


class TanhKeepsDetachedOutput(Function):
    """y = tanh x, but keeps the detached output as an attribute."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.y = y.detach()
        return y

    backward = staticmethod(lambda ctx, g: g * (1 - ctx.y * ctx.y))


class TanhKeepsOutput(TanhKeepsDetachedOutput):
    """y = tanh x, right at any order, but y on ctx and ctx behind y are a cycle."""

    @staticmethod
    def forward(ctx, x):
        ctx.y = torch.tanh(x)
        return ctx.y


# y = e^x, dy/dx = e^x: saves its input.
Exp = made("Exp", lambda x: torch.exp(x), lambda g, x: g * torch.exp(x))


class ExpSavesDetached(Exp):
    """y = e^x, but saves the input detached."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach())
        return torch.exp(x)


class ExpKeepsInput(Function):
    """y = e^x, right at any order, but x stays alive on ctx after the graph was freed."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return torch.exp(x)

    backward = staticmethod(lambda ctx, g: g * torch.exp(ctx.x))


# y = max(x, 0), dy/dx = [x > 0]: saves its input.
Relu = made("Relu", lambda x: x.clamp(min=0), lambda g, x: g * (x > 0))


class ReluSavesClone(Relu):
    """y = max(x, 0), right at any order, but a copy of the input is saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return x.clamp(min=0)


# y = m x, m = mean |x|: computes m again in the backward.
ScaleByMean = made(
    "ScaleByMean",
    lambda x: x * x.abs().mean(),
    lambda g, x: g * x.abs().mean() + (g * x).sum() * x.sign() / x.numel(),
)


class ScaleByFloat(Function):
    """y = m x, m = mean |x|, but m is a Python number on ctx, a constant ever after."""

    @staticmethod
    def forward(ctx, x):
        ctx.m = x.abs().mean().item()
        ctx.save_for_backward(x)
        return x * ctx.m

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.m + (g * x).sum() * x.sign() / x.numel()


# r = sqrt(x^2 + 1).
Smoothed = made("Smoothed", lambda x: (x * x + 1).sqrt(), lambda g, x: g * x / (x * x + 1).sqrt())


class SmoothedIfAsked(Function):
    """r = sqrt(x^2 + 1), but x / r is saved, where forward sees that x requires grad."""

    @staticmethod
    def forward(ctx, x):
        r = (x * x + 1).sqrt()
        if x.requires_grad:
            ctx.save_for_backward(x / r)
        return r

    backward = by_saved(lambda g, slope: g * slope)


EXHIBITS = [
    Exhibit("an intermediate saved where the input requires grad", wrong=SmoothedIfAsked, right=Smoothed, inputs=normal((3, 4)), says=("saved: ctx.saved_tensors[0]", "100%")),
    Exhibit("an intermediate kept on ctx", wrong=SwishSigmoidOnCtx, right=Swish, inputs=normal((3, 4)), says=("ctx.s",)),
    Exhibit("an intermediate in a tuple in a dict on ctx", wrong=SwishNestedOnCtx, right=Swish, inputs=normal((3, 4)), says=("saved: ctx.cache['kept'][1]", "`s`")),
    Exhibit("an intermediate computed in setup_context", wrong=SwishSavesSigmoid, right=SwishNew, inputs=normal((3, 4)), says=("saved_tensors[1]",)),
    Exhibit("a copy of the output saved", wrong=TanhSavesClone, right=Tanh, inputs=normal((3, 4)), says=("saved_tensors[0]",)),
    Exhibit("a detached input saved", wrong=ExpSavesDetached, right=Exp, inputs=normal((3, 4)), says=("saved_tensors[0]",)),
    Exhibit("a detached output kept as an attribute", wrong=TanhKeepsDetachedOutput, right=Tanh, inputs=normal((3, 4)), says=("ctx.y",)),
    Exhibit("a Python number from .item() on ctx", wrong=ScaleByFloat, right=ScaleByMean, inputs=normal((3, 4)), says=("ctx.m", "(float)")),
    Exhibit("a saved clone that costs only memory", wrong=ReluSavesClone, right=Relu, inputs=normal((3, 4)), says=("a clone is saved",), verdict="warn"),
    Exhibit("the input kept as an attribute", wrong=ExpKeepsInput, right=Exp, inputs=normal((3, 4)), says=("ctx.x",), verdict="warn"),
    Exhibit("the output kept as an attribute", wrong=TanhKeepsOutput, right=Tanh, inputs=normal((3, 4)), says=("ctx.y",), verdict="warn"),
]  # fmt: skip
