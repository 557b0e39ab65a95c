"""The Taylor rule of each operation of torch.

A rule takes a `Call` and returns the output's coefficients; for several outputs, a list with the
coefficients of each, None if an output is constant. Rules consist of differentiable torch operations.

An operation without a rule is decomposed into operations with rules, by COMPOSITES or by torch's own
decomposition. Only the coefficients come from the decomposition; the value is torch's.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hoglib._core.torch_api.torch_internals import decomposition
from hoglib.ops._norms import layer_norm, torch_batch_norm
from hoglib.ops._special_points import product, scan
from hoglib.taylor.derivatives import POINTWISE, power_of
from hoglib.taylor.kinks import KINKS, one_sided
from hoglib.taylor.products import PRODUCTS
from hoglib.taylor.series import Bilinear, Call, Parts, Rule, apply, multiply, plus, times
from hoglib.taylor.structural import CONSTANT, JOINS, LINEAR, SEVERAL, ZERO, where_parts


def _pow(call: Call) -> Parts:
    a, b = call.args[:2]
    a_n, b_n, K = call.parts(a), call.parts(b), call.algebra.order
    if b_n is None:
        assert a_n is not None
        return call.algebra.compose(power_of(a, call.out, K, b), call.aligned(a_n))
    if not isinstance(a, Tensor):
        a = torch.as_tensor(a, dtype=b.dtype, device=b.device)
    # a^b = exp(b log a), and every derivative of exp at b log a is call.out
    log = a.log()
    log_n = None if a_n is None else call.algebra.compose(POINTWISE["log"](a, log, K), a_n)
    return call.algebra.compose([call.out] * K, call.product(multiply, b, log, b_n=log_n))


def _vector_norm(call: Call) -> Parts:
    """|x|; where it is 0, all coefficients are 0, as in torch, or one-sided if call.side is set."""
    x, order, dims, keep = call.norm_arguments()
    assert order == 2, "others are composites"

    def squares(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
        found = a.square() if a is b else a * b
        return found if x.dim() == 0 else found.sum([d + (lead_a or lead_b) for d in dims], keep)

    n, y = call.product(squares, x, x), call.out
    zero = y == 0
    # avoid infinite derivatives of the root at 0, masked below
    safe = torch.where(zero, 1, y)
    found = call.algebra.compose(POINTWISE["sqrt"](safe * safe, safe, call.algebra.order), n)
    if call.side and call.parts(x):
        beside = _norm_beside_zero(call, x, squares)
        if beside is not None:
            return where_parts(call, zero, beside, found)
    return apply(lambda part: torch.where(zero, 0, part), found)


def _norm_beside_zero(call: Call, x: Tensor, squares: Bilinear) -> Parts | None:
    """The coefficients of |x| along a path from x(0) = 0, on the side call.side.

        |x(t)| = |t| |q(t)|        q(t) = x(t) / t

    They are exact if q(0), the first coefficient of x, is not 0.
    """
    first, *rest = call.known(x)
    if first is None:
        return None
    lead = call.algebra.leads[0]
    q: Parts = [p if p is None else p / k for k, p in enumerate(rest, start=2)]
    q.append(None)
    n = [None if p is None else 2 * squares(first, p, lead, lead) for p in q]
    n = plus(n, call.algebra.product(squares, q, q))
    start = squares(first, first, lead, lead).sqrt()
    safe = torch.where(start == 0, 1, start)
    size = call.algebra.compose(POINTWISE["sqrt"](safe * safe, safe, call.algebra.order), n)
    terms = enumerate([start, *size[:-1]], start=1)
    return [None if p is None else torch.where(start == 0, 0, call.side * k * p) for k, p in terms]


def _atan2(call: Call) -> Parts:
    """The nilpotent part is the angle between (x, y) and the point (x_0, y_0):

    atan of (y x_0 - x y_0) / (x x_0 + y y_0)
    """
    y, x = call.args
    y_n, x_n = call.known(y), call.known(x)
    algebra = call.algebra
    # not atan(y / x), which has no expansion where x_0 is 0
    cross = plus(times(x, y_n), times(-y, x_n))
    along, square = plus(times(x, x_n), times(y, y_n)), x * x + y * y
    inverse = square.reciprocal()
    inverse_n = algebra.compose(POINTWISE["reciprocal"](square, inverse, algebra.order), along)
    tangent = plus(times(inverse, cross), algebra.product(multiply, cross, inverse_n))
    zero = torch.zeros_like(call.out)
    return algebra.compose(POINTWISE["atan"](zero, zero, algebra.order), tangent)


def _pointwise(name: str) -> Rule:
    tower = POINTWISE[name]
    several = name == "log_sigmoid_forward"

    def rule(call: Call) -> Any:
        x, *rest = call.args
        out = call.out[0] if several else call.out
        kwargs = {k: v for k, v in call.kwargs.items() if v is not None}
        # evaluate slopes beside the kink, on the side of the path
        at = one_sided(call, x) if call.side and name in KINKS else x
        derivatives = tower(at, out, call.algebra.order, *rest, **kwargs)
        found = call.algebra.compose(derivatives, call.known(x))
        return [found, None] if several else found

    return rule


def _linear(function: Callable[..., Any]) -> Rule:
    def rule(call: Call) -> Any:
        x, *rest = call.args
        run = lambda part, lead: function(part, lead, x, call.out, *rest, **call.kwargs)  # noqa: E731
        return call.algebra.of_each(run, call.known(x))

    return rule


def _several(function: Callable[..., Any]) -> Rule:
    def rule(call: Call) -> list[Parts | None]:
        pieces = _linear(function)(call)
        return [[None if p is None else p[i] for p in pieces] for i in range(len(call.out))]

    return rule


RULES: dict[str, Rule] = {
    **dict.fromkeys(ZERO, lambda call: None),
    **{name: _pointwise(name) for name in POINTWISE},
    **{name: _several(function) for name, function in SEVERAL.items()},
    **{name: _linear(function) for name, function in LINEAR.items()},
    **PRODUCTS,
    **JOINS,
    "atan2": _atan2,
    "view_as_complex": lambda call: apply(
        lambda part: torch.view_as_complex(part.contiguous()), call.known(call.args[0])
    ),
    "pow": _pow,
    "linalg_vector_norm": _vector_norm,
}


def names_of(func: Any) -> tuple[str, str]:
    """("name.overload", "name") of an operation; the name without the underscore of in-place."""
    packet = func.overloadpacket.__name__
    if packet.endswith("_") and not packet.endswith("__"):
        packet = packet[:-1]
    return f"{packet}.{func._overloadname}", packet


def is_composite(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the operation must be decomposed although it has a rule: not for these arguments."""
    name = names_of(func)[1]
    is_complex = isinstance(args[0], Tensor) and args[0].is_complex()
    if name == "linalg_vector_norm":
        return is_complex or (len(args) > 1 and args[1] != 2)
    if name in ("abs", "sgn"):
        return is_complex
    if name == "logit":
        return len(args) > 1 and args[1] is not None
    return name.startswith("clamp") and any(isinstance(limit, Tensor) for limit in args[1:])


