"""Smooth pointwise ops: each one is a formula and its partial derivatives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import upcast_half
from hoglib.errors import ArgumentValueError
from hoglib.ops._define import define


def square(x: Tensor) -> Tensor:
    r"""Square.

        y = x^2        dy/dx = 2 x

    Shapes: x any; y like x. Differentiable to any order, in reverse and forward mode, under vmap.
    Raises TypeError for an integer x.
    """
    validation.differentiable("x", x)
    return _square(x)


def exp(x: Tensor) -> Tensor:
    r"""Exponential.

        y = e^x        dy/dx = y

    Shapes: x any; y like x. Only y is kept for the derivatives. Differentiable to any order, in
    reverse and forward mode, under vmap.
    Raises TypeError for an integer x.
    """
    validation.differentiable("x", x)
    return _exp(x)


def tanh(x: Tensor) -> Tensor:
    r"""Hyperbolic tangent.

        y = tanh(x)        dy/dx = 1 - y^2

    Shapes: x any; y like x. Only y is kept for the derivatives. Differentiable to any order, in
    reverse and forward mode, under vmap.
    Raises TypeError for an integer x.
    """
    validation.differentiable("x", x)
    return _tanh(x)


def sigmoid(x: Tensor) -> Tensor:
    r"""Logistic function.

        y = 1 / (1 + exp(-x))        dy/dx = y (1 - y)

    Shapes: x any; y like x. Only y is kept for the derivatives. Differentiable to any order, in
    reverse and forward mode, under vmap.
    Raises TypeError for an integer x.
    """
    validation.differentiable("x", x)
    return _sigmoid(x)


def power(x: Tensor, exponent: float) -> Tensor:
    r"""Power with a constant exponent.

        y = x^n        dy/dx = n x^(n-1), and 0 for n = 0

    exponent is n, a real Python number. As in torch, a negative x has the power NaN for a fractional
    n, and at x = 0 the derivatives of an order above n are infinite for a fractional n and 0 for a
    whole one: the second derivative of x^1.5 there is infinite, the third of x^2 is 0.
    Shapes: x any; y like x. Differentiable to any order in x, in reverse and forward mode, under vmap.
    Raises TypeError for an integer x or an exponent that is not a Python number, ValueError for a
    NaN exponent.
    """
    validation.differentiable("x", x)
    return _power(x, validation.number("exponent", exponent))


def quadratic(
    x: Tensor, a: Tensor | float, b: Tensor | float, c: Tensor | float
) -> Tensor:  # fmt: skip
    r"""Quadratic polynomial with learnable coefficients.

        y = a x^2 + b x + c        dy/dx = 2 a x + b        dy/da = x^2    dy/db = x    dy/dc = 1

    Shapes: x, a, b and c broadcast together to y. Differentiable to any order in all four, in reverse
    and forward mode, under vmap; a coefficient that is a Python number is a constant.
    Raises TypeError for integer tensors.
    """
    validation.differentiable("x", x)
    for name, value in (("a", a), ("b", b), ("c", c)):
        validation.tensor_or_number(name, value)
    return _quadratic(x, a, b, c)


def swish(x: Tensor, beta: Tensor | float = 1.0) -> Tensor:
    r"""Swish with a learnable slope.

        y = x s(beta x)        s(z) = 1 / (1 + exp(-z))
        dy/dx = s (1 + beta x (1 - s))        dy/dbeta = x^2 s (1 - s)

    Shapes: x any; beta broadcasts to x, or x to beta; y like the two broadcast together. Only x and
    beta are kept. Differentiable to any order in both variables, in reverse and forward mode, under
    vmap; a beta that is a Python number is a constant.
    Raises TypeError for an integer x or beta tensor.
    Source: Ramachandran, Zoph and Le, Searching for Activation Functions, 2017, eq. 1.
    """
    validation.differentiable("x", x)
    validation.tensor_or_number("beta", beta)
    return _swish(x, beta)


def _square_forward(x: Tensor) -> Tensor:
    return x * x


def _power_forward(x: Tensor, n: float) -> Tensor:
    return torch.pow(x, n)


def _power_by_x(x: Tensor, n: float, _: None) -> Tensor | float:
    return n * torch.pow(x, n - 1) if n != 0 else 0.0


def _quadratic_forward(x: Tensor, a: Any, b: Any, c: Any) -> Tensor:
    result: Tensor = a * (x * x) + b * x + c
    return result


def _swish_forward(x: Tensor, beta: Tensor | float) -> Tensor:
    return x * torch.sigmoid(beta * x)


def _swish_by_x(x: Tensor, beta: Tensor | float, _: None) -> Tensor:
    s = torch.sigmoid(beta * x)
    return s + x * (
        beta * (s * (1 - s))
    )  # grouped so that beta x, which may overflow, is not formed


def _swish_by_beta(x: Tensor, beta: Tensor | float, _: None) -> Tensor:
    s = torch.sigmoid(beta * x)
    return x * (x * (s * (1 - s)))  # grouped so that a huge x meets its zero before its square


_square = define(
    _square_forward, [lambda x, _: 2 * x], reference=_square_forward, keep="inputs"
)  # fmt: skip
_exp = define(torch.exp, [lambda _, y: y], reference=torch.exp, keep="output")
_tanh = define(torch.tanh, [lambda _, y: 1 - y * y], reference=torch.tanh, keep="output")
_sigmoid = define(torch.sigmoid, [lambda _, y: y * (1 - y)], reference=torch.sigmoid, keep="output")
_power = define(_power_forward, [_power_by_x, None], reference=torch.pow, keep="inputs")
_quadratic = define(
    _quadratic_forward,
    [
        lambda x, a, b, c, _: 2 * (a * x) + b,
        lambda x, a, b, c, _: x * x,
        lambda x, a, b, c, _: x,
        lambda x, a, b, c, _: 1,
    ],
    reference=_quadratic_forward,
    keep="inputs",
)
_swish = define(
    _swish_forward, [_swish_by_x, _swish_by_beta], reference=_swish_forward, keep="inputs"
)


# === sinh in two ways: the lesson of what a Function may keep for its second derivative.
#
#     y = (e^x - e^-x) / 2        dy/dx = (e^x + e^-x) / 2
#
# Backward needs e^x and e^-x. Forward has them at hand, but a tensor that forward made and kept for
# itself has no graph: saved and used in backward it is a constant to the second derivative, which
# then lacks sinh(x) without an error. There are two ways out. *Recompute*: save x only, an input,
# and
# work out cosh(x) in backward from operations that autograd sees. *Return them*: an output has a
# graph, and the derivatives by e^x and e^-x come back to backward as gradients of their own.


def sinh(x: Tensor) -> Tensor:
    r"""Hyperbolic sine.

        y = sinh(x)        dy/dx = cosh(x)

    Shapes: x any; y like x. Only x is kept and cosh(x) is recomputed. Differentiable to any order, in
    reverse and forward mode, under vmap.
    Raises TypeError for an integer x.
    """
    validation.differentiable("x", x)
    return _sinh(x)


_sinh = define(torch.sinh, [lambda x, _: torch.cosh(x)], reference=torch.sinh, keep="inputs")


def sinh_returning_intermediates(x: Tensor) -> Tensor:
    """`sinh` by a Function that returns e^x and e^-x beside its value; they stay hidden here."""
    validation.differentiable("x", x)
    y, _, _ = SinhReturningIntermediates.apply(x)
    result: Tensor = y
    return result


class SinhReturningIntermediates(torch.autograd.Function):
    r"""x -> (y, p, n)  with  p = e^x, n = e^-x, y = (p - n) / 2.

        backward: (g_y, g_p, g_n) -> g_y (p + n) / 2 + g_p p - g_n n
        jvp: t -> (t (p + n) / 2, t p, -t n)

    The caller drops p and n, so g_p and g_n are zero in the first backward. The first term depends on
    p and n, so differentiating it sends gradients to them, and the second backward collects those.
    Left out, g_p and g_n would be the same silent mistake as a saved intermediate.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, n = torch.exp(x), torch.exp(-x)
        return (p - n) / 2, p, n

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        _, p, n = output
        ctx.save_for_backward(p, n)
        ctx.save_for_forward(p, n)

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, g_p: Tensor, g_n: Tensor) -> Tensor:
        p, n = (tensor.conj() for tensor in ctx.saved_tensors)
        return g_y * (p + n) / 2 + g_p * p - g_n * n

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, n = ctx.saved_tensors
        return t * (p + n) / 2, t * p, -t * n


# === The gated linear unit, differentiable over forward mode too.


def glu(input: Tensor, dim: int = -1) -> Tensor:
    r"""Gated linear unit, as `torch.nn.functional.glu`.

        y = a * sigmoid(b), with a and b the halves of the input along dim

    Shapes: input [..., 2 n, ...]; y [..., n, ...]. Half precision is computed in float32. torch has no
    derivative of the tangent of its own.
    Raises ValueError for an odd size; TypeError for an integer or complex input.
    Dauphin et al., Language Modeling with Gated Convolutional Networks, 2017.
    """
    validation.real("input", input)
    if input.dim() == 0 or input.shape[dim] % 2:
        raise ArgumentValueError(
            f"input: expected an even size along dim {dim}, got {validation.describe(input)}."
        )
    a, b = upcast_half(input).chunk(2, dim)
    return (a * torch.sigmoid(b)).to(input.dtype)


GLU: dict[Callable[..., Any], Callable[..., Any]] = {F.glu: glu}
