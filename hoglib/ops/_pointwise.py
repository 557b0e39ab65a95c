"""Pointwise ops, each a formula and its partial derivatives, by `define`.

The gates of piecewise ops are masks: where a mask is False no gradient passes, not even an infinite
one. At the end of the file are ops that act on gradients: on purpose, their backward is not the
derivative of their forward. Their value is a copy of x, not a view, so that an in-place operation on
the value leaves x alone. Second derivatives differentiate the rule of backward; each docstring gives
the result.
"""

from collections.abc import Callable
from functools import wraps
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.torch_api.mixed_precision import upcast_half
from hoglib._core.torch_api.torch_modes import needs_linear_backward
from hoglib.errors import ArgumentValueError, UnsupportedError
from hoglib.ops._define import Partial, define
from hoglib.ops._function import Saved, apply_function, make_function, without_jvp
from hoglib.ops._stand_in import NO_DOUBLE_BACKWARD, OVER, stands_in_for

__all__ = [
    "bias_add",
    "clamp",
    "clip_gradient",
    "exp",
    "glu",
    "hardsigmoid",
    "mul",
    "power",
    "quadratic",
    "relu",
    "reverse_gradient",
    "scale_gradient",
    "scaled_activation",
    "sigmoid",
    "sinh",
    "smooth_l1",
    "split_signs",
    "square",
    "stop_gradient",
    "straight_through",
    "swish",
    "tanh",
]

Unary = Callable[[Tensor], Tensor]


def _op(
    formula: Callable[..., Tensor], *partials: Partial | None, keep: str = "inputs"
) -> Callable[..., Tensor]:
    """An op from a formula of torch operations and its partials."""
    return define(formula, partials, reference=formula, keep=keep)


def _with_slope(partial: Partial, *, keep: str, real: bool = False) -> Callable[[Unary], Unary]:
    """The op of the formula below it, with this derivative."""

    def make(formula: Unary) -> Unary:
        op = _op(formula, partial, keep=keep)
        check = validation.real if real else validation.differentiable

        @wraps(formula)
        def checked(x: Tensor) -> Tensor:
            return op(check("x", x))

        return checked

    return make


@_with_slope(lambda x, _: 2 * x, keep="inputs")
def square(x: Tensor) -> Tensor:
    r"""Square.

        y = x^2        dy/dx = 2 x

    Differentiable to any order, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer x.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor(3.0)
        >>> hog.ops.square(x), torch.func.grad(torch.func.grad(hog.ops.square))(x)
        (tensor(9.), tensor(2.))
    """
    return x * x


@_with_slope(lambda _, y: y, keep="output")
def exp(x: Tensor) -> Tensor:
    r"""Exponential.

        y = e^x        dy/dx = y

    Only y is kept for the derivatives. Differentiable to any order, in reverse and forward mode,
    under vmap.

    Args:
        x: A floating-point or complex tensor.
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer x.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor(1.0)
        >>> hog.ops.exp(x), torch.func.grad(torch.func.grad(hog.ops.exp))(x)
        (tensor(2.7183), tensor(2.7183))
    """
    return torch.exp(x)


@_with_slope(lambda x, _: torch.cosh(x), keep="inputs")
def sinh(x: Tensor) -> Tensor:
    r"""Hyperbolic sine.

        y = sinh(x)        dy/dx = cosh(x)

    Only x is kept for the derivatives, and cosh(x) is recomputed. Differentiable to any order, in
    reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer x.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor(1.0)
        >>> hog.ops.sinh(x), torch.func.grad(torch.func.grad(hog.ops.sinh))(x)
        (tensor(1.1752), tensor(1.1752))
    """
    return torch.sinh(x)


@_with_slope(lambda _, y: 1 - y * y, keep="output")
def tanh(x: Tensor) -> Tensor:
    r"""Hyperbolic tangent.

        y = tanh(x)        dy/dx = 1 - y^2

    Only y is kept for the derivatives. Differentiable to any order, in reverse and forward mode,
    under vmap.

    Args:
        x: A floating-point or complex tensor.
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer x.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor(0.5)
        >>> hog.ops.tanh(x), torch.func.grad(torch.func.grad(hog.ops.tanh))(x)
        (tensor(0.4621), tensor(-0.7269))
    """
    return torch.tanh(x)


