"""Right Functions of many kinds, in own maths: `verify` must neither fail one, nor doubt its derivatives.

Each row is a name, a Function, and what makes its inputs from torch's generator.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional


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

        @staticmethod
        def forward(x):
            return forward(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            return gradient(y, g)

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
    for _ in range(40):
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


LambertW = from_output(
    lambda x: newton(lambda y, a: y * y.exp() - a, lambda y, a: (1 + y) * y.exp(), torch.log1p, x),
    lambda y, g: g / ((1 + y) * y.exp()),
)


class FixedPoint(Function):
    """y = tanh(w y + x), the equilibrium of a layer."""

    @staticmethod
    def forward(ctx, x, w):
        y = torch.zeros_like(x)
        for _ in range(200):
            y = torch.tanh(w * y + x)
        ctx.save_for_backward(w, y)
        return y

    @staticmethod
    def backward(ctx, g):
        w, y = ctx.saved_tensors
        slope = 1 - y * y
        v = g * slope / (1 - w * slope)
        return v, v * y


class BisectedSqrt(Function):
    """The square root, by bisection, which leaves rounding only."""

    @staticmethod
    def forward(ctx, x):
        low, high = torch.zeros_like(x), 1 + x
        for _ in range(70):
            middle = (low + high) / 2
            above = middle * middle > x
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        y = (low + high) / 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g / (2 * y)


# --- attention --------------------------------------------------------------------------------------


def attend(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def attend_gradient(q, k, v, g):
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.softmax(q @ k.mT * scale, -1)
    dp = g @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ g


Attention = recomputed(attend, attend_gradient)
CausalAttention = differentiated(
    lambda q, k, v: (
        torch.softmax((q @ k.mT).masked_fill(torch.ones(3, 3).triu(1) > 0, -1e9), -1) @ v
    )
)
LinearAttention = differentiated(
    lambda q, k, v: (q.exp() @ (k.exp().mT @ v)) / (q.exp() @ k.exp().sum(-2)[:, None])
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


CrossEntropy = recomputed(
    lambda x: (torch.logsumexp(x, -1) - x[:, 0]).mean(),
    lambda x, g: g * (torch.softmax(x, -1) - functional.one_hot(torch.zeros(len(x), dtype=torch.long), x.shape[-1]).to(x)) / len(x),
)  # fmt: skip

# --- fused activations ------------------------------------------------------------------------------

Mish = recomputed(
    lambda x: x * torch.tanh(functional.softplus(x)),
    lambda x, g: g * (
        torch.tanh(functional.softplus(x))
        + x * torch.sigmoid(x) * (1 - torch.tanh(functional.softplus(x)) ** 2)
    ),
)  # fmt: skip
TanhGelu = differentiated(
    lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
)
BiasSilu = recomputed(
    lambda x, b: functional.silu(x + b),
    lambda x, b, g: (_silu_gradient(x + b, g), _silu_gradient(x + b, g).sum(0)),
)


def _silu_gradient(z, g):
    s = torch.sigmoid(z)
    return g * s * (1 + z * (1 - s))


SwiGlu = recomputed(
    lambda a, b: functional.silu(a) * b,
    lambda a, b, g: (_silu_gradient(a, g * b), g * functional.silu(a)),
)
Softplus = recomputed(lambda x: functional.softplus(x), lambda x, g: g * torch.sigmoid(x))
LogCosh = recomputed(lambda x: torch.log(torch.cosh(x)), lambda x, g: g * torch.tanh(x))
Snake = recomputed(
    lambda x, a: x + torch.sin(a * x) ** 2 / a,
    lambda x, a, g: (
        g * (1 + torch.sin(2 * a * x)),
        g * (x * torch.sin(2 * a * x) / a - torch.sin(a * x) ** 2 / a**2),
    ),
)
SquaredRelu = recomputed(lambda x: x.relu() ** 2, lambda x, g: 2 * g * x.relu())
Sigmoid = from_output(torch.sigmoid, lambda y, g: g * y * (1 - y))
Softsign = recomputed(lambda x: x / (1 + x.abs()), lambda x, g: g / (1 + x.abs()) ** 2)
GaussianError = recomputed(torch.erf, lambda x, g: 2 / math.sqrt(math.pi) * g * torch.exp(-x * x))


class TwoNorm(Function):
    """|x| of each row, kept as an output."""

    @staticmethod
    def forward(ctx, x):
        n = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, n)
        return n

    @staticmethod
    def backward(ctx, g):
        x, n = ctx.saved_tensors
        return g * x / n


LayerNorm = differentiated(
    lambda x, w: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * w
)
CosineSimilarity = differentiated(
    lambda a, b: (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
)

# --- complex maths ----------------------------------------------------------------------------------

ComplexSquare = recomputed(lambda z: z * z, lambda z, g: 2 * g * z.conj())
ComplexProduct = recomputed(lambda a, b: a * b, lambda a, b, g: (g * b.conj(), g * a.conj()))
Modulus = recomputed(lambda z: z.abs(), lambda z, g: g * z / z.abs())
PhaseTurn = recomputed(
    lambda x, t: torch.polar(x, t),
    lambda x, t, g: (
        (g.conj() * torch.polar(torch.ones_like(t), t)).real,
        (g.conj() * 1j * torch.polar(x, t)).real,
    ),
)

# --- sorting and ranking ----------------------------------------------------------------------------


class SortRows(Function):
    @staticmethod
    def forward(ctx, x):
        y, order = x.sort(-1)
        ctx.save_for_backward(order)
        ctx.mark_non_differentiable(order)
        return y, order

    @staticmethod
    def backward(ctx, g, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, order, g)


class LargestTwo(Function):
    @staticmethod
    def forward(ctx, x):
        y, places = x.topk(2, -1)
        ctx.places, ctx.size = places, x.shape
        return y

    @staticmethod
    def backward(ctx, g):
        return g.new_zeros(ctx.size).scatter(-1, ctx.places, g)


SoftRank = differentiated(lambda x: torch.sigmoid(3 * (x[..., None] - x[..., None, :])).sum(-1))
SoftMaximum = recomputed(
    lambda x: torch.logsumexp(4 * x, -1) / 4, lambda x, g: g[..., None] * torch.softmax(4 * x, -1)
)
Median = recomputed(
    lambda x: x.median(-1).values,
    lambda x, g: g[..., None] * (x == x.median(-1, keepdim=True).values).to(x),
)
Cummax = recomputed(
    lambda x: x.cummax(-1).values,
    lambda x, g: torch.zeros_like(x).scatter_add(-1, x.cummax(-1).indices, g),
)

# --- spectral functions -----------------------------------------------------------------------------

Fourier = recomputed(
    lambda x: torch.fft.rfft(x, norm="ortho"),
    lambda x, g: torch.fft.irfft(g * _halved(x), n=x.shape[-1], norm="ortho"),
)


def _halved(x):
    """Of the adjoint: all frequencies but the first and the last stand for two."""
    weights = torch.full((x.shape[-1] // 2 + 1,), 0.5, dtype=x.dtype)
    weights[0] = weights[-1] = 1.0
    return weights


Circular = recomputed(
    lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w), n=x.shape[-1]),
    lambda x, w, g: (
        torch.fft.irfft(torch.fft.rfft(g) * torch.fft.rfft(w).conj(), n=x.shape[-1]),
        torch.fft.irfft(torch.fft.rfft(g) * torch.fft.rfft(x).conj(), n=x.shape[-1]),
    ),
)
PowerSpectrum = differentiated(lambda x: torch.fft.fft(x.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)).abs() ** 2)  # fmt: skip
Cosines = recomputed(lambda x: x @ _cosines(x), lambda x, g: g @ _cosines(x).mT)


def _cosines(x):
    n = x.shape[-1]
    k = torch.arange(n, dtype=x.dtype)
    return torch.cos(math.pi * (k[:, None] + 0.5) * k / n)


Inverse = from_output(torch.linalg.inv, lambda y, g: -y.mT @ g @ y.mT)
LogDeterminant = recomputed(
    lambda a: torch.logdet(a @ a.mT + torch.eye(3, dtype=a.dtype)),
    lambda a, g: 2 * g * torch.linalg.solve(a @ a.mT + torch.eye(3, dtype=a.dtype), a),
)
Exponential = differentiated(lambda a: torch.linalg.matrix_exp(a))
Solve = recomputed(
    lambda a, b: torch.linalg.solve(a + 4 * torch.eye(3, dtype=a.dtype), b),
    lambda a, b, g: _solve_gradient(a + 4 * torch.eye(3, dtype=a.dtype), b, g),
)


def _solve_gradient(a, b, g):
    u = torch.linalg.solve(a.mT, g)
    return -u @ torch.linalg.solve(a, b).mT, u


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


# --- checkpointing ----------------------------------------------------------------------------------

Checkpoint = differentiated(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w.mT))
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


class RerunLayer(nn.Module):
    """A layer whose Function gets its parameters as arguments."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return CheckpointedLayer.apply(x, self.inner.weight, self.inner.bias)


