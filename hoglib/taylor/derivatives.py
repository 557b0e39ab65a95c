"""Derivatives of all orders of pointwise functions of one variable.

Each function returns [g'(x), ..., g^(K)(x)] from x, the value y = g(x), K, and the further arguments of
torch's operation. None is zero. At a kink the first derivative is torch's, and higher ones are zero.
"""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hoglib.taylor.series import Derivative, Univariate

Tower = Callable[..., list[Derivative]]
Polynomial = Sequence[float]  # coefficients, the constant first


def _evaluate_polynomial(p: Polynomial, x: Tensor) -> Tensor | float:
    value: Tensor | float = p[-1] if p else 0.0
    for coefficient in reversed(p[:-1]):
        value = value * x if isinstance(value, Tensor) or value != 1 else x
        value = value + coefficient if coefficient else value
    return value


def _differentiate_polynomial(p: Polynomial) -> list[float]:
    return [k * c for k, c in enumerate(p)][1:]


def _multiply_polynomials(p: Polynomial, q: Polynomial) -> list[float]:
    product = [0.0] * (len(p) + len(q) - 1)
    for i, a in enumerate(p):
        for j, b in enumerate(q):
            product[i + j] += a * b
    return product


def _add_polynomials(p: Polynomial, q: Polynomial) -> list[float]:
    return [a + b for a, b in zip_longest(p, q, fillvalue=0.0)]


def autonomous(first: Polynomial, y: Tensor, K: int) -> list[Derivative]:
    """The derivatives of a y with y' = P(y), P = first: y'' = P'(y) P(y), and so on."""
    derivs: list[Derivative] = []
    p = list(first)
    for _ in range(K):
        derivs.append(_evaluate_polynomial(p, y))
        p = _multiply_polynomials(_differentiate_polynomial(p), first)
    return derivs


def weighted(w: Tensor, r: Polynomial, x: Tensor, K: int) -> list[Derivative]:
    """[w, w', ..., w^(K-1)] for a w with w' = r(x) w: w^(k) = p_k(x) w."""
    derivs: list[Derivative] = []
    p = [1.0]
    for _ in range(K):
        derivs.append(_evaluate_polynomial(p, x) * w)
        p = _add_polynomials(_differentiate_polynomial(p), _multiply_polynomials(r, p))
    return derivs


def power(x: Tensor, p: Any, K: int) -> list[Derivative]:
    derivs: list[Derivative] = []
    factor: Any = 1.0
    for k in range(1, K + 1):
        factor *= p - k + 1
        exponent = p - k
        power = 1.0 if exponent == 0 else x if exponent == 1 else x**exponent
        # not 0 * power, which is NaN at x = 0
        derivs.append(None if factor == 0 else factor * power)
    return derivs


def _quadratic_power(c: float, p: float, x: Tensor, h: Tensor, K: int) -> list[Derivative]:
    """The derivatives of a g with g' = h, a multiple of q^p with q = 1 + c x^2 (asin, atan, ...):

    q h^(m+1) = c (2 (p - m) x h^(m) + m (2p - m + 1) h^(m-1))
    """
    q, derivs = 1 + c * x * x, [h]
    for m in range(K - 1):
        previous = m * (2 * p - m + 1) * derivs[m - 1] if m else 0.0
        derivs.append(c * (2 * (p - m) * x * derivs[m] + previous) / q)
    return list(derivs)


def _times_x(x: Tensor, inner: list[Any]) -> list[Derivative]:
    """The derivatives x f^(k) + k f^(k-1) of x f(x), from [f, f', ...]."""
    return [x * inner[k] + k * inner[k - 1] for k in range(1, len(inner))]


def _sigmoids(x: Tensor, K: int) -> list[Any]:
    s = x.sigmoid()
    return [s, *autonomous((0, 1, -1), s, K)]


def _cycle(K: int, *values: Tensor) -> list[Derivative]:
    return [values[k % len(values)] for k in range(K)]


def _kink(slope: Tensor | float, K: int) -> list[Derivative]:
    return [slope] + [None] * (K - 1)


def _softplus(x: Tensor, y: Tensor, K: int, beta: Any = 1, threshold: Any = 20) -> list[Derivative]:
    # torch's softplus is linear beyond its threshold
    linear = x * beta > threshold
    towers = _sigmoids(beta * x, K - 1)
    return [torch.where(linear, float(k == 0), beta**k * s) for k, s in enumerate(towers)]


