"""Smooth pointwise ops: each is a formula and its partial derivatives."""

from typing import Any

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import upcast_half
from hoglib.errors import ArgumentValueError
from hoglib.ops._define import define


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
        - x, y: any, the same
    Example:
        >>> x = torch.tensor(3.0)
        >>> hog.ops.square(x), torch.func.grad(torch.func.grad(hog.ops.square))(x)
        (tensor(9.), tensor(2.))
    """
    validation.differentiable("x", x)
    return _square(x)


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
        - x, y: any, the same
    Example:
        >>> x = torch.tensor(1.0)
        >>> hog.ops.exp(x), torch.func.grad(torch.func.grad(hog.ops.exp))(x)
        (tensor(2.7183), tensor(2.7183))
    """
    validation.differentiable("x", x)
    return _exp(x)


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
        - x, y: any, the same
    Example:
        >>> x = torch.tensor(1.0)
        >>> hog.ops.sinh(x), torch.func.grad(torch.func.grad(hog.ops.sinh))(x)
        (tensor(1.1752), tensor(1.1752))
    """
    validation.differentiable("x", x)
    return _sinh(x)


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
        - x, y: any, the same
    Example:
        >>> x = torch.tensor(0.5)
        >>> hog.ops.tanh(x), torch.func.grad(torch.func.grad(hog.ops.tanh))(x)
        (tensor(0.4621), tensor(-0.7269))
    """
    validation.differentiable("x", x)
    return _tanh(x)


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
        - x, y: any, the same
    Example:
        >>> x = torch.tensor(1.0)
        >>> hog.ops.sigmoid(x), torch.func.grad(torch.func.grad(hog.ops.sigmoid))(x)
        (tensor(0.7311), tensor(-0.0909))
    """
    validation.differentiable("x", x)
    return _sigmoid(x)


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
        TypeError: for an integer x, or an exponent that is not a Python number.
        ValueError: for a NaN exponent.
    Shape:
        - x, y: any, the same
    Example:
        >>> x = torch.tensor(2.0)
        >>> hog.ops.power(x, 3), hog.hessian(lambda x: hog.ops.power(x, 3), x)
        (tensor(8.), tensor(12.))
    """
    validation.differentiable("x", x)
    return _power(x, validation.number("exponent", exponent))


def quadratic(
    x: Tensor, a: Tensor | float, b: Tensor | float, c: Tensor | float
) -> Tensor:  # fmt: skip
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
        raise ArgumentValueError(
            f"input: expected an even size along dim {dim}, got {validation.describe(input)}."
        )
    a, b = upcast_half(input).chunk(2, dim)
    return (a * torch.sigmoid(b)).to(input.dtype)


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
    # grouped so that beta x, which may overflow, is not formed
    return s + x * (beta * (s * (1 - s)))


def _swish_by_beta(x: Tensor, beta: Tensor | float, _: None) -> Tensor:
    s = torch.sigmoid(beta * x)
    return x * (x * (s * (1 - s)))  # grouped so that a huge x meets its zero before its square


_square = define(
    _square_forward, [lambda x, _: 2 * x], reference=_square_forward, keep="inputs"
)  # fmt: skip
_exp = define(torch.exp, [lambda _, y: y], reference=torch.exp, keep="output")
_sinh = define(torch.sinh, [lambda x, _: torch.cosh(x)], reference=torch.sinh, keep="inputs")
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