@cache
def is_constant(func: Any) -> bool:
    """Whether the outputs of an operation are constant for autograd."""
    return func.namespace == "aten" and names_of(func)[1] in CONSTANT


@cache
def rule_of(func: Any) -> Rule | None:
    """The rule of an operation of torch, or None."""
    names = names_of(func) if func.namespace == "aten" else ()
    return next((RULES[name] for name in names if name in RULES), None)


Composite = Callable[..., Any]


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    # subtract the maximum, or exp overflows; as a constant, because it cancels
    top = x.detach().amax(dim, keepdim=True)
    top = torch.where(top.isfinite(), top, 0)
    found = (x - top).exp().sum(dim, keepdim=True).log() + top
    return found if keepdim else found.squeeze(dim)


def _statistics(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor]:
    """The mean and the reciprocal standard deviation."""
    mean = x.mean(dims, keepdim=True)
    return mean, ((x - mean).square().mean(dims, keepdim=True) + eps).rsqrt()


def _layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    of_rows = _statistics(x, list(range(-len(shape), 0)), eps)
    return layer_norm(x, shape, weight, bias, eps), *of_rows


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: Any, eps: Any
) -> Any:
    # in training torch's own operation has updated the running statistics
    running = (None, None) if training else (mean, var)
    y = torch_batch_norm(x, weight, bias, *running, training, momentum, eps)
    if not training:
        return y, None, None
    return y, *(s.flatten() for s in _statistics(x, [0, *range(2, x.dim())], eps))