def _gelu(x: Tensor, y: Tensor, K: int, approximate: str = "none") -> list[Derivative]:
    if approximate == "tanh":
        return _gelu_by_tanh(x, K)
    density = torch.exp(-x * x / 2) / math.sqrt(math.tau)
    return _times_x(x, [torch.special.ndtr(x), *weighted(density, (0, -1), x, K)])


def _gelu_by_tanh(x: Tensor, K: int) -> list[Derivative]:
    # x (1 + tanh u) / 2 with a cubic polynomial u: three derivatives are nonzero
    c, d = math.sqrt(2 / math.pi), 0.044715
    cubic: list[Any] = [c * (1 + 3 * d * x * x), c * 6 * d * x, torch.full_like(x, c * 6 * d)]
    n = (cubic + [None] * K)[:K]
    t = torch.tanh(c * (x + d * x**3))
    tanh = Univariate(K).compose(autonomous((1, 0, -1), t, K), n)
    return _times_x(x, [(1 + t) / 2, *(0.0 if p is None else p / 2 for p in tanh)])


def _mish(x: Tensor, y: Tensor, K: int) -> list[Derivative]:
    t = torch.tanh(torch.nn.functional.softplus(x))
    n: Any = _softplus(x, x, K)
    return _times_x(x, [t, *Univariate(K).compose(autonomous((1, 0, -1), t, K), n)])


