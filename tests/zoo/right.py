"""Right Functions of many kinds, in own maths: `verify` must neither fail one, nor doubt its derivatives.

Each row is a name, a Function, and what makes its inputs from torch's generator.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from tests.functions import by_saved, saving_inputs


class Right(NamedTuple):
    """A right Function, and what makes its arguments."""

    name: str
    function: Any
    inputs: Callable[[], tuple[Any, ...]]
    options: Mapping[str, Any] = MappingProxyType({})


def recomputed(forward, gradient):
    """A Function that saves its inputs; gradient(*inputs, g) computes from them again."""

    class Recomputed(Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx, *g):
            return gradient(*ctx.saved_tensors, *g)

    return Recomputed


def from_output(forward, gradient):
    """A Function that saves its output; gradient(output, g) is that by its only input."""

    class FromOutput(Function):
        generate_vmap_rule = True

        forward = staticmethod(lambda x: forward(x))

        setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(output))

        backward = by_saved(lambda g, y: gradient(y, g))

    return FromOutput


def differentiated(forward):
    """A Function whose backward differentiates forward, with a graph where one is asked for."""

    def gradient(*given):
        *inputs, g = given
        with torch.enable_grad():
            own = [x if x.requires_grad else x.detach().requires_grad_() for x in inputs]
            y = forward(*own)
        return torch.autograd.grad(y, own, g, create_graph=torch.is_grad_enabled())

    return recomputed(forward, gradient)


# --- root finders: y with f(y, x) = 0; dy/dx = -f_x / f_y at the root --------------------------------


def newton(f, slope, start, x):
    y = start(x)
    for _ in range(30):
        y = y - f(y, x) / slope(y, x)
    return y


CubeRoot = from_output(
    lambda x: newton(lambda y, a: y**3 + y - a, lambda y, a: 3 * y**2 + 1, torch.zeros_like, x),
    lambda y, g: g / (3 * y**2 + 1),
)
Kepler = recomputed(
    lambda m, e: newton(
        lambda y, a: y - e * y.sin() - a, lambda y, a: 1 - e * y.cos(), torch.clone, m
    ),
    lambda m, e, g: _kepler(m, e, g),
)


class KeplerAngle(Function):
    """E - e sin E = M, differentiated at its own solution."""

    @staticmethod
    def forward(ctx, m, e):
        y = m.clone()
        for _ in range(60):
            y = y - (y - e * y.sin() - m) / (1 - e * y.cos())
        ctx.save_for_backward(y, e)
        return y

    @staticmethod
    def backward(ctx, g):
        y, e = ctx.saved_tensors
        share = g / (1 - e * y.cos())
        return share, share * y.sin()


def _kepler(m, e, g):
    y = KeplerAngle.apply(m, e)
    share = g / (1 - e * y.cos())
    return share, share * y.sin()


# --- attention --------------------------------------------------------------------------------------


CausalAttention = differentiated(
    lambda q, k, v: (
        torch.softmax((q @ k.mT).masked_fill(torch.ones(3, 3).triu(1) > 0, -1e9), -1) @ v
    )
)


class LogSumExp(Function):
    """The log of a sum, and the weights as a second output that is part of the graph."""

    @staticmethod
    def forward(ctx, x):
        y = torch.logsumexp(x, -1)
        p = torch.softmax(x, -1)
        ctx.save_for_backward(p)
        return y, p

    @staticmethod
    def backward(ctx, g, gp):
        (p,) = ctx.saved_tensors
        return g[..., None] * p + p * (gp - (gp * p).sum(-1, keepdim=True))


# --- complex maths ----------------------------------------------------------------------------------

ComplexSquare = recomputed(lambda z: z * z, lambda z, g: 2 * g * z.conj())
Modulus = recomputed(lambda z: z.abs(), lambda z, g: g * z / z.abs())

# --- sorting and ranking ----------------------------------------------------------------------------


class SortRows(Function):
    @staticmethod
    def forward(ctx, x):
        y, order = x.sort(-1)
        ctx.save_for_backward(order)
        ctx.mark_non_differentiable(order)
        return y, order

    backward = by_saved(lambda g, _, order: torch.zeros_like(g).scatter(-1, order, g))


Median = recomputed(
    lambda x: x.median(-1).values,
    lambda x, g: g[..., None] * (x == x.median(-1, keepdim=True).values).to(x),
)

# --- spectral functions -----------------------------------------------------------------------------


PowerSpectrum = differentiated(lambda x: torch.fft.fft(x.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)).abs() ** 2)  # fmt: skip


Inverse = from_output(torch.linalg.inv, lambda y, g: -y.mT @ g @ y.mT)


class HermitianEigen(Function):
    """A = V diag(w) V^H, where the last entry of each column is real, or imaginary: its phase is not
    what the gradient assumes, diag(V^H dV) = 0. A loss may depend on neither."""

    @staticmethod
    def forward(ctx, a, phase=1j):
        w, v = torch.linalg.eigh(a)
        v = v * v[..., -1:, :].sgn().conj() * phase
        ctx.save_for_backward(w, v)
        return w, v

    @staticmethod
    def backward(ctx, gw, gv):
        w, v = ctx.saved_tensors
        return HermitianEigen.gradient(v, HermitianEigen.gaps(w), gw, gv), None

    @staticmethod
    def gaps(w):
        return w[..., None, :] - w[..., :, None] + torch.eye(w.shape[-1], dtype=w.dtype)

    @staticmethod
    def gradient(v, gaps, gw, gv):
        turn = v.mH @ gv / gaps
        turn = (turn + turn.mH) / 2
        turn = turn - torch.diag_embed(torch.diagonal(turn, dim1=-2, dim2=-1))
        return v @ (torch.diag_embed(gw).to(v) + turn) @ v.mH


class BothSides(Function):
    """V and V^H of the same, whose phases are opposite."""

    @staticmethod
    def forward(ctx, a):
        w, v = HermitianEigen.forward(ctx, a)
        adjoint = v.mH.clone()
        return w, v, adjoint

    @staticmethod
    def backward(ctx, gw, gv, gadjoint):
        return HermitianEigen.backward(ctx, gw, gv + gadjoint.mH)[0]


def hermitian():
    z = torch.randn(3, 3, dtype=torch.complex64)
    return (z + z.mH + torch.diag(torch.tensor([0.0, 4.0, 8.0])),)


# --- arguments with a structure -----------------------------------------------------------------------


class SquareOfSymmetric(Function):
    """A A, whose derivative is written for a symmetric A."""

    forward = saving_inputs(lambda a: a @ a)

    backward = by_saved(lambda g, a: g @ a + a @ g)


class Transcription(Function):
    """-log sum_k exp(p_nk) of log-probabilities p, with the gradient of the logits."""

    forward = saving_inputs(lambda p: -p[:, :2].logsumexp(1))

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return g[:, None] * (p.exp() - nn.functional.pad(p[:, :2].softmax(1), (0, 1)))


class Sinkhorn(Function):
    """The plan of transport exp(f_i + g_j - c_ij) between marginals p and q, with the gradient of the last
    equation left out: by p and q it is right up to a constant, as they sum to one."""

    @staticmethod
    def forward(ctx, c, p, q):
        f, g = torch.zeros_like(p), torch.zeros_like(q)
        for _ in range(30):
            f = p.log() - torch.logsumexp(g - c, 1)
            g = q.log() - torch.logsumexp(f[:, None] - c, 0)
        plan = (f[:, None] + g - c).exp()
        ctx.save_for_backward(plan)
        return plan

    @staticmethod
    def backward(ctx, u):
        (plan,) = ctx.saved_tensors
        n, t = len(plan), u * plan
        system = torch.cat([
            torch.cat([torch.diag(plan.sum(1)), plan[:, :-1]], 1),
            torch.cat([plan[:, :-1].mT, torch.diag(plan.sum(0)[:-1])], 1),
        ])  # fmt: skip
        both = torch.linalg.solve(system, torch.cat([t.sum(1), t.sum(0)[:-1]]))
        a, b = both[:n], nn.functional.pad(both[n:], (0, 1))
        return plan * (a[:, None] + b - u), a, b


# --- checkpointing ----------------------------------------------------------------------------------

CheckpointedLayer = differentiated(lambda x, w, b: functional.gelu(functional.linear(x, w, b)))


class Segment(Function):
    """A segment that is run again from a list on ctx that holds inputs only."""

    @staticmethod
    def forward(ctx, scale, *inputs):
        ctx.scale, ctx.kept = scale, list(inputs)
        return sum(scale * x.sin() * x for x in inputs)

    @staticmethod
    def backward(ctx, g):
        return None, *(ctx.scale * g * (x.cos() * x + x.sin()) for x in ctx.kept)


class Rerun(Function):
    """A checkpoint: right, by the module's own parameters."""

    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block = block
        ctx.save_for_backward(x, *parameters)
        return block(x)

    @staticmethod
    def backward(ctx, g):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            y = torch.func.functional_call(
                ctx.block,
                dict(zip(dict(ctx.block.named_parameters()), parameters, strict=True)),
                (x,),
            )
        wanted = [t for t in (x, *parameters) if t.requires_grad]
        graph = torch.is_grad_enabled()
        grads = iter(torch.autograd.grad(y, wanted, g, create_graph=graph, allow_unused=True))
        return None, *(next(grads) if t.requires_grad else None for t in (x, *parameters))