@_with_slope(lambda _, y: y * (1 - y), keep="output")
def sigmoid(x: Tensor) -> Tensor:
    r"""Logistic function.

        y = 1 / (1 + exp(-x))        dy/dx = y (1 - y)

    Only y is kept for the derivatives. Differentiable to any order, in reverse and forward mode,
    under vmap.

    Args:
        x: A floating-point or complex tensor.
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer x.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor(1.0)
        >>> hog.ops.sigmoid(x), torch.func.grad(torch.func.grad(hog.ops.sigmoid))(x)
        (tensor(0.7311), tensor(-0.0909))
    """
    return torch.sigmoid(x)


# not y > 0, so that the gradient of NaN passes, as with torch's kernel
@_with_slope(lambda _, y: ~(y <= 0), keep="output", real=True)
def relu(x: Tensor) -> Tensor:
    r"""Rectifier.

        y = max(x, 0)        dy/dx = 1 where y > 0, else 0

    The derivative at 0 is 0, and every second derivative is 0. Only y is kept for the derivatives. In
    reverse and forward mode, under vmap.

    Args:
        x: A real floating-point tensor.
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer or complex x.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor([-1.0, 2.0])
        >>> hog.ops.relu(x), torch.func.grad(lambda x: hog.ops.relu(x).sum())(x)
        (tensor([0., 2.]), tensor([0., 1.]))
    """
    return torch.relu(x)


def power(x: Tensor, exponent: float) -> Tensor:
    r"""Power with a constant exponent.

        y = x^n        dy/dx = n x^(n-1), and 0 for n = 0

    As in torch, a negative x has the power NaN for a fractional n, and at x = 0 the derivatives of an
    order above n are infinite for a fractional n and 0 for a whole one: the second derivative of x^1.5
    there is infinite, the third of x^2 is 0. Differentiable to any order in x, in reverse and forward
    mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        exponent: n, a real Python number.
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer x, or an exponent other than a Python number.
        ValueError: for a NaN exponent.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor(2.0)
        >>> hog.ops.power(x, 3), hog.hessian(lambda x: hog.ops.power(x, 3), x)
        (tensor(8.), tensor(12.))
    """
    validation.differentiable("x", x)
    return _power(x, validation.number("exponent", exponent))


# at x = 0, n x^(n-1) of n = 0 would be 0 times infinity
_power = _op(torch.pow, lambda x, n, _: n * torch.pow(x, n - 1) if n != 0 else 0.0, None)