def _elu(
    x: Tensor, y: Tensor, K: int, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> list[Derivative]:
    positive = x > 0
    # exp(0) on the other side: exp of a large x overflows, and the mask's gradient would be NaN
    below = alpha * scale * torch.exp(torch.where(positive, 0, x) * input_scale)
    slopes = [below * input_scale**k for k in range(1, K + 1)]
    return [torch.where(positive, 0.0 if k else scale, slope) for k, slope in enumerate(slopes)]


def _clamp(x: Tensor, y: Tensor, K: int, low: Any = None, high: Any = None) -> list[Derivative]:
    mask = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        mask = mask & (x >= low)
    if high is not None:
        mask = mask & (x <= high)
    return _kink(mask, K)


def power_of(x: Tensor, y: Tensor, K: int, p: object) -> list[Derivative]:
    if not isinstance(p, Tensor):
        return power(x, p, K)
    factor, derivs = torch.ones_like(p, dtype=y.dtype), []
    for k in range(1, K + 1):
        factor = factor * (p - k + 1)
        # a zero factor makes the derivative zero, also at x = 0 where the power is infinite
        derivs.append(torch.where(factor == 0, 0, factor * x ** torch.where(factor == 0, 0, p - k)))
    return list(derivs)


def _polygammas(x: Tensor, first: int, K: int) -> list[Derivative]:
    return [torch.special.polygamma(n, x) for n in range(first, first + K)]


LN2, LN10 = math.log(2), math.log(10)


def _erfs(x: Tensor, K: int, sign: float) -> list[Derivative]:
    return weighted(sign * 2 / math.sqrt(math.pi) * torch.exp(-x * x), (0, -2), x, K)


def _sinc(x: Tensor, y: Tensor, K: int) -> list[Derivative]:
    """The derivatives of f(pi x), f(z) = sin(z) / z.

    Far from 0 by z f^(k) = sin^(k) - k f^(k-1); near 0, where this cancels, by the series
    f^(k) = sum_m (-1)^m z^(2m-k) / ((2m-k)! (2m+1)).
    """
    z, limit = math.pi * x, K / 2 + 1
    # evaluate each formula only on its side, or its infinities would turn the gradient into NaN
    near = z.abs() < limit
    small, large = torch.where(near, z, 0), torch.where(near, limit, z)
    sin, cos = large.sin(), large.cos()
    sines: list[Any] = [sin, *_cycle(K, cos, -sin, -cos, sin)]
    derivs: list[Derivative] = []
    f = sin / large
    for k in range(1, K + 1):
        f = (sines[k] - k * f) / large
        series = [0.0] * int(25 + 3 * limit)
        for n in range(k % 2, len(series), 2):
            m = (n + k) // 2
            series[n] = (-1) ** m / (math.factorial(n) * (2 * m + 1))
        derivs.append(math.pi**k * torch.where(near, _evaluate_polynomial(series, small), f))
    return derivs


def _by_value(p: float) -> Tower:
    """The derivatives g^(k) = (p - k + 1) g^(k-1) / x of g = c x^p, from its value."""

    def tower(x: Tensor, y: Tensor, K: int) -> list[Any]:
        derivs: list[Any] = [y]
        for k in range(1, K + 1):
            derivs.append((p - k + 1) * derivs[-1] / x)
        return derivs[1:]

    return tower


def _log(x: Tensor, K: int, scale: float = 1.0) -> list[Any]:
    slope = scale / x
    return [slope, *_by_value(-1)(x, slope, K - 1)]


# Name of an operation in torch.ops.aten -> its derivatives.
POINTWISE: dict[str, Tower] = {
    "exp": lambda x, y, K: [y] * K,
    "exp2": lambda x, y, K: [LN2**k * y for k in range(1, K + 1)],
    "expm1": lambda x, y, K: [y + 1] * K,
    "log": lambda x, y, K: _log(x, K),
    "log2": lambda x, y, K: _log(x, K, 1 / LN2),
    "log10": lambda x, y, K: _log(x, K, 1 / LN10),
    "log1p": lambda x, y, K: _log(1 + x, K),
    "sin": lambda x, y, K: _cycle(K, x.cos(), -y, -x.cos(), y),
    "cos": lambda x, y, K: _cycle(K, -x.sin(), -y, x.sin(), y),
    "sinc": _sinc,
    "tan": lambda x, y, K: autonomous((1, 0, 1), y, K),
    "sinh": lambda x, y, K: _cycle(K, x.cosh(), y),
    "cosh": lambda x, y, K: _cycle(K, x.sinh(), y),
    "tanh": lambda x, y, K: autonomous((1, 0, -1), y, K),
    "asin": lambda x, y, K: _quadratic_power(-1, -0.5, x, (1 - x * x).rsqrt(), K),
    "acos": lambda x, y, K: _quadratic_power(-1, -0.5, x, -(1 - x * x).rsqrt(), K),
    "asinh": lambda x, y, K: _quadratic_power(1, -0.5, x, (1 + x * x).rsqrt(), K),
    "acosh": lambda x, y, K: _quadratic_power(-1, -0.5, x, (x * x - 1).rsqrt(), K),
    "atan": lambda x, y, K: _quadratic_power(1, -1, x, 1 / (1 + x * x), K),
    "atanh": lambda x, y, K: _quadratic_power(-1, -1, x, 1 / (1 - x * x), K),
    "sigmoid": lambda x, y, K: autonomous((0, 1, -1), y, K),
    "log_sigmoid_forward": lambda x, y, K: [
        (-1) ** k * s for k, s in enumerate(_sigmoids(-x, K - 1))
    ],
    "logit": lambda x, y, K: [a - b for a, b in zip(_log(x, K), _log(x - 1, K), strict=True)],
    "gelu": _gelu,
    "mish": _mish,
    "silu": lambda x, y, K: _times_x(x, _sigmoids(x, K)),
    "softplus": _softplus,
    "elu": _elu,
    "erf": lambda x, y, K: _erfs(x, K, 1),
    "erfc": lambda x, y, K: _erfs(x, K, -1),
    "lgamma": lambda x, y, K: _polygammas(x, 0, K),
    "digamma": lambda x, y, K: _polygammas(x, 1, K),
    "sqrt": _by_value(0.5),
    "rsqrt": _by_value(-0.5),
    "reciprocal": _by_value(-1),
    "relu": lambda x, y, K: _kink(x > 0, K),
    "leaky_relu": lambda x, y, K, a=0.01: _kink(torch.where(x > 0, torch.ones_like(x), a), K),
    "threshold": lambda x, y, K, threshold, value: _kink(x > threshold, K),
    "hardtanh": lambda x, y, K, low=-1, high=1: _kink((x > low) & (x < high), K),
    "hardshrink": lambda x, y, K, width=0.5: _kink(x.abs() > width, K),
    "softshrink": lambda x, y, K, width=0.5: _kink(x.abs() > width, K),
    "clamp": _clamp,
    "clamp_min": lambda x, y, K, low: _clamp(x, y, K, low),
    "clamp_max": lambda x, y, K, high: _clamp(x, y, K, None, high),
    "abs": lambda x, y, K: _kink(x.sgn(), K),
    "frac": lambda x, y, K: _kink(1.0, K),
    "nan_to_num": lambda x, y, K, *_: _kink(x.isfinite(), K),
}
