"""Backwards whose gradients are wrong: their number, shape, sign, terms or order."""

import torch
from torch.autograd import Function

from tests.functions import by_saved, made, save_inputs, save_inputs_for_both, saving_inputs
from tests.zoo.exhibit import Exhibit, normal


class Mul(Function):
    """y = a b; the gradients are g b and g a."""

    generate_vmap_rule = True

    forward = staticmethod(lambda a, b: a * b)

    setup_context = save_inputs_for_both

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        need = ctx.needs_input_grad
        return g * b if need[0] else None, g * a if need[1] else None

    jvp = by_saved(lambda ta, tb, a, b: ta * b + a * tb)


class MulOneGradient(Mul):
    """y = a b, but one gradient for two inputs."""

    backward = by_saved(lambda g, _, b: g * b)


class MulThreeGradients(Mul):
    """y = a b, but three gradients for two inputs, one of them for an argument that was removed."""

    backward = by_saved(lambda g, a, b: (g * b, g * a, g))


class MulSwapped(Mul):
    """y = a b, but the gradients come in the wrong order."""

    backward = by_saved(lambda g, a, b: (g * a, g * b))


class MulNone(Mul):
    """y = a b, but None for b, once a constant."""

    @staticmethod
    def backward(ctx, g):
        _, b = ctx.saved_tensors
        return g * b if ctx.needs_input_grad[0] else None, None


class MulWrongBranch(Mul):
    """y = a b, but whether b needs a gradient is read at the place of a."""

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        need = ctx.needs_input_grad
        return g * b if need[0] else None, g * a if need[0] else None


class MulForward(Mul):
    """y = a b, but its jvp has a term with the wrong sign."""

    jvp = by_saved(lambda ta, tb, a, b: ta * b - a * tb)


class Neuron(Function):
    """y = tanh(x w); the gradients are g (1 - y^2) w and g (1 - y^2) x."""

    @staticmethod
    def forward(ctx, x, w):
        y = torch.tanh(x * w)
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        g = g * (1 - y * y)
        need = ctx.needs_input_grad
        return g * w if need[0] else None, g * x if need[1] else None


class NeuronShortcut(Neuron):
    """y = tanh(x w), but with a frozen w the backward takes a short cut through y.detach()."""

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        need = ctx.needs_input_grad
        if not need[1]:
            y = y.detach()
            return g * (1 - y * y) * w, None
        return g * (1 - y * y) * w if need[0] else None, g * (1 - y * y) * x


class SumRows(Function):
    """y_i = sum_j x_ij; every x_ij receives g_i."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum(-1)

    backward = staticmethod(lambda ctx, g: g.unsqueeze(-1).expand(ctx.shape))


class SumRowsUnexpanded(SumRows):
    """y_i = sum_j x_ij, but the gradient is not expanded to the shape of x."""

    backward = staticmethod(lambda ctx, g: g.unsqueeze(-1))


class BiasAdd(Function):
    """y_ij = x_ij + b_j; b receives sum_i g_ij."""

    forward = staticmethod(lambda ctx, x, b: x + b)

    backward = staticmethod(lambda ctx, g: (g, g.sum(0) if ctx.needs_input_grad[1] else None))


class BiasAddNoSum(BiasAdd):
    """y_ij = x_ij + b_j, but b receives g as it is, which the engine mends."""

    backward = staticmethod(lambda ctx, g: (g, g))


class ChannelScale(Function):
    """y_ncl = x_ncl w_c; w receives sum_nl g x."""

    forward = saving_inputs(lambda x, w: x * w[:, None])

    backward = by_saved(lambda g, x, w: (g * w[:, None], (g * x).sum((0, 2))))


class ChannelScaleWrongSum(ChannelScale):
    """y_ncl = x_ncl w_c, but w receives the sum over batch and channels, of the same shape here."""

    backward = by_saved(lambda g, x, w: (g * w[:, None], (g * x).sum((0, 1))))


# y = a^2 - b^2; the gradients are 2 a g and -2 b g.
Sub = made("Sub", lambda a, b: a * a - b * b, lambda g, a, b: (2 * a * g, -2 * b * g))


class SubSign(Sub):
    """y = a^2 - b^2, but the gradient of b has the sign of that of a."""

    backward = by_saved(lambda g, a, b: (2 * a * g, 2 * b * g))


class Gate(Function):
    """y = x tanh x, dy/dx = tanh x + x (1 - tanh^2 x)."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: x * torch.tanh(x))

    setup_context = save_inputs

    backward = by_saved(lambda g, x: g * (torch.tanh(x) + x * (1 - torch.tanh(x) ** 2)))


class GateMissingTerm(Gate):
    """y = x tanh x, but the second term of the product rule is missing."""

    backward = by_saved(lambda g, x: g * torch.tanh(x))


# Y = A B; the gradients are G B^T and A^T G.
MatMul = made("MatMul", lambda a, b: a @ b, lambda g, a, b: (g @ b.mT, a.mT @ g))


class MatMulNoTranspose(MatMul):
    """Y = A B of square matrices, but A receives G B."""

    backward = by_saved(lambda g, a, b: (g @ b, a.mT @ g))


class SquaredError(Function):
    """y = sum (x - t)^2; x receives 2 (x - t) g, t the opposite."""

    forward = saving_inputs(lambda x, t: (x - t).square().sum())

    backward = by_saved(lambda g, x, t: (2 * (x - t) * g, 2 * (t - x) * g))


