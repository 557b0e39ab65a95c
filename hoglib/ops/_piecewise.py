"""Piecewise ops: masks decide which gradients pass, and second derivatives are piecewise too.

A mask is applied with `where`, not by multiplication, so that an infinite gradient that arrives at a
closed gate is zero behind it, not NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import torch_errors, validation
from hoglib._core.mixed_precision import upcast_half
from hoglib.errors import ArgumentValueError
from hoglib.ops._define import define
from hoglib.ops._pointwise import tanh


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
        - x, y: any, the same
    Example:
        >>> x = torch.tensor([-1.0, 2.0])
        >>> hog.ops.relu(x), torch.func.grad(lambda x: hog.ops.relu(x).sum())(x)
        (tensor([0., 2.]), tensor([0., 1.]))
    """
    validation.real("x", x)
    return _relu(x)


def clamp(
    x: Tensor,
    *,
    min: float | None = None,
    max: float | None = None,
    straight_through: bool = False,
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
        TypeError: for an integer or complex x, or bounds that are not Python numbers.
        ValueError: for a NaN bound, or without either bound.
    Shape:
        - x, y: any, the same
    Example:
        >>> x = torch.tensor([-1.0, 0.5, 2.0])
        >>> hog.ops.clamp(x, min=0, max=1)
        tensor([0.0000, 0.5000, 1.0000])
        >>> torch.func.grad(lambda x: hog.ops.clamp(x, min=0, max=1).sum())(x)
        tensor([0., 1., 0.])
    """
    validation.real("x", x)
    validation.flag("straight_through", straight_through)
    if min is None and max is None:
        raise ArgumentValueError("clamp: expected min, max or both, got neither; give one bound.")
    low = None if min is None else validation.number("min", min)
    high = None if max is None else validation.number("max", max)
    return (_clamp_straight_through if straight_through else _clamp)(x, low, high)


def smooth_l1(input: Tensor, target: Tensor, *, beta: float = 1.0) -> Tensor:
    r"""Smooth L1 distance, element by element.

        d = input - target
        y = d^2 / (2 beta) where |d| < beta, else |d| - beta / 2
        dy/dinput = d / beta where |d| < beta, else sign(d)        dy/dtarget = -dy/dinput

    As in torch, the second derivative where the pieces meet, at |d| = beta, is 0. `y.mean()` is
    `torch.nn.SmoothL1Loss`. Differentiable in both tensors, in reverse and forward mode, under vmap.

    Args:
        input: A real floating-point tensor.
        target: A real floating-point tensor.
        beta: Where the quadratic piece ends, a Python number; 0 makes y the distance |d|. Default: 1.
    Returns:
        y, of the promoted dtype.
    Raises:
        TypeError: for integer or complex tensors, or a beta that is not a Python number.
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
        TypeError: for an integer or complex x, or a scale that is not a Python number.
        ValueError: for an unknown kind.
    Shape:
        - x, y: any, the same
    Example:
        >>> x = torch.tensor(0.5)
        >>> f = lambda x: hog.ops.scaled_activation(x, scale=2.0, kind="tanh")
        >>> f(x), hog.hessian(f, x)
        (tensor(0.9242), tensor(-1.4537))
    """
    validation.real("x", x)
    validation.one_of("kind", kind, _SCALED)
    return validation.number("scale", scale) * _SCALED[kind](x)


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
        - x, pos, neg: any, the same
    Example:
        >>> hog.ops.split_signs(torch.tensor([-1.0, 2.0]))
        (tensor([0., 2.]), tensor([1., 0.]))
    """
    return relu(validation.real("x", x)), relu(-x)


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
        - input, y: any, the same
    Example:
        >>> x = torch.tensor([-4.0, 0.0, 1.5])
        >>> hog.ops.hardsigmoid(x)
        tensor([0.0000, 0.5000, 0.7500])
        >>> hog.hessian(lambda x: hog.ops.hardsigmoid(x).sum(), x).any()
        tensor(False)
    """
    torch_errors.real("input", input)
    x = upcast_half(input.clone() if inplace else input)
    y = (F.hardtanh(x, -3.0, 3.0) / 6 + 0.5).to(input.dtype)
    return input.copy_(y) if inplace else y


def zero_with_slope_one(x: Tensor) -> Tensor:
    """Zeros whose derivative by x is one: it carries a surrogate gradient in plain torch.

    Where x is not finite, x - x would be NaN, so there the derivative is given up for the value.
    """
    finite = torch.where(x.isfinite(), x, 0)
    return finite - finite.detach()


_relu = define(torch.relu, [lambda _, y: ~(y <= 0)], reference=torch.relu, keep="output")


def _inside(x: Tensor, low: float | None, high: float | None, _: None) -> Tensor:
    above = None if low is None else x >= low
    if high is None:
        assert above is not None
        return above
    return x <= high if above is None else above & (x <= high)


def _straight_through_reference(x: Tensor, low: float | None, high: float | None) -> Tensor:
    return torch.clamp(x.detach(), low, high) + zero_with_slope_one(x)


_clamp = define(torch.clamp, [_inside, None, None], reference=torch.clamp, keep="inputs")
_clamp_straight_through = define(
    torch.clamp,
    [lambda *_: 1, None, None],
    reference=_straight_through_reference,
    surrogate=True,
    keep="none",
)


def _smooth_l1_forward(input: Tensor, target: Tensor, beta: float) -> Tensor:
    if input.shape != target.shape:  # torch's own warns of it
        input, target = torch.broadcast_tensors(input, target)
    return F.smooth_l1_loss(input, target, reduction="none", beta=beta)


def _smooth_l1_reference(input: Tensor, target: Tensor, beta: float) -> Tensor:
    d = input - target
    if beta == 0:
        return d.abs()
    far = d.abs() >= beta
    return torch.where(far, d.abs() - beta / 2, d * d / (2 * beta))


def _smooth_l1_by_input(input: Tensor, target: Tensor, beta: float, _: None) -> Tensor:
    d = input - target
    if beta == 0:
        return d.sign()
    return torch.where(d.abs() >= beta, d.sign(), d / beta)


_smooth_l1 = define(
    _smooth_l1_forward,
    [_smooth_l1_by_input, lambda *inputs: -_smooth_l1_by_input(*inputs), None],
    reference=_smooth_l1_reference,
    keep="inputs",
)


_SCALED = {"relu": relu, "tanh": tanh}
