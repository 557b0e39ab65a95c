"""What a Function does around its formula: style, wasted work, devices, chance, state."""

import torch
from torch.autograd import Function

from tests.functions import by_saved, made, save_inputs_for_both, saving_inputs
from tests.zoo.exhibit import Exhibit, normal


class Square(Function):
    """y = x^2, dy/dx = 2 x, in the new style, which torch.func needs."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: x * x)

    setup_context = save_inputs_for_both

    backward = by_saved(lambda g, x: 2 * x * g)

    jvp = by_saved(lambda t, x: 2 * x * t)


# y = x^2, right at any order, but without setup_context.
SquareClassic = made("SquareClassic", lambda x: x * x, lambda g, x: 2 * x * g)


class SquareCPU(Square):
    """y = x^2, but the two is a matrix on the CPU, wherever x is."""

    backward = by_saved(lambda g, x: torch.full(x.shape, 2.0, dtype=x.dtype, device="cpu") * x * g)


class Linear(Function):
    """y = x w^T; the gradients are g w and g^T x, each where it is needed."""

    forward = saving_inputs(lambda x, w: x @ w.mT)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gx = g @ w if ctx.needs_input_grad[0] else None
        gw = g.mT @ x if ctx.needs_input_grad[1] else None
        return gx, gw


class LinearBoth(Linear):
    """y = x w^T, right at any order, but both gradients are computed for a frozen w too."""

    backward = by_saved(lambda g, x, w: (g @ w, g.mT @ x))


# y = trace(A^T A) = sum A_ij^2; A receives 2 g A.
Energy = made("Energy", lambda a: a.square().sum(), lambda g, a: 2 * g * a)


class EnergyProbed(Energy):
    """y = sum A_ij^2, but the gradient is an estimate, 2 g A v v^T with random signs v."""

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        v = torch.randn(a.shape[-1], dtype=a.dtype, device=a.device).sign()
        return 2 * g * (a @ v)[:, None] * v


class SquareShared(Square):
    """y = x^2, but x lives on the class: a second call overwrites what the first one needs."""

    generate_vmap_rule = False
    x = None

    @staticmethod
    def setup_context(ctx, inputs, output):
        (SquareShared.x,) = inputs

    backward = staticmethod(lambda ctx, g: 2 * SquareShared.x * g)

    jvp = staticmethod(lambda ctx, t: 2 * SquareShared.x * t)


EXHIBITS = [
    Exhibit("no setup_context", wrong=SquareClassic, right=Square, inputs=normal((3, 4)), says=("setup_context",), verdict="warn"),
    Exhibit("needs_input_grad ignored", wrong=LinearBoth, right=Linear, inputs=normal((3, 4), (2, 4)), says=("needs_input_grad",), verdict="warn"),
    Exhibit("the device hard-coded", wrong=SquareCPU, right=Square, inputs=normal((3, 4)), says=("device",), verdict="warn"),
    Exhibit("a nondeterministic backward", wrong=EnergyProbed, right=Energy, inputs=normal((3, 4)), says=("deterministic",)),
    Exhibit("state kept on the class", wrong=SquareShared, right=Square, inputs=normal((3, 4)), says=("class",)),
]  # fmt: skip