def quadratic(x: Tensor, a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    r"""Quadratic polynomial with learnable coefficients.

        y = a x^2 + b x + c        dy/dx = 2 a x + b        dy/da = x^2    dy/db = x    dy/dc = 1

    Differentiable to any order in all four, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        a: Coefficient of x^2, a tensor, or a Python number, which is a constant.
        b: Coefficient of x, likewise.
        c: Constant term, likewise.
    Returns:
        y, of the promoted dtype.
    Raises:
        TypeError: for integer tensors.
    Shape:
        - x, a, b, c: any that broadcast together
        - y: the shape they broadcast to
    Example:
        >>> x, a = torch.tensor(2.0), torch.tensor(3.0)
        >>> hog.ops.quadratic(x, a, 1.0, 0.5)
        tensor(14.5000)
        >>> hog.hessian(lambda p: hog.ops.quadratic(p["x"], p["a"], 1.0, 0.5), {"x": x, "a": a})["x"]
        {'x': tensor(6.), 'a': tensor(4.)}
    """
    validation.differentiable("x", x)
    for name, value in (("a", a), ("b", b), ("c", c)):
        validation.tensor_or_number(name, value)
    return _quadratic(x, a, b, c)


def _quadratic_formula(x: Tensor, a: Any, b: Any, c: Any) -> Tensor:
    return a * (x * x) + b * x + c


_quadratic = _op(
    _quadratic_formula,
    lambda x, a, b, c, _: 2 * (a * x) + b,
    lambda x, a, b, c, _: x * x,
    lambda x, a, b, c, _: x,
    lambda x, a, b, c, _: 1,
)


def swish(x: Tensor, beta: Tensor | float = 1.0) -> Tensor:
    r"""Swish with a learnable slope.

        y = x s(beta x)        s(z) = 1 / (1 + exp(-z))
        dy/dx = s (1 + beta x (1 - s))        dy/dbeta = x^2 s (1 - s)

    Only x and beta are kept for the derivatives. Differentiable to any order in both, in reverse and
    forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        beta: The slope, a tensor, or a Python number, which is a constant. Default: 1, the SiLU.
    Returns:
        y, of the promoted dtype.
    Raises:
        TypeError: for an integer x or beta tensor.
    Shape:
        - x, beta: any that broadcast together
        - y: the shape they broadcast to
    References:
        Ramachandran, Zoph and Le, Searching for Activation Functions, 2017, equation 1.
    Example:
        >>> x, beta = torch.tensor(1.0), torch.tensor(2.0)
        >>> hog.ops.swish(x, beta)
        tensor(0.8808)
        >>> hog.hessian(lambda p: hog.ops.swish(p["x"], p["beta"]), {"x": x, "beta": beta})["beta"]
        {'x': tensor(0.0501), 'beta': tensor(-0.0800)}
    """
    validation.differentiable("x", x)
    validation.tensor_or_number("beta", beta)
    return _swish(x, beta)


def _swish_formula(x: Tensor, beta: Tensor | float) -> Tensor:
    return x * torch.sigmoid(beta * x)


def _swish_by_x(x: Tensor, beta: Tensor | float, _: None) -> Tensor:
    s = torch.sigmoid(beta * x)
    # grouped so that beta x, which may overflow, is not formed
    return s + x * (beta * (s * (1 - s)))


def _swish_by_beta(x: Tensor, beta: Tensor | float, _: None) -> Tensor:
    s = torch.sigmoid(beta * x)
    return x * (x * (s * (1 - s)))  # grouped so that a huge x meets its zero before its square


_swish = _op(_swish_formula, _swish_by_x, _swish_by_beta)


def scaled_activation(x: Tensor, *, scale: float, kind: str) -> Tensor:
    r"""Activation times a constant.

        y = a max(x, 0)    dy/dx = a where x > 0, else 0        for kind "relu"
        y = a tanh(x)      dy/dx = a (1 - tanh(x)^2)            for kind "tanh"

    Only the activation is kept for the derivatives. Differentiable to any order, in reverse and forward
    mode, under vmap.

    Args:
        x: A real floating-point tensor.
        scale: a, a Python number. For a learnable one use `mul`.
        kind: "relu" or "tanh".
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer or complex x, or a scale other than a Python number.
        ValueError: for an unknown kind.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor(0.5)
        >>> f = lambda x: hog.ops.scaled_activation(x, scale=2.0, kind="tanh")
        >>> f(x), hog.hessian(f, x)
        (tensor(0.9242), tensor(-1.4537))
    """
    validation.real("x", x)
    validation.choice("kind", kind, _SCALED)
    return validation.number("scale", scale) * _SCALED[kind](x)


_SCALED = {"relu": relu, "tanh": tanh}


def split_signs(x: Tensor) -> tuple[Tensor, Tensor]:
    r"""Positive and negative part.

        pos = max(x, 0)    neg = max(-x, 0)        x = pos - neg
        (g, h) -> g where x > 0, -h where x < 0, and 0 where x = 0

    Every second derivative is 0. Only the parts are kept for the derivatives. In reverse and forward
    mode, under vmap.

    Args:
        x: A real floating-point tensor.
    Returns:
        The pair (pos, neg), each like x.
    Raises:
        TypeError: for an integer or complex x.
    Shape:
        - x, pos, neg: any, equal
    Example:
        >>> hog.ops.split_signs(torch.tensor([-1.0, 2.0]))
        (tensor([0., 2.]), tensor([1., 0.]))
    """
    return relu(validation.real("x", x)), relu(-x)


def clamp(
    x: Tensor, *, min: float | None = None, max: float | None = None, straight_through: bool = False
) -> Tensor:
    r"""Clamp to an interval, with the gradient masked or passed straight through.

        y = min(max(x, lo), hi)        dy/dx = 1 where lo <= x <= hi, else 0
        straight_through: dy/dx = 1, by definition and not by calculus

    Every second derivative is 0. In reverse and forward mode, under vmap.

    Args:
        x: A real floating-point tensor.
        min: lo, a Python number. Default: no lower bound.
        max: hi, a Python number. Default: no upper bound. As in torch, y = max where min > max.
        straight_through: Whether gradients pass also where x is out of bounds. Default: False.
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer or complex x, or bounds other than Python numbers.
        ValueError: for a NaN bound, or without either bound.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor([-1.0, 0.5, 2.0])
        >>> hog.ops.clamp(x, min=0, max=1)
        tensor([0.0000, 0.5000, 1.0000])
        >>> torch.func.grad(lambda x: hog.ops.clamp(x, min=0, max=1).sum())(x)
        tensor([0., 1., 0.])
    """
    validation.real("x", x)
    validation.boolean("straight_through", straight_through)
    if min is None and max is None:
        raise ArgumentValueError("clamp: expected min, max or both, got neither; give one bound.")
    low = -inf if min is None else validation.number("min", min)
    high = inf if max is None else validation.number("max", max)
    return (_clamp_straight_through if straight_through else _clamp)(x, low, high)


def smooth_l1(input: Tensor, target: Tensor, *, beta: float = 1.0) -> Tensor:
    r"""Smooth L1 distance, element by element.

        y = d^2 / (2 beta) where |d| < beta, else |d| - beta / 2        d = input - target
        dy/dinput = d / beta where |d| < beta, else sign(d)        dy/dtarget = -dy/dinput

    As in torch, the second derivative where the pieces meet, at |d| = beta, is 0. `y.mean()` is
    `torch.nn.SmoothL1Loss`. Differentiable to any order in both tensors, in reverse and forward mode,
    under vmap.

    Args:
        input: A real floating-point tensor.
        target: A real floating-point tensor.
        beta: Where the quadratic piece ends, a Python number; 0 makes y the distance |d|. Default: 1.
    Returns:
        y, of the promoted dtype.
    Raises:
        TypeError: for integer or complex tensors, or a beta other than a Python number.
        ValueError: for a negative beta.
    Shape:
        - input, target: any that broadcast together
        - y: the shape they broadcast to
    References:
        Girshick, Fast R-CNN, 2015, equation 3, with the beta of torch.
    Example:
        >>> x, t = torch.tensor([0.5, 2.0]), torch.zeros(2)
        >>> hog.ops.smooth_l1(x, t)
        tensor([0.1250, 1.5000])
        >>> hog.hessian(lambda x: hog.ops.smooth_l1(x, t).sum(), x)
        tensor([[1., 0.],
                [0., 0.]])
    """
    validation.real("input", input)
    validation.real("target", target)
    return _smooth_l1(input, target, validation.number("beta", beta, minimum=0))


def _smooth_l1_formula(input: Tensor, target: Tensor, beta: float) -> Tensor:
    d = input - target
    if beta == 0:
        return d.abs()
    return torch.where(d.abs() >= beta, d.abs() - beta / 2, d * d / (2 * beta))


def _smooth_l1_by_input(input: Tensor, target: Tensor, beta: float, _: None) -> Tensor:
    d = input - target
    return d.sign() if beta == 0 else torch.where(d.abs() >= beta, d.sign(), d / beta)


_smooth_l1 = _op(_smooth_l1_formula, _smooth_l1_by_input, lambda *x: -_smooth_l1_by_input(*x), None)


def mul(x: Tensor, p: Tensor | float) -> Tensor:
    r"""Product, element by element.

        y = x p        g -> (g p, g x), summed over the dimensions that were broadcast

    Differentiable to any order in both, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        p: A tensor, or a Python number, which is a constant.
    Returns:
        y, of the promoted dtype.
    Raises:
        TypeError: for integer tensors.
    Shape:
        - x, p: any that broadcast together
        - y: the shape they broadcast to
    Example:
        >>> x, p = torch.tensor(3.0), torch.tensor(2.0)
        >>> hog.ops.mul(x, p)
        tensor(6.)
        >>> hog.hessian(lambda v: hog.ops.mul(v["x"], v["p"]), {"x": x, "p": p})["x"]
        {'x': tensor(0.), 'p': tensor(1.)}
    """
    validation.differentiable("x", x)
    validation.tensor_or_number("p", p)
    return _mul(x, p)


_mul = _op(torch.mul, lambda x, p, _: p, lambda x, p, _: x)


def bias_add(x: Tensor, bias: Tensor, *, dim: int = 1) -> Tensor:
    r"""Add a bias to each channel.

        y = x + b over dimension dim        g -> (g, g summed over the other dimensions)

    Nothing is kept for the derivatives. Differentiable to any order in both, in reverse and forward
    mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        bias: b.
        dim: The dimension of the channels. Default: 1.
    Returns:
        y, of the promoted dtype.
    Raises:
        TypeError: for integer tensors.
        ValueError: for a bias of another size, or a dim that x lacks.
    Shape:
        - x: any
        - bias: [x.shape[dim]]
        - y: like x
    Example:
        >>> hog.ops.bias_add(torch.zeros(2, 3), torch.tensor([1.0, 2.0, 3.0]))
        tensor([[1., 2., 3.],
                [1., 2., 3.]])
    """
    validation.differentiable("x", x)
    validation.differentiable("bias", bias)
    axis = validation.dim("dim", dim, x.dim())
    if x.dim() == 0 or bias.shape != x.shape[axis : axis + 1]:
        channels = tuple(x.shape[axis : axis + 1]) if x.dim() else "at least one dimension of x"
        raise ArgumentValueError(
            f"bias: expected {channels}, the size of x {tuple(x.shape)} along dim {dim}, "
            f"got {tuple(bias.shape)}; name the channel dimension with `dim=`."
        )
    return _add(x, bias.reshape(-1, *(1,) * (x.dim() - axis - 1)))


_add = _op(torch.add, lambda *_: 1, lambda *_: 1, keep="none")


# Composites of torch operations, which stand in for torch's own.


@stands_in_for(F.glu, lacks="its tangent has no derivative", modes=OVER)
def glu(input: Tensor, dim: int = -1) -> Tensor:
    r"""Gated linear unit, as `torch.nn.functional.glu`.

        y = a * sigmoid(b), with a and b the halves of the input along dim

    A composite of torch operations: torch's own has no derivative of its tangent. Half precision is
    computed in float32. Differentiable to any order, in every mode, under vmap.

    Args:
        input: A real floating-point tensor.
        dim: The dimension that is halved. Default: the last.
    Returns:
        y, of the dtype of input.
    Raises:
        TypeError: for an integer or complex input.
        ValueError: for an odd size along dim.
    Shape:
        - input: [..., 2 n, ...]
        - y: [..., n, ...]
    References:
        Dauphin et al., Language Modeling with Gated Convolutional Networks, 2017.
    Example:
        >>> x = torch.tensor([2.0, 0.0])
        >>> hog.ops.glu(x), hog.hessian(lambda x: hog.ops.glu(x).sum(), x)
        (tensor([1.]), tensor([[0.0000, 0.2500],
                [0.2500, 0.0000]]))
    """
    validation.real("input", input)
    if input.dim() == 0 or input.shape[dim] % 2:
        text = f"input: expected an even size along dim {dim}, got {validation.describe(input)}."
        raise ArgumentValueError(text)
    a, b = upcast_half(input).chunk(2, dim)
    return (a * torch.sigmoid(b)).to(input.dtype)


@stands_in_for(F.hardsigmoid, lacks=NO_DOUBLE_BACKWARD, modes=("rr", "fr", "ff"))
def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    r"""Piecewise linear sigmoid, as `torch.nn.functional.hardsigmoid`.

        y = min(max(x + 3, 0), 6) / 6        dy/dx = 1/6 for -3 < x < 3, else 0

    As in torch, the derivative where the pieces meet is 0; the second is 0. torch's own derivative
    cannot be differentiated, not even to 0. Half precision is computed in float32. In every mode,
    under vmap.

    Args:
        input: A real floating-point tensor.
        inplace: Whether the result is written to input too. Default: False.
    Returns:
        y, like input; input itself with ``inplace``.
    Raises:
        RuntimeError: for an integer or complex input; also a TypeError.
    Shape:
        - input, y: any, equal
    Example:
        >>> x = torch.tensor([-4.0, 0.0, 1.5])
        >>> hog.ops.hardsigmoid(x)
        tensor([0.0000, 0.5000, 0.7500])
        >>> hog.hessian(lambda x: hog.ops.hardsigmoid(x).sum(), x).any()
        tensor(False)
    """
    validation.torch_real("input", input)
    # autograd saves x, so x must not share memory with input, which is written below
    x = upcast_half(input.clone() if inplace else input)
    # hardtanh has a second derivative, of 0, and hardsigmoid's kernel none
    y = (F.hardtanh(x, -3.0, 3.0) / 6 + 0.5).to(input.dtype)
    return input.copy_(y) if inplace else y


# Ops that act on gradients.


def _zero_with_slope_one(x: Tensor) -> Tensor:
    """Zeros with the derivative one by x, to carry a surrogate gradient in plain torch.

    Where x is infinite or NaN, x - x would be NaN; there the value is 0, without a derivative.
    """
    finite = torch.where(x.isfinite(), x, 0)
    return finite - finite.detach()


def _with_slope_one(step: Callable[..., Tensor], constants: int = 0) -> Callable[..., Tensor]:
    """An op with the values of a step function and the gradient of the identity."""

    def reference(x: Tensor, *bounds: float) -> Tensor:
        return step(x.detach(), *bounds) + _zero_with_slope_one(x)

    partials: list[Partial | None] = [lambda *_: 1, *[None] * constants]
    return define(step, partials, reference=reference, surrogate=True, keep="none")


# the partial is a mask: even an infinite gradient does not pass where it is False
_clamp = _op(torch.clamp, lambda x, low, high, _: (x >= low) & (x <= high), None, None)
_clamp_straight_through = _with_slope_one(torch.clamp, constants=2)


def straight_through(x: Tensor, *, kind: str = "sign") -> Tensor:
    r"""A step function with the gradient of the identity.

        y = sign(x), heaviside(x) (1 where x > 0, else 0) or round(x) (halves to even)        g -> g

    Second derivatives of y are 0, by definition: in a composition f(y(x)) the second derivative by x
    is f''(y). Tangents of forward mode pass like gradients. In reverse and forward mode, under vmap.

    Args:
        x: A real floating-point tensor.
        kind: "sign", "heaviside" or "round". Default: "sign".
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer or complex x.
        ValueError: for an unknown kind.
    Shape:
        - x, y: any, equal
    References:
        Bengio, Léonard and Courville, Estimating or Propagating Gradients Through Stochastic Neurons,
        2013, section 4.
    Example:
        >>> x = torch.tensor([-0.3, 1.7])
        >>> f = lambda x: hog.ops.straight_through(x, kind="round")
        >>> f(x), torch.func.grad(lambda x: (f(x) ** 2).sum())(x)
        (tensor([-0., 2.]), tensor([-0., 4.]))
    """
    validation.real("x", x)
    validation.choice("kind", kind, _STRAIGHT_THROUGH)
    return _STRAIGHT_THROUGH[kind](x)


def _heaviside(x: Tensor) -> Tensor:
    return torch.heaviside(x, x.new_zeros(()))


_STRAIGHT_THROUGH = {
    "sign": _with_slope_one(torch.sign),
    "heaviside": _with_slope_one(_heaviside),
    "round": _with_slope_one(torch.round),
}


def scale_gradient(x: Tensor, *, scale: float) -> Tensor:
    r"""The identity, with its gradient scaled.

        y = x        g -> a g

    The second derivative of f(y(x)) is a^2 f''(y): one factor for each time that backward passes the
    op. Tangents of forward mode are scaled like gradients. To any order, in reverse and forward mode,
    under vmap.

    Args:
        x: A floating-point or complex tensor.
        scale: a, a Python number.
    Returns:
        y, a copy of x.
    Raises:
        TypeError: for an integer x, or a scale other than a Python number.
        ValueError: for a NaN scale.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor(3.0)
        >>> torch.func.grad(lambda x: hog.ops.scale_gradient(x, scale=0.5) ** 2)(x)
        tensor(3.)
    """
    validation.differentiable("x", x)
    return _scale_gradient(x, validation.number("scale", scale))


def reverse_gradient(x: Tensor, *, scale: float = 1.0) -> Tensor:
    r"""The identity, with its gradient reversed: `scale_gradient` by -scale.

        y = x        g -> -a g

    The second derivative of f(y(x)) is a^2 f''(y): one factor -a for each time that backward passes the
    op. Tangents of forward mode are scaled like gradients. To any order, in reverse and forward mode,
    under vmap.

    Args:
        x: A floating-point or complex tensor.
        scale: a, a Python number. Default: 1.
    Returns:
        y, a copy of x.
    Raises:
        TypeError: for an integer x, or a scale other than a Python number.
        ValueError: for a NaN scale.
    Shape:
        - x, y: any, equal
    References:
        Ganin and Lempitsky, Unsupervised Domain Adaptation by Backpropagation, 2015, equation 7.
    Example:
        >>> x = torch.tensor(3.0)
        >>> torch.func.grad(lambda x: hog.ops.reverse_gradient(x) ** 2)(x)
        tensor(-6.)
    """
    return scale_gradient(x, scale=-validation.number("scale", scale))


def _copy(x: Tensor, *_: float) -> Tensor:
    return x.clone()


_scale_gradient = define(
    _copy,
    [lambda x, scale, _: scale, None],
    reference=lambda x, scale: x.detach() + scale * _zero_with_slope_one(x),
    surrogate=True,
    keep="none",
)


def clip_gradient(x: Tensor, *, bound: float) -> Tensor:
    r"""The identity, with each entry of its gradient clipped.

        y = x        g -> min(max(g, -c), c)

    A clip is not linear, so the order of modes matters for second derivatives of f(y(x)).
    Forward-over-reverse differentiates the clipped gradient: f'' v in the entries where |f'| <= c,
    and 0 in clipped entries; the matrix need not be symmetric. Reverse-over-reverse passes the op
    again in its second backward, which also clips f'' v to c, like a hook on a tensor. A tangent of
    forward mode passes unchanged, because it is no gradient: jvp inside jvp sees the identity. In
    reverse and forward mode, under vmap.

    Args:
        x: A real floating-point tensor.
        bound: c, a Python number of at least 0.
    Returns:
        y, a copy of x.
    Raises:
        TypeError: for an integer or complex x, or a bound other than a Python number.
        ValueError: for a negative bound.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor([0.2, 3.0])
        >>> torch.func.grad(lambda x: (hog.ops.clip_gradient(x, bound=1.0) ** 2).sum())(x)
        tensor([0.4000, 1.0000])
    """
    validation.real("x", x)
    bound = validation.number("bound", bound, minimum=0)
    if caller := needs_linear_backward():
        raise UnsupportedError(
            f"{caller}: expected a model whose gradients are linear in those of its outputs, "
            "got ops.clip_gradient; `hoglib.per_example_gradients` takes them as they are."
        )
    if torch.compiler.is_dynamo_compiling():  # no plain torch operation clips a gradient
        return _COMPILED_CLIP_GRADIENT.apply(x, bound)
    return apply_function(_CLIP_GRADIENT, _copy, x, bound)


def _clip_backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
    bound = saved.inputs[1]
    return [grad.clamp(-bound, bound), None]


_CLIP_GRADIENT = make_function(
    "ClipGradient", 2, _copy, _clip_backward, lambda _, t, *bound: t.clone(), keep_inputs=()
)
_COMPILED_CLIP_GRADIENT = without_jvp(_CLIP_GRADIENT)


def stop_gradient(x: Tensor) -> Tensor:
    r"""The identity, as a constant: `x.detach()`.

        y = x        g -> none

    No derivative of any order in any mode passes.

    Args:
        x: A floating-point or complex tensor.
    Returns:
        y, which shares the memory of x, as in torch; `y.clone()` does not.
    Raises:
        TypeError: for an integer x.
    Shape:
        - x, y: any, equal
    Example:
        >>> x = torch.tensor(3.0)
        >>> torch.func.grad(lambda x: x * hog.ops.stop_gradient(x))(x)
        tensor(3.)
    """
    return validation.differentiable("x", x).detach()
