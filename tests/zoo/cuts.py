"""Backwards that leave the graph: their result is right and has no derivative."""

import numpy as np
import torch
from torch.autograd import Function, Variable
from torch.autograd.function import once_differentiable

from tests.functions import by_saved, made, save_inputs, saving_inputs
from tests.zoo.exhibit import Exhibit, normal, positive


class Cube(Function):
    """y = x^3, dy/dx = 3 x^2."""

    forward = staticmethod(lambda x: x**3)

    setup_context = save_inputs

    backward = by_saved(lambda g, x: 3 * x * x * g)


class CubeData(Cube):
    """y = x^3, but the backward reads x.data."""

    backward = by_saved(lambda g, x: 3 * x.data * x.data * g)


class CubeVariable(Cube):
    """y = x^3, but the backward wraps x, as code from before torch 0.4 does."""

    backward = by_saved(lambda g, x: 3 * Variable(x) ** 2 * g)


class CubeAsArray(Cube):
    """y = x^3, but the slope is computed from an array of NumPy."""

    backward = by_saved(lambda g, x: g * torch.from_numpy(3 * np.asarray(x.detach()) ** 2))


class CubeNoGrad(Cube):
    """y = x^3, but the backward runs under no_grad, "to save memory"."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            return 3 * x * x * g


class CubeNumpy(Cube):
    """y = x^3, but the backward computes in NumPy."""

    backward = by_saved(lambda g, x: g * torch.from_numpy(3 * x.detach().numpy() ** 2))


class CubeList(Cube):
    """y = x^3, but the backward makes a new tensor of Python numbers."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        slope = [[3 * v * v for v in row] for row in x.tolist()]
        return g * torch.tensor(slope, dtype=g.dtype, device=g.device)


class Gaussian(Function):
    """y = exp(-x^2 / 2), dy/dx = -x y."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x: torch.exp(-x * x / 2))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    backward = by_saved(lambda g, x, y: -g * x * y)

    jvp = by_saved(lambda t, x, y: -t * x * y)


class GaussianDetached(Gaussian):
    """y = exp(-x^2 / 2), but the backward detaches the output."""

    backward = by_saved(lambda g, x, y: -g * x * y.detach())


class GaussianOnce(Gaussian):
    """y = exp(-x^2 / 2), but the backward says that it is differentiable once."""

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return -g * x * y


class Scale(Function):
    """y = a x for a scalar a; the gradients are a g and sum(g x)."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x, a: x * a)

    setup_context = save_inputs

    backward = by_saved(lambda g, x, a: (g * a, (g * x).sum()))


class ScaleItem(Scale):
    """y = a x, but the backward reads a with .item()."""

    generate_vmap_rule = False

    backward = by_saved(lambda g, x, a: (g * a.item(), (g * x).sum()))


# As a C++ extension registers it: a kernel, which autograd does not look into, and no formula.
_library = torch.library.Library("hoglib_zoo", "FRAGMENT")
_library.define("cube_grad(Tensor g, Tensor x) -> Tensor")


@torch.library.impl(_library, "cube_grad", "CompositeExplicitAutograd")
def _cube_grad(g, x):
    with torch._C._AutoDispatchBelowAutograd():
        return 3 * x * x * g