# --- recurrent scans --------------------------------------------------------------------------------


def scan(a, x):
    """h_t = a_t h_{t-1} + x_t."""
    h, found = torch.zeros_like(x[0]), []
    for at, xt in zip(a, x, strict=True):
        h = at * h + xt
        found.append(h)
    return torch.stack(found)


class LinearScan(Function):
    @staticmethod
    def forward(ctx, a, x):
        h = scan(a, x)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, g):
        a, h = ctx.saved_tensors
        d = _back(a, g)
        before = torch.cat([torch.zeros_like(h[:1]), h[:-1]])
        return d * before, d


def _back(a, g):
    d, found = torch.zeros_like(g[0]), []
    for t in reversed(range(len(g))):
        d = g[t] + (a[t + 1] * d if t + 1 < len(g) else 0)
        found.append(d)
    return torch.stack(found[::-1])


CumulativeProduct = recomputed(lambda x: x.cumprod(0), lambda x, g: (g * x.cumprod(0)).flip(0).cumsum(0).flip(0) / x)  # fmt: skip
CumulativeSum = recomputed(lambda x: x.cumsum(0), lambda x, g: g.flip(0).cumsum(0).flip(0))
LeakyIntegrator = differentiated(lambda x, d: scan(d.sigmoid().expand_as(x), x))
GatedCell = differentiated(
    lambda h, x: torch.sigmoid(x) * h + (1 - torch.sigmoid(x)) * torch.tanh(x * h)
)
LogCumulative = differentiated(lambda x: x.logcumsumexp(0))

