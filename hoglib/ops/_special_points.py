"""Functions with wrong torch derivatives at special points: 0, large numbers, rows of -inf."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_modes import only_plain_operations, reverse_only
from hoglib._core.torch_api.torch_private import private
from hoglib.ops._define import define
from hoglib.ops._stand_in import OVER_FORWARD, SILENT, stands_in_for

_POINTS: Any = {
    "name": "logaddexp, sinc, pow, polar, i1, mish, logit, vander",
    "lacks": f"derivatives of order 2 or 3 at 0, or of large numbers, are NaN or wrong{SILENT}",
}
_OVER: Any = {
    "name": "cumprod, householder_product, safe_softmax",
    "lacks": f"{OVER_FORWARD}; of cumprod also what prod lacks",
    "modes": ("rf",),
}
_PRODUCTS: Any = {
    "name": "prod",
    "lacks": "second derivatives divide by the square of a factor, which is 0 below 1e-19 in "
    f"float32: they are wrong or NaN{SILENT}",
    "modes": ("rr", "rf"),
}


def _is_real(*tensors: Any) -> bool:
    return all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors)


@stands_in_for(torch.logaddexp, Tensor.logaddexp, **_POINTS)
def logaddexp(input: Tensor, other: Tensor) -> Tensor:
    """torch.logaddexp by logsumexp, to avoid overflow in derivatives; at (-inf, -inf) they are 0."""
    if not _is_real(input, other):
        return torch.logaddexp(input, other)
    pair = torch.stack(torch.broadcast_tensors(input, other), -1)
    nothing = (pair == -math.inf).all(-1, keepdim=True)
    found = torch.logsumexp(pair.masked_fill(nothing, 0.0), -1)
    return found.masked_fill(nothing.squeeze(-1), -math.inf)


@stands_in_for(torch.logaddexp2, Tensor.logaddexp2, name=_POINTS["name"])
def logaddexp2(input: Tensor, other: Tensor) -> Tensor:
    """torch.logaddexp2, by :func:`logaddexp`."""
    if not _is_real(input, other):
        return torch.logaddexp2(input, other)
    return logaddexp(input * math.log(2), other * math.log(2)) / math.log(2)


@stands_in_for(torch.sinc, Tensor.sinc, torch.special.sinc, name=_POINTS["name"])
def sinc(input: Tensor) -> Tensor:
    """torch.sinc; near 0, where derivatives of the quotient cancel, by its series."""
    if not _is_real(input) or only_plain_operations():
        return torch.sinc(input)
    z = math.pi * input
    # twelve terms: for |z| < 1 the next term is below 1e-25
    near = z.abs() < 1
    # evaluate each branch at points where it is finite: `where` multiplies the unused branch's
    # derivative by 0, and 0 * inf is NaN
    square, far = z.masked_fill(~near, 0.0).square(), z.masked_fill(near, 1.0)
    series = torch.zeros_like(z)
    for k in reversed(range(12)):
        series = series * square + (-1) ** k / math.factorial(2 * k + 1)
    return torch.where(near, series, far.sin() / far)


@stands_in_for(torch.special.i1, name=_POINTS["name"])
def bessel_i1(input: Tensor) -> Tensor:
    """torch.special.i1; near 0, where torch takes its derivative for a constant, by its series."""
    if not _is_real(input):
        return torch.special.i1(input)
    near = input.abs() < 1
    half, far = input.masked_fill(~near, 0.0) / 2, torch.special.i1(input.masked_fill(near, 1.0))
    series = torch.zeros_like(input)
    for k in reversed(range(12)):
        series = series * half.square() + 1 / (math.factorial(k) * math.factorial(k + 1))
    return torch.where(near, half * series, far)


@stands_in_for(F.mish, name=_POINTS["name"])
def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """F.mish; for large x, where torch's second derivative overflows, x itself, exact to rounding."""
    if inplace or only_plain_operations():
        return F.mish(input, inplace)
    # x - mish(x) is about 2 x e^(-2x), 2e-16 at 20
    far = input > 20
    return torch.where(far, input, F.mish(input.masked_fill(far, 0.0)))


@stands_in_for(torch.logit, Tensor.logit, torch.special.logit, name=_POINTS["name"])
def logit(input: Tensor, eps: float | None = None) -> Tensor:
    """torch.logit of the clamped input: with eps, torch has NaN derivatives at 0 and 1."""
    return torch.logit(input if eps is None else input.clamp(eps, 1 - eps))


@stands_in_for(torch.pow, Tensor.pow, name=_POINTS["name"])
def power(input: Any, exponent: Any) -> Tensor:
    """torch.pow, with right derivatives at 0 for a constant tensor of exponents."""
    constant = isinstance(exponent, Tensor) and not exponent.requires_grad
    return (_powers if constant and _is_real(input) else torch.pow)(input, exponent)