def _variance(x: Tensor, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
    dims = list(range(x.dim())) if dim is None or dim == [] else dim
    centred = x - x.mean(dims, keepdim=True)
    count = x.numel() // max(centred.sum(dims).numel(), 1)
    correction = 1 if correction is None else correction
    return centred.square().sum(dims, keepdim=keepdim) / (count - correction)


def _prod(x: Tensor, *dims: Any, dtype: Any = None) -> Tensor:
    return product(x, *dims) if x.dim() else product(x)


def _modulo(rounding: str) -> Composite:
    # the rounded quotient is constant between its jumps
    return lambda x, y: x - y * torch.div(x, y, rounding_mode=rounding)


def _complex(real: Tensor, imag: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imag), -1))


def _angle(z: Tensor) -> Tensor:
    if not z.is_complex():
        return torch.zeros_like(z)  # constant; only coefficients count here, the value is torch's
    real, imag = torch.view_as_real(z.resolve_conj()).unbind(-1)
    return torch.atan2(imag, real)


def _norm_by(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else dim
    if x.is_complex() and ord == 2:
        real = torch.view_as_real(x.resolve_conj())
        found = torch.linalg.vector_norm(real, 2, [*(d % x.dim() for d in dims), x.dim()])
        return found.reshape(x.square().sum(dims, keepdim).shape) if keepdim else found
    if ord == 1:
        return x.abs().sum(dims, keepdim)
    if abs(ord) == math.inf:
        return (torch.amax if ord > 0 else torch.amin)(x.abs(), dims, keepdim)
    if ord == 0:
        return x.abs().ne(0).to(x.dtype).sum(dims, keepdim)
    return x.abs().pow(ord).sum(dims, keepdim).pow(1 / ord)


COMPOSITES: dict[str, Composite] = {
    "logsumexp": _logsumexp,
    "native_layer_norm": _layer_norm,
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), _batch_norm),
    "cudnn_batch_norm": lambda *given: (*_batch_norm(*given), None),
    "cumprod": lambda x, dim, *, dtype=None: scan(torch.mul, x, dim),
    "logcumsumexp": partial(scan, torch.logaddexp),
    "addbmm": lambda x, a, b, *, beta=1, alpha=1: beta * x + alpha * (a @ b).sum(0),
    "fmax": lambda a, b: torch.where(b.isnan() | (a >= b), a, b),
    "fmin": lambda a, b: torch.where(b.isnan() | (a <= b), a, b),
    **dict.fromkeys(("remainder.Tensor", "remainder.Scalar_Tensor"), _modulo("floor")),
    "fmod.Tensor": _modulo("trunc"),
    "abs": lambda z: torch.linalg.vector_norm(torch.view_as_real(z.resolve_conj()), 2, [-1]),
    "angle": _angle,
    "complex": _complex,
    "polar": lambda size, angle: _complex(size * angle.cos(), size * angle.sin()),
    "var_mean": lambda x, dim=None, *, correction=1, keepdim=False: (
        _variance(x, dim, correction=correction, keepdim=keepdim),
        x.mean(dim, keepdim) if dim else x.mean(list(range(x.dim())), keepdim),
    ),
    "var": _variance,
    "hardswish": lambda x: x * F.hardtanh(x + 3, 0, 6) / 6,
    "prod": _prod,
    "lerp": lambda a, b, weight: a + weight * (b - a),
    "logaddexp": lambda a, b: _logsumexp(torch.stack(torch.broadcast_tensors(a, b)), [0]),
    "linalg_vector_norm": _norm_by,
    # torch's decompositions have no derivative by x where x is 0
    "xlogy": lambda x, y: x * torch.where((x == 0) & (y == 0), 1, y).log(),
    "special_xlog1py": lambda x, y: x * torch.where((x == 0) & (y == -1), 0, y).log1p(),
}


def composite_of(func: Any) -> Composite | None:
    """The decomposition of an operation: from COMPOSITES, else torch's, else None."""
    for name in names_of(func) if func.namespace == "aten" else ():
        if name in COMPOSITES:
            return COMPOSITES[name]
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None  # a decomposition would draw other random numbers
    return decomposition(func)