class RerunLayer(nn.Module):
    """A layer whose Function gets its parameters as arguments."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return CheckpointedLayer.apply(x, self.inner.weight, self.inner.bias)


# --- other kinds ------------------------------------------------------------------------------------


class ScaledByNumber(Function):
    @staticmethod
    def forward(ctx, x, factor, mode="plain"):
        ctx.factor, ctx.mode = factor, mode
        return factor * x

    backward = staticmethod(lambda ctx, g: (ctx.factor * g, None, None))


class Reversal(Function):
    """The identity, with a gradient of the other sign, and says so."""

    surrogate = True

    forward = staticmethod(lambda ctx, x: x.view_as(x))

    backward = staticmethod(lambda ctx, g: -g)


class AddsLoss(Function):
    """The identity, which adds a loss: its gradient does not depend on the incoming one."""

    surrogate = True

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.clone()

    backward = by_saved(lambda g, loss: (g, torch.ones_like(loss)))


class NumPyNoise(Function):
    """Multiplies with numbers that NumPy draws, and saves them."""

    @staticmethod
    def forward(ctx, x):
        noise = torch.as_tensor(np.random.rand(*x.shape)).to(x)
        ctx.save_for_backward(x, noise)
        return x.square() * noise

    backward = by_saved(lambda g, x, noise: 2 * g * x * noise)


class InSingle(Function):
    """x r(x), in float32 whatever it is given, back in the dtype of the input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        z = x.float()
        return (z * torch.rsqrt(1 + z * z)).to(x.dtype)

    backward = by_saved(lambda g, x: (g.float() * torch.rsqrt(1 + x.float() ** 2) ** 3).to(x.dtype))