@stands_in_for(Tensor.__pow__, name=_POINTS["name"])
def _pow_operator(self: Tensor, other: Any) -> Tensor:
    return power(self, other) if isinstance(other, Tensor) else Tensor.__pow__(self, other)


def _power_slope(x: Tensor, n: Tensor, _: object) -> Tensor:
    base = x.masked_fill(n == 0, 1.0) if x.shape == n.shape else x.where(n != 0, 1.0)
    return n * _powers(base, n - 1)


_powers = define(torch.pow, [_power_slope, None], reference=torch.pow, keep="inputs")


@stands_in_for(torch.vander, name=_POINTS["name"])
def vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:
    """torch.vander by whole powers: its cumprod has no backward, and at 0 no right forward mode."""
    if x.dim() != 1 or (N or 0) < 0:
        return torch.vander(x, N, increasing)  # raises
    n = torch.arange(len(x) if N is None else N, device=x.device)
    return power(x.unsqueeze(-1), n if increasing else n.flip(0))


@stands_in_for(torch.linalg.vander, name=_POINTS["name"])
def _linalg_vander(x: Tensor, *, N: int | None = None) -> Tensor:
    x = torch.atleast_1d(x)
    count = x.shape[-1] if N is None else N
    if count < 2:
        return torch.linalg.vander(x, N=N)  # raises
    return power(x.unsqueeze(-1), torch.arange(count, device=x.device))


@stands_in_for(torch.polar, name=_POINTS["name"])
def polar(abs: Tensor, angle: Tensor) -> Tensor:
    """torch.polar by real and imaginary part, because torch's backward divides by abs."""
    return torch.complex(abs * angle.cos(), abs * angle.sin())


@stands_in_for(torch.prod, Tensor.prod, **_PRODUCTS)
def product(
    input: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """torch.prod without divisions: multiply halves of the factors until one factor is left."""
    x = input if dtype is None else input.to(dtype)
    if dim is None:
        x, dim, keepdim = x.reshape(-1), 0, False
    if not (pytree.is_float(x) and x.dim() and x.shape[dim]):
        return x.prod(dim, keepdim)
    while (count := x.shape[dim]) > 1:
        first, last, rest = x.split([count // 2, count // 2, count % 2], dim)
        x = first * last if not count % 2 else torch.cat([first * last, rest], dim)
    return x if keepdim else x.squeeze(dim)


@stands_in_for(torch.cumprod, Tensor.cumprod, **_OVER)
def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """torch.cumprod without divisions, by :func:`scan`."""
    x = input if dtype is None else input.to(dtype)
    return scan(torch.mul, x, dim) if pytree.is_float(x) else torch.cumprod(x, dim)


def scan(pair: Callable[[Tensor, Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """The cumulative results of an associative operation `pair`, in log2(n) steps of doubling."""
    y, step = x.clone(), 1
    while y.dim() and step < y.shape[dim]:
        rest = y.shape[dim] - step
        longer = pair(y.narrow(dim, step, rest), y.narrow(dim, 0, rest))
        y, step = torch.cat([y.narrow(dim, 0, step), longer], dim), 2 * step
    return y


@stands_in_for(
    torch.logcumsumexp,
    Tensor.logcumsumexp,
    lacks=f"forward over reverse is wrong behind -inf, and third derivatives are NaN{SILENT}",
    modes=("fr",),
)
def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """torch.logcumsumexp by :func:`scan`."""
    if not input.dim() or not _is_real(input):
        return torch.logcumsumexp(input, dim)
    return scan(logaddexp, input, dim)


@stands_in_for(torch.linalg.householder_product, torch.orgqr, Tensor.orgqr, name=_OVER["name"])
def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """torch.linalg.householder_product; under forward mode a product of reflections."""
    if reverse_only():
        return torch.linalg.householder_product(input, tau)
    m, n = input.shape[-2:]
    identity = torch.eye(m, dtype=input.dtype, device=input.device)
    reflectors, Q = input.tril(-1) + identity[:, :n], identity[:, :n]
    for i in reversed(range(tau.shape[-1])):
        v = reflectors[..., i : i + 1]
        Q = Q - tau[..., i, None, None] * v @ (v.mH @ Q)
    return Q


@stands_in_for(private("torch._safe_softmax", None), name=_OVER["name"])
def safe_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """torch._safe_softmax: the softmax of a row of -inf is 0."""
    nothing = (input == -math.inf).all(dim, keepdim=True)
    return input.masked_fill(nothing, 0.0).softmax(dim, dtype=dtype).masked_fill(nothing, 0.0)