@torch.library.custom_op("hoglib_zoo::cube_grad_python", mutates_args=())
def _cube_grad_python(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return 3 * x * x * g


class CubeKernel(Cube):
    """y = x^3, but the backward calls an operator that has no autograd formula."""

    backward = by_saved(lambda g, x: torch.ops.hoglib_zoo.cube_grad(g, x))


class CubeCustomOp(Cube):
    """y = x^3, but the backward calls a torch.library.custom_op that has no autograd formula."""

    backward = by_saved(lambda g, x: torch.ops.hoglib_zoo.cube_grad_python(g, x))


class CubeBelowAutograd(Cube):
    """y = x^3, but the backward calls torch's kernels below autograd."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch._C._AutoDispatchBelowAutograd():
            return torch.mul(3 * x * x, g)


class Mish(Function):
    """y = x tanh(softplus(x)), with a backward of differentiable operations."""

    forward = saving_inputs(lambda x: torch.nn.functional.mish(x))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        t = torch.tanh(torch.nn.functional.softplus(x))
        return g * (t + x * (1 - t * t) * torch.sigmoid(x))


class MishAten(Mish):
    """y = x tanh(softplus(x)), but its backward is torch's kernel, which has no derivative."""

    backward = by_saved(lambda g, x: torch.ops.aten.mish_backward(g, x))


def _layer(x, w):
    return torch.tanh(x @ w)


def _gradients(ctx, inputs, g, create_graph):
    """The gradients of the layer by those inputs that need them."""
    wanted = [t for t, need in zip(inputs, ctx.needs_input_grad, strict=True) if need]
    grads = iter(torch.autograd.grad(_layer(*inputs), wanted, g, create_graph=create_graph))
    return tuple(next(grads) if need else None for need in ctx.needs_input_grad)


class Recompute(Function):
    """y = tanh(x w), computed again in the backward, which is differentiable when asked to be."""

    forward = saving_inputs(lambda x, w: _layer(x, w))

    @staticmethod
    def backward(ctx, g):
        twice = torch.is_grad_enabled()
        with torch.enable_grad():
            again = [t.view_as(t) for t in ctx.saved_tensors]
            return _gradients(ctx, again, g, create_graph=twice)


class RecomputeDetached(Recompute):
    """y = tanh(x w), but what is computed again starts from detached copies, as in a checkpoint."""

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            again = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return _gradients(ctx, again, g, create_graph=False)


# y = log x, dy/dx = 1 / x.
Log = made("Log", lambda x: x.log(), lambda g, x: g / x)


class LogGradientDetached(Log):
    """y = log x, but the backward detaches the gradient it received."""

    backward = by_saved(lambda g, x: g.detach() / x)


class LogOnce(Log):
    """y = log x, but the backward says that it is differentiable once."""

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g / x


# y = x sin x.
SineProduct = made("SineProduct", lambda x: x * x.sin(), lambda g, x: g * (x.sin() + x * x.cos()))


class Branch(SineProduct):
    """Cut for large arguments alone."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        x = x.detach() if bool(x.max() > 5) else x
        return g * (x.sin() + x * x.cos())


EXHIBITS = [
    Exhibit(".data in backward", wrong=CubeData, right=Cube, inputs=normal((3, 4)), says=(".data",)),
    Exhibit("Variable() in backward", wrong=CubeVariable, right=Cube, inputs=normal((3, 4)), says=("variable()", "cuts.py:")),
    Exhibit("np.asarray in backward", wrong=CubeAsArray, right=Cube, inputs=normal((3, 4)), says=("then numpy", "cuts.py:")),
    Exhibit(".detach() in backward", wrong=GaussianDetached, right=Gaussian, inputs=normal((3, 4)), says=(".detach()",)),
    Exhibit("the gradient detached in backward", wrong=LogGradientDetached, right=Log, inputs=positive((3, 4)), says=(".detach()",)),
    Exhibit(".item() in backward", wrong=ScaleItem, right=Scale, inputs=normal((3, 4), ()), says=(".item()",)),
    Exhibit(".tolist() in backward", wrong=CubeList, right=Cube, inputs=normal((3, 4)), says=(".tolist()",)),
    Exhibit("no_grad in backward", wrong=CubeNoGrad, right=Cube, inputs=normal((3, 4)), says=("no_grad",)),
    Exhibit("once_differentiable", wrong=LogOnce, right=Log, inputs=positive((3, 4)), says=("once_differentiable",)),
    Exhibit("once_differentiable in the new style", wrong=GaussianOnce, right=Gaussian, inputs=normal((3, 4)), says=("once_differentiable",)),
    Exhibit("NumPy in backward", wrong=CubeNumpy, right=Cube, inputs=normal((3, 4)), says=("numpy",)),
    Exhibit("a raw kernel in backward", wrong=CubeKernel, right=Cube, inputs=normal((3, 4)), says=("cube_grad",)),
    Exhibit("a custom_op without a formula in backward", wrong=CubeCustomOp, right=Cube, inputs=normal((3, 4)), says=("cube_grad_python",)),
    Exhibit("a torch kernel without a derivative in backward", wrong=MishAten, right=Mish, inputs=normal((3, 4)), says=("mish_backward",)),
    Exhibit("kernels called below autograd in backward", wrong=CubeBelowAutograd, right=Cube, inputs=normal((3, 4)), says=("autograd",)),
    Exhibit("a cut for large values only", wrong=Branch, right=SineProduct, inputs=normal((3, 4)), says=("other values", ".detach()")),
    Exhibit("recomputation from detached copies", wrong=RecomputeDetached, right=Recompute, inputs=normal((3, 4), (4, 2)), says=(".detach()", "view, `t.view_as(t)`")),
]  # fmt: skip
