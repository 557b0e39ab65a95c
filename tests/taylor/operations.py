"""Functions of torch's operations, one or more for each rule: name, function, argument."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from hoglib._core.torch_api.torch_version import TORCH_VERSION

_generator = torch.Generator().manual_seed(0)
X = torch.randn(4, 3, dtype=torch.float64, generator=_generator)
W = torch.randn(3, 5, dtype=torch.float64, generator=_generator)
P = X.abs() + 0.3  # positive
U = X.tanh() * 0.9  # within (-1, 1)

with torch.random.fork_rng():
    torch.manual_seed(0)
    GRU = nn.GRU(3, 4, batch_first=True).double()
    LAYER = nn.TransformerEncoderLayer(
        3, 1, 6, dropout=0.0, batch_first=True, activation="gelu"
    ).double()


def spd(x):
    return x.T @ x + torch.eye(3, dtype=x.dtype)


def assigned(x):
    y = x * 1
    y[[0, 1]] = x[[1, 2]] ** 2
    return y


def written(x):
    b = torch.zeros(4, 2, dtype=x.dtype)
    b[:, 0] = x[:, 0] ** 2
    b[:, 1] += x[:, 1] * 2
    return b**2


def view_changed(x):
    y = x * 3
    first, rest = y[0], y[:, 1:]
    first.add_(x[1] ** 2)
    return (rest**2).sum(1) + y[:, 0]


def named(module, names, x):
    return {f"{module.__name__}.{name}": (getattr(module, name), x) for name in names.split()}


def _ranks(x):
    """Of 0, 1, 2 and 3 dimensions."""
    return x[0, 0] ** 2, x[1].sin(), x * 1, torch.stack([x, x**2, x.cos()])


CASES = {
    **named(torch, "exp exp2 expm1 sin cos tan sinh cosh tanh asinh atan sigmoid erf erfc square relu abs " "sinc", X),
    **named(torch, "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma", P),
    **named(torch, "asin acos atanh", U),
    **named(F, "silu gelu softplus elu selu celu mish leaky_relu hardtanh hardswish hardsigmoid logsigmoid relu6 softsign " "tanhshrink hardshrink softshrink", X),
    "acosh": (torch.acosh, P + 1),
    "logit": (torch.logit, 0.4 * U + 0.5),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "pow tensor": (lambda x: x ** torch.tensor([1.0, 2, 3]), X),
    "2**x": (lambda x: 2**x, X),
    "dot": (lambda x: x[0] @ x[1], X),
    "group_norm": (lambda x: F.group_norm(x.reshape(2, 6), 3), X),
    "rms norm": (lambda x: F.rms_norm(x, (3,)), X),
    "std": (lambda x: x.std(1), X),
    "norm1": (lambda x: x.norm(1, dim=1), X),
    "norm3": (lambda x: torch.linalg.vector_norm(x, 3, dim=1), X),
    "normalize": (lambda x: F.normalize(x), X),
    "convolution by its kernel": (lambda x: F.conv1d(W[:, None], x[:, None]), X),
    "roll": (lambda x: x.roll(1, 1) * x, X),
    "roll0": (lambda x: x.roll(1) * x, X),
    "cumsum, index_select, unfold, flip, roll of no dimension": (lambda x: torch.stack([x[0, 0].cumsum(0), *(y.squeeze() for y in (x[1, 1].index_select(0, torch.tensor([0])), x[1, 2].unfold(0, 1, 1), x[2, 2].flip(0), x[3, 2].roll(1)))]) ** 2, X),
    "prod": (lambda x: x.prod(1), X),
    "prod all": (lambda x: x.prod(), X),
    "amax": (lambda x: (x**2).amax(0), X),
    "maxall": (lambda x: (x**2).max(), X),
    "min": (lambda x: (x**2).min(), X),
    "topk": (lambda x: (x**2).topk(2)[0], X),
    "median": (lambda x: (x**3).median(1)[0], X),
    "clamp by itself": (lambda x: x.clamp(x.flip(0), None) ** 2, X),
    "clamp": (lambda x: x.clamp(-0.5, 0.5) * x, X),
    "tril": (lambda x: x.tril() ** 2, X),
    "diag": (lambda x: (x @ x.T).diagonal(), X),
    "diag_embed": (lambda x: torch.diag_embed(x) @ x[0], X),
    "trace": (lambda x: (x @ x.T).trace(), X),
    "logdet": (lambda x: torch.logdet(x.T @ x + torch.eye(3)), X),
    "inv": (lambda x: torch.linalg.inv(x[:3]), X),
    "solve2": (lambda x: torch.linalg.solve(W[:, :3], x.T**2), X),
    "cross": (lambda x: torch.linalg.cross(x, x.flip(1) ** 2), X),
    "mse": (lambda x: F.mse_loss(x, x**2), X),
    "huber": (lambda x: F.huber_loss(x, x**2), X),
    "smoothl1": (lambda x: F.smooth_l1_loss(x, x**2), X),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 0])), X),
    "binary cross entropy": (lambda x: F.binary_cross_entropy_with_logits(x, U.abs()), X),
    "prelu": (lambda x: F.prelu(x, W[:1, 0]), X),
    "avgpool1": (lambda x: F.avg_pool1d(x[None], 2) ** 2, X),
    "maxpool": (lambda x: F.max_pool2d(x[None] ** 2, 2), X),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x[None] ** 2, 2), X),
    "interp": (lambda x: F.interpolate(x[None, None] ** 2, scale_factor=2, mode="bilinear"), X),
    "nearest": (lambda x: F.interpolate(x[None, None] ** 2, scale_factor=2), X),
    "unfold": (lambda x: F.unfold(x[None, None] ** 2, 2), X),
    "unfold of a tensor": (lambda x: x.unfold(1, 2, 1) ** 2, X),
    "repeat": (lambda x: x.repeat(2, 1) * 2, X),
    "split": (lambda x: x.split([1, 3])[1] ** 2, X),
    "item assignment": (assigned, X),
    "a buffer that is written to": (written, X),
    "in-place on a view": (view_changed, X),
    "scatter_add": (lambda x: torch.zeros(4, 3, dtype=x.dtype).scatter_add(0, torch.tensor([[0, 1, 2]] * 4), x**2), X),
    "index_add_": (lambda x: (torch.zeros(4, 3, dtype=x.dtype).index_add_(0, torch.tensor([0, 0, 1, 2]), x**2) ** 2), X),
    "embedding": (lambda x: F.embedding(torch.tensor([0, 1]), x) ** 2, X),
    "round": (lambda x: x * x.round(), X),
    "frac": (lambda x: x.frac() ** 2, X),
    "fmod": (lambda x: x.fmod(0.4) ** 2, X),
    "remainder": (lambda x: x.remainder(0.4) ** 2, X),
    "through float32": (lambda x: x.float().double() ** 2, X),
    "cov": (lambda x: torch.cov(x), X),
    "nansum": (lambda x: (x**2).nansum(), X),
    "baddbmm": (lambda x: torch.baddbmm(x[None, :, :1], x[None], x.T[None]), X),
    "transformer layer": (LAYER, X[None]),
    "Gaussian likelihood": (lambda x: F.gaussian_nll_loss(x, x**2, P), X),
    "logsigmoid big": (F.logsigmoid, 30 * X),
    "softplus big": (F.softplus, 30 * X),
    "addr": (lambda x: torch.addr(x[:3], x[0], x[1]), X),
    "cumprod": (lambda x: x.cumprod(1), X),
    "GRU": (lambda x: GRU(x[None])[0], X),
    "solve of a vector": (lambda x: torch.linalg.solve(x[:3], x[3]), X),
    "solve from the right": (lambda x: torch.linalg.solve(x[:3], x, left=False), X),
    "spectral derivative": (lambda x: torch.fft.ifft(1j * torch.fft.fft(x**2)).real, X),
    "irfft2": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x) ** 2, s=x.shape), X),
    "stft": (lambda x: (torch.stft(x.flatten(), 8, window=torch.ones(8, dtype=x.dtype), return_complex=True) .abs() .square()), X),
    "complex": (lambda x: (torch.complex(x, x**2).exp() * 1j).conj().imag, X),
    "angle": (lambda x: torch.angle(torch.complex(x, x**2)), X),
    "complex sgn": (lambda x: torch.complex(x, x**2).sgn().real, X),
    "complex norm": (lambda x: torch.complex(x, x**2).norm(dim=1), X),
    "complex products": (lambda x: torch.view_as_real(torch.vdot(*(torch.complex(x, x**2) @ W.to(torch.complex128) * 1j)[:2])), X),
    "fmax": (lambda x: torch.fmax(x**2, x), X),
    "remainder of tensors": (lambda x: torch.remainder(x**2, P), X),
    "fmod of tensors": (lambda x: torch.fmod(x**3, P), X),
    "std_mean": (lambda x: torch.stack(torch.std_mean(x, 1)), X),
    "quantile": (lambda x: (x**2).quantile(0.3, dim=0), X),
    # operands of other ranks, whose sizes are the number of directions
    **{
        f"{name} of {a.dim()} and {b.dim()} dimensions": (lambda x, f=f, i=i, j=j: f(_ranks(x)[i], _ranks(x)[j]), X[:3])
        for name, f in {
            "atan2": torch.atan2, "maximum": torch.maximum, "hypot": torch.hypot, "logaddexp": torch.logaddexp,
            "clamp": lambda a, b: torch.clamp(b**2, max=a), "xlogy": lambda a, b: torch.xlogy(a, b**2 + 1),
            "ldexp_": lambda a, b: (a * b).ldexp_(a), "lerp": lambda a, b: torch.lerp(a, b, b.sin()),
        }.items()
        for (i, a), (j, b) in itertools.permutations(enumerate(_ranks(X[:3])), 2)
    },
    "solve, one matrix": (lambda x: torch.linalg.solve(spd(x), (x * x[:, :1]).expand(3, 3, 3).cumsum(0)), X[:3]),
    "convolution, weight and bias of x": (lambda x: F.conv1d(x[:, None], x[:, None, :2].sin(), x[0] ** 2), X[:3]),
}  # fmt: skip

if TORCH_VERSION < (2, 13):  # torch.ops.aten.max_pool2d_with_indices has no decomposition
    del CASES["maxpool"]

# Those that are nested in reverse mode with the whole function.
WITHOUT_A_RULE = {
    "erfinv": (torch.erfinv, U),
    "copysign": (lambda x: torch.copysign(x**2, x), X),
    "bilinear": (lambda x: F.bilinear(x, x, W.T[:2, None] * x[0][:, None]), X),
    "cholesky_solve": (lambda x: torch.cholesky_solve(x.T, torch.linalg.cholesky(spd(x))), X),
    "eigh": (lambda x: torch.linalg.eigh(spd(x))[0], X),
    "QR": (lambda x: torch.linalg.qr(x)[1], X),
    **{name: (getattr(torch.special, name), P) for name in ("i0", "i1e", "erfcx", "log_ndtr")},
    "scatter_reduce": (lambda x: x.scatter_reduce(0, torch.tensor([[0, 0, 1], [1, 0, 1]]), x[:2] ** 2, "mean"), X),
    "adaptive maximum": (lambda x: F.adaptive_max_pool2d(x[None] ** 2, (3, 2)), X),
    "random numbers": (lambda x: x * torch.normal(0 * x, 1e-9 + 0 * x), X),
}  # fmt: skip