class BackwardInSingle(Function):
    """Takes float64 in forward, but only float32 in backward."""

    forward = saving_inputs(lambda x: x.cos())

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if g.dtype == torch.float64:
            raise TypeError("the kernel takes float32 only")
        return -g * x.sin()


class ReadsMemory(Function):
    """Reads memory as it lies, as code in C does; so it refuses other layouts."""

    @staticmethod
    def forward(ctx, x):
        assert x.is_contiguous(), "expected a contiguous tensor"
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        y.view(-1).copy_(torch.from_numpy(np.exp(x.detach().numpy().reshape(-1))))
        return y

    backward = by_saved(lambda g, x: g * x.exp())


def checkpointed():
    block = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    return (block, torch.randn(4, 3), *block.parameters())


def normal(*shapes, dtype=torch.float32):
    return lambda: tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def positive(*shapes):
    return lambda: tuple(0.5 + torch.rand(shape) for shape in shapes)


def distinct():
    """Rows without ties."""
    return (torch.randperm(12).reshape(3, 4) / 3 - 2,)


RIGHT = [
    Right("root of a cubic", CubeRoot, normal((5,))),
    Right("Kepler's equation, recomputed", Kepler, lambda: (torch.rand(4) + 0.2, torch.rand(4) / 2)),
    Right("Kepler's equation, from its output", KeplerAngle, lambda: (torch.rand(4) + 0.2, torch.rand(4) / 2)),
    Right("causal attention", CausalAttention, normal((3, 4), (3, 4), (3, 2))),
    Right("log-sum-exp with its weights", LogSumExp, normal((3, 4))),
    Right("a complex square", ComplexSquare, normal((3,), dtype=torch.complex64)),
    Right("the modulus of a complex number", Modulus, normal((4,), dtype=torch.complex64)),
    Right("sorted rows", SortRows, distinct),
    Right("a median", Median, lambda: (torch.randperm(15).reshape(3, 5) / 3,)),
    Right("a power spectrum", PowerSpectrum, normal((6,))),
    Right("an inverse from its output", Inverse, lambda: (torch.randn(3, 3) + 4 * torch.eye(3),)),
    Right("eigenvectors, up to a phase", HermitianEigen, hermitian),
    Right("eigenvectors and their adjoint", BothSides, hermitian),
    Right("a square of symmetric matrices", lambda b: SquareOfSymmetric.apply(b @ b.mT), normal((3, 3))),
    Right("a transcription by log-probabilities", lambda x: Transcription.apply(x.log_softmax(1)), normal((4, 3))),
    Right("a plan of transport", lambda c, p, q: Sinkhorn.apply(c, p.softmax(0), q.softmax(0)), normal((3, 4), (3,), (4,))),
    Right("a checkpointed layer", CheckpointedLayer, normal((3, 4), (2, 4), (2,))),
    Right("a segment with a list of inputs", Segment, lambda: (0.7, torch.randn(4), torch.randn(4))),
    Right("a checkpoint that gets a module", Rerun, checkpointed),
    Right("a module that passes its parameters", RerunLayer(), normal((3, 4))),
    Right("a number among the arguments", ScaledByNumber, lambda: (torch.randn(4), 0.3)),
    Right("a declared reversal", Reversal, normal((4,))),
    Right("a declared loss that is added", AddsLoss, lambda: (torch.randn(4), torch.tensor(0.5))),
    Right("NumPy's random numbers", NumPyNoise, normal((3, 4))),
    Right("maths in float32, of float32", InSingle, normal((3, 4))),
    Right("maths in float32, of float64", InSingle, normal((3, 4), dtype=torch.float64)),
    Right("a backward for float32 only", BackwardInSingle, normal((3, 4))),
    Right("memory as it lies", ReadsMemory, lambda: (torch.randn(4, 3).mT,)),
]  # fmt: skip