class SquaredErrorLast(SquaredError):
    """y = sum (x - t)^2, but the backward takes y for the loss itself and ignores g."""

    backward = by_saved(lambda g, x, t: (2 * (x - t), 2 * (t - x)))


class _SoftplusGradient(Function):
    """h = g s(x), with a backward by hand: g receives u s, x receives u g s (1 - s)."""

    forward = saving_inputs(lambda g, x: g * torch.sigmoid(x))

    backward = by_saved(lambda u, g, x: (u * x.sigmoid(), u * g * x.sigmoid() * (-x).sigmoid()))


class _SoftplusGradientSign(_SoftplusGradient):
    """h = g s(x), but the derivative of s has the wrong sign."""

    backward = by_saved(lambda u, g, x: (u * x.sigmoid(), -u * g * x.sigmoid() * (-x).sigmoid()))


class _SoftplusGradientTerm(_SoftplusGradient):
    """h = g s(x), but linear in x is what its backward takes it for."""

    backward = by_saved(lambda u, _, x: (u * x.sigmoid(), torch.zeros_like(x)))


class Softplus(Function):
    """y = log(1 + e^x), whose backward is another Function."""

    forward = saving_inputs(lambda x: torch.nn.functional.softplus(x))

    backward = by_saved(lambda g, x: _SoftplusGradient.apply(g, x))


class SoftplusSecondSign(Softplus):
    """y = log(1 + e^x), but the backward of its backward has the wrong sign."""

    backward = by_saved(lambda g, x: _SoftplusGradientSign.apply(g, x))


class SoftplusSecondTerm(Softplus):
    """y = log(1 + e^x), but the backward of its backward is zero for x."""

    backward = by_saved(lambda g, x: _SoftplusGradientTerm.apply(g, x))


class SquareBatches(Function):
    """y = x^2, with a vmap rule that follows in_dims."""

    forward = staticmethod(lambda x: x * x)

    setup_context = save_inputs

    backward = by_saved(lambda g, x: 2 * x * g)

    vmap = staticmethod(lambda info, in_dims, x: (SquareBatches.apply(x), in_dims[0]))


class SquareBatchesFirst(SquareBatches):
    """y = x^2, but its vmap rule takes the batch for the first dimension."""

    vmap = staticmethod(lambda info, in_dims, x: (SquareBatchesFirst.apply(x), 0))


EXHIBITS = [
    Exhibit("too few gradients", wrong=MulOneGradient, right=Mul, inputs=normal((3, 4), (3, 4)), says=("number", "gradients")),
    Exhibit("too many gradients", wrong=MulThreeGradients, right=Mul, inputs=normal((3, 4), (3, 4)), says=("number", "gradients")),
    Exhibit("gradients in the wrong order", wrong=MulSwapped, right=Mul, inputs=normal((3, 4), (3, 4)), says=("expected", "inputs[")),
    Exhibit("None for an input that needs a gradient", wrong=MulNone, right=Mul, inputs=normal((3, 4), (3, 4)), says=("all of it is missing",)),
    Exhibit("needs_input_grad read at the wrong place", wrong=MulWrongBranch, right=Mul, inputs=normal((3, 4), (3, 4)), says=("needs_input_grad",)),
    Exhibit("a short cut for a frozen input", wrong=NeuronShortcut, right=Neuron, inputs=normal((3, 4), (3, 4)), says=(".detach()",)),
    Exhibit("a jvp that disagrees with the backward", wrong=MulForward, right=Mul, inputs=normal((3, 4), (3, 4)), says=("jvp",)),
    Exhibit("a gradient of the wrong shape", wrong=SumRowsUnexpanded, right=SumRows, inputs=normal((3, 4)), says=("shape",)),
    Exhibit("no sum over broadcast dims", wrong=BiasAddNoSum, right=BiasAdd, inputs=normal((3, 4), (4,)), says=("broadcast dimensions",), verdict="warn"),
    Exhibit("a sum over the wrong dims", wrong=ChannelScaleWrongSum, right=ChannelScale, inputs=normal((2, 3, 3), (3,)), says=("input",)),
    Exhibit("a wrong sign", wrong=SubSign, right=Sub, inputs=normal((3, 4), (3, 4)), says=("sign",)),
    Exhibit("a wrong sign in a second derivative by hand", wrong=SoftplusSecondSign, right=Softplus, inputs=normal((3, 4)), says=("sign",)),
    Exhibit("a missing term", wrong=GateMissingTerm, right=Gate, inputs=normal((3, 4)), says=("input",)),
    Exhibit("a missing term in a second derivative by hand", wrong=SoftplusSecondTerm, right=Softplus, inputs=normal((3, 4)), says=("second",)),
    Exhibit("no transpose", wrong=MatMulNoTranspose, right=MatMul, inputs=normal((3, 3), (3, 3)), says=("expected", "inputs[")),
    Exhibit("the incoming gradient ignored", wrong=SquaredErrorLast, right=SquaredError, inputs=normal((3, 4), (3, 4)), says=("grad_output",)),
    Exhibit("a vmap rule that assumes the first dimension", wrong=SquareBatchesFirst, right=SquareBatches, inputs=normal((3, 4)), says=("vmap",)),
]  # fmt: skip
