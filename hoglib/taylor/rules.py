"""What each operation of torch does to the coefficients of its tensors.

A rule takes a `Call` and returns the coefficients of the output, or a list of them for several outputs
(None for one that is constant). It is made of differentiable operations of torch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hoglib.taylor.derivatives import POINTWISE, power_of
from hoglib.taylor.kinks import KINKS, one_sided
from hoglib.taylor.products import MATRICES, PRODUCTS
from hoglib.taylor.series import Bilinear, Call, Parts, Rule, each, multiply, scaled, sums
from hoglib.taylor.structural import CONSTANT, JOINS, LINEAR, SEVERAL, ZERO


def _pow(call: Call) -> Parts:
    a, b = call.args[:2]
    a_n, b_n, K = call.parts(a), call.parts(b), call.algebra.order
    if b_n is None:
        assert a_n is not None
        return call.algebra.compose(power_of(a, call.out, K, b), call.aligned(a_n))
    if not isinstance(a, Tensor):
        a = torch.as_tensor(a, dtype=b.dtype, device=b.device)
    log = a.log()
    log_n = None if a_n is None else call.algebra.compose(POINTWISE["log"](a, log, K), a_n)
    n = call.product(multiply, b, log, b_n=log_n)
    return call.algebra.compose([call.out] * K, n)


def _vector_norm(call: Call) -> Parts:
    """|x| with the derivative 0 where it is 0, as torch's."""
    x, order, dims, keep = call.norm_arguments()
    assert order == 2, "others are composites"

    def squares(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
        found = a.square() if a is b else a * b
        if x.dim() == 0:
            return found
        return found.sum([d + (lead_a or lead_b) for d in dims], keep)

    n, y = call.product(squares, x, x), call.out
    zero = y == 0
    safe = torch.where(zero, 1, y)
    derivatives = POINTWISE["sqrt"](safe * safe, safe, call.algebra.order)
    found = call.algebra.compose(derivatives, n)
    if call.side and call.parts(x):
        beside = _norm_beside_zero(call, x, squares)
        if beside is not None:
            return [
                None
                if p is q is None
                else torch.where(zero, 0 if q is None else q, 0 if p is None else p)
                for p, q in zip(found, beside, strict=True)
            ]
    return each(lambda part: torch.where(zero, 0, part), found)


def _norm_beside_zero(call: Call, x: Tensor, squares: Bilinear) -> Parts | None:
    """|x| along a path that begins at zero: |x(t)| = |t| |q(t)| with q = x(t) / t, if q(0) is not 0."""
    first, *rest = call.known(x)
    if first is None:
        return None
    lead = call.algebra.leads[0]
    q: Parts = [p if p is None else p / k for k, p in enumerate(rest, start=2)]
    q.append(None)
    n = [None if p is None else 2 * squares(first, p, lead, lead) for p in q]
    n = sums(n, call.algebra.product(squares, q, q))
    start = squares(first, first, lead, lead).sqrt()
    safe = torch.where(start == 0, 1, start)
    size = call.algebra.compose(POINTWISE["sqrt"](safe * safe, safe, call.algebra.order), n)
    return [
        None if p is None else torch.where(start == 0, 0, call.side * k * p)
        for k, p in enumerate([start, *size[:-1]], start=1)
    ]


def _atan2(call: Call) -> Parts:
    """The angle between the point and the value: atan of (y x_0 - x y_0) / (x x_0 + y y_0)."""
    y, x = call.args
    y_n, x_n = call.known(y), call.known(x)
    algebra = call.algebra
    cross = sums(scaled(x, y_n), scaled(-y, x_n))
    along, square = sums(scaled(x, x_n), scaled(y, y_n)), x * x + y * y
    inverse = square.reciprocal()
    inverse_n = algebra.compose(POINTWISE["reciprocal"](square, inverse, algebra.order), along)
    tangent = sums(scaled(inverse, cross), algebra.product(multiply, cross, inverse_n))
    zero = torch.zeros_like(call.out)
    return algebra.compose(POINTWISE["atan"](zero, zero, algebra.order), tangent)


def _dropout(call: Call) -> list[Parts | None]:
    x, p, training = call.args
    mask = call.out[1]
    factor = mask / (1 - p) if training and p < 1 else mask
    return [scaled(factor, call.known(x)), None]


RULES: dict[str, Rule] = {
    **MATRICES,
    **PRODUCTS,
    **JOINS,
    "native_dropout": _dropout,
    "atan2": _atan2,
    "view_as_complex": lambda call: each(
        lambda part: torch.view_as_complex(part.contiguous()), call.known(call.args[0])
    ),
    "pow": _pow,
    "linalg_vector_norm": _vector_norm,
}


def _pointwise(name: str) -> Rule:
    tower = POINTWISE[name]
    several = name == "log_sigmoid_forward"

    def rule(call: Call) -> Any:
        x, *rest = call.args
        out = call.out[0] if several else call.out
        kwargs = {k: v for k, v in call.kwargs.items() if v is not None}
        at = one_sided(call, x) if call.side and name in KINKS else x
        derivatives = tower(at, out, call.algebra.order, *rest, **kwargs)
        found = call.algebra.compose(derivatives, call.known(x))
        return [found, None] if several else found

    return rule


def _linear(function: Callable[..., Any]) -> Rule:
    def rule(call: Call) -> Any:
        x, *rest = call.args
        return call.of_each(
            lambda part, lead: function(part, lead, x, call.out, *rest, **call.kwargs),
            call.known(x),
        )

    return rule


def _several(function: Callable[..., Any]) -> Rule:
    def rule(call: Call) -> list[Parts | None]:
        pieces = _linear(function)(call)
        return [[None if p is None else p[i] for p in pieces] for i in range(len(call.out))]

    return rule


def names_of(func: Any) -> tuple[str, str]:
    """The name of an operation with and without its overload, without the underscore of in-place."""
    packet = func.overloadpacket.__name__
    if packet.endswith("_") and not packet.endswith("__"):
        packet = packet[:-1]
    return f"{packet}.{func._overloadname}", packet


def is_composite(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the rule of an operation does not hold for these arguments."""
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
    """The rule of an operation of torch; None if it has none."""
    if func.namespace != "aten":
        return None
    for name in names_of(func):
        if name in RULES:
            return RULES[name]
        if name in LINEAR:
            return _linear(LINEAR[name])
        if name in SEVERAL:
            return _several(SEVERAL[name])
        if name in POINTWISE:
            return _pointwise(name)
        if name in ZERO:
            return lambda call: None
    return None