# --- other kinds ------------------------------------------------------------------------------------


class ScaledByNumber(Function):
    @staticmethod
    def forward(ctx, x, factor, mode="plain"):
        ctx.factor, ctx.mode = factor, mode
        return factor * x

    @staticmethod
    def backward(ctx, g):
        return ctx.factor * g, None, None


class Reversal(Function):
    """The identity, with a gradient of the other sign, and says so."""

    surrogate = True

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class AddsLoss(Function):
    """The identity, which adds a loss: its gradient does not depend on the incoming one."""

    surrogate = True

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        (loss,) = ctx.saved_tensors
        return g, torch.ones_like(loss)


class NumPyNoise(Function):
    """Multiplies with numbers that NumPy draws, and saves them."""

    @staticmethod
    def forward(ctx, x):
        noise = torch.as_tensor(np.random.rand(*x.shape)).to(x)
        ctx.save_for_backward(x, noise)
        return x.square() * noise

    @staticmethod
    def backward(ctx, g):
        x, noise = ctx.saved_tensors
        return 2 * g * x * noise


class InSingle(Function):
    """x r(x), in float32 whatever it is given, back in the dtype of the input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        z = x.float()
        return (z * torch.rsqrt(1 + z * z)).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (g.float() * torch.rsqrt(1 + x.float() ** 2) ** 3).to(x.dtype)


class BackwardInSingle(Function):
    """Takes float64 in forward, but only float32 in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.cos()

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

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.exp()


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
    Right("Lambert's W", LambertW, positive((5,))),
    Right("an equilibrium", FixedPoint, lambda: (torch.randn(4), torch.rand(4) / 2)),
    Right("a root by bisection", BisectedSqrt, positive((4,))),
    Right("attention", Attention, normal((3, 4), (3, 4), (3, 2))),
    Right("causal attention", CausalAttention, normal((3, 4), (3, 4), (3, 2))),
    Right("linear attention", LinearAttention, normal((3, 4), (3, 4), (3, 2))),
    Right("log-sum-exp with its weights", LogSumExp, normal((3, 4))),
    Right("cross-entropy", CrossEntropy, normal((3, 4))),
    Right("mish", Mish, normal((3, 4))),
    Right("gelu by tanh", TanhGelu, normal((3, 4))),
    Right("bias and silu", BiasSilu, normal((3, 4), (4,))),
    Right("swiglu", SwiGlu, normal((3, 4), (3, 4))),
    Right("softplus", Softplus, normal((3, 4))),
    Right("log cosh", LogCosh, normal((3, 4))),
    Right("snake", Snake, lambda: (torch.randn(3, 4), 0.5 + torch.rand(3, 4))),
    Right("squared relu", SquaredRelu, normal((3, 4))),
    Right("sigmoid from its output", Sigmoid, normal((3, 4))),
    Right("softsign", Softsign, normal((3, 4))),
    Right("the error function", GaussianError, normal((3, 4))),
    Right("a norm from its output", TwoNorm, normal((3, 4))),
    Right("layer norm", LayerNorm, normal((3, 4), (4,))),
    Right("cosine similarity", CosineSimilarity, normal((3, 4), (3, 4))),
    Right("a complex square", ComplexSquare, normal((3,), dtype=torch.complex64)),
    Right("a complex product", ComplexProduct, normal((3,), (3,), dtype=torch.complex64)),
    Right("the modulus of a complex number", Modulus, normal((4,), dtype=torch.complex64)),
    Right("a complex number by its phase", PhaseTurn, lambda: (torch.rand(4) + 0.5, torch.randn(4))),
    Right("sorted rows", SortRows, distinct),
    Right("the largest two", LargestTwo, distinct),
    Right("soft ranks", SoftRank, distinct),
    Right("a soft maximum", SoftMaximum, normal((3, 4))),
    Right("a median", Median, lambda: (torch.randperm(15).reshape(3, 5) / 3,)),
    Right("a running maximum", Cummax, distinct),
    Right("a real Fourier transform", Fourier, normal((2, 6))),
    Right("a circular convolution", Circular, normal((6,), (6,))),
    Right("a power spectrum", PowerSpectrum, normal((6,))),
    Right("a cosine transform", Cosines, normal((2, 5))),
    Right("an inverse from its output", Inverse, lambda: (torch.randn(3, 3) + 4 * torch.eye(3),)),
    Right("a log-determinant", LogDeterminant, normal((3, 3))),
    Right("a matrix exponential", Exponential, normal((3, 3))),
    Right("eigenvectors, up to a phase", HermitianEigen, hermitian),
    Right("eigenvectors and their adjoint", BothSides, hermitian),
    Right("a linear solve", Solve, normal((3, 3), (3, 2))),
    Right("a checkpoint of two products", Checkpoint, normal((3, 4), (4, 2))),
    Right("a checkpointed layer", CheckpointedLayer, normal((3, 4), (2, 4), (2,))),
    Right("a segment with a list of inputs", Segment, lambda: (0.7, torch.randn(4), torch.randn(4))),
    Right("a module that passes its parameters", RerunLayer(), normal((3, 4))),
    Right("a linear scan", LinearScan, lambda: (torch.rand(4, 3), torch.randn(4, 3))),
    Right("a cumulative product", CumulativeProduct, positive((4, 3))),
    Right("a cumulative sum", CumulativeSum, normal((4, 3))),
    Right("a leaky integrator", LeakyIntegrator, normal((4, 3), (3,))),
    Right("a gated cell", GatedCell, normal((3, 4), (3, 4))),
    Right("a running log-sum-exp", LogCumulative, normal((4, 3))),
    Right("a number among the arguments", ScaledByNumber, lambda: (torch.randn(4), 0.3)),
    Right("a declared reversal", Reversal, normal((4,))),
    Right("a declared loss that is added", AddsLoss, lambda: (torch.randn(4), torch.tensor(0.5))),
    Right("NumPy's random numbers", NumPyNoise, normal((3, 4))),
    Right("maths in float32, of float32", InSingle, normal((3, 4))),
    Right("maths in float32, of float64", InSingle, normal((3, 4), dtype=torch.float64)),
    Right("a backward for float32 only", BackwardInSingle, normal((3, 4))),
    Right("memory as it lies", ReadsMemory, lambda: (torch.randn(4, 3).mT,)),
]  # fmt: skip
