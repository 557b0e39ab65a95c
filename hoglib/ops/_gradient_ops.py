"""Ops that act on gradients: what they compute and what they send back differ on purpose.

The value is a copy of x, not a view, so that an in-place operation on it leaves x alone. For a
second derivative the rule of backward is differentiated: each docstring says what that gives.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.torch_modes import needs_linear_backward
from hoglib.errors import UnsupportedError
from hoglib.ops._define import define
from hoglib.ops._function import (
    Saved,
    apply_function,
    make_function,
    vmap_by_broadcasting,
    without_jvp,
)
from hoglib.ops._linear import linear
from hoglib.ops._piecewise import zero_with_slope_one


def straight_through(x: Tensor, *, kind: str = "sign") -> Tensor:
    r"""A step function with the gradient of the identity.

        y = sign(x), heaviside(x) (1 where x > 0, else 0) or round(x) (halves to even)        g -> g

    Second derivatives of y are 0, by definition: in a composition f(y(x)) the second derivative by x
    is that of f at y. Tangents of forward mode pass like gradients. In reverse and forward mode, under
    vmap.

    Args:
        x: A real floating-point tensor.
        kind: "sign", "heaviside" or "round". Default: "sign".
    Returns:
        y, like x.
    Raises:
        TypeError: for an integer or complex x.
        ValueError: for an unknown kind.
    Shape:
        - x, y: any, the same
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
    validation.one_of("kind", kind, _STRAIGHT_THROUGH)
    return _STRAIGHT_THROUGH[kind](x)


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
        TypeError: for an integer x, or a scale that is not a Python number.
        ValueError: for a NaN scale.
    Shape:
        - x, y: any, the same
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
        TypeError: for an integer x, or a scale that is not a Python number.
        ValueError: for a NaN scale.
    Shape:
        - x, y: any, the same
    References:
        Ganin and Lempitsky, Unsupervised Domain Adaptation by Backpropagation, 2015, equation 7.
    Example:
        >>> x = torch.tensor(3.0)
        >>> torch.func.grad(lambda x: hog.ops.reverse_gradient(x) ** 2)(x)
        tensor(-6.)
    """
    validation.differentiable("x", x)
    return _scale_gradient(x, -validation.number("scale", scale))


def clip_gradient(x: Tensor, *, bound: float) -> Tensor:
    r"""The identity, with each entry of its gradient clipped.

        y = x        g -> min(max(g, -c), c)

    A clip is not linear, so the order of modes matters for second derivatives of f(y(x)).
    Forward-over-reverse differentiates the clipped gradient: f'' v in the entries where |f'| <= c,
    and 0 in those that were clipped; it need not be symmetric. Reverse-over-reverse passes the op
    once more in its second backward and clips once more: the product is that, with f'' v clipped to c
    too, as it is with a hook on a tensor. A tangent of forward mode passes as it is, because it is no
    gradient: jvp inside jvp sees the identity. In reverse and forward mode, under vmap.

    Args:
        x: A real floating-point tensor.
        bound: c, a Python number of at least 0.
    Returns:
        y, a copy of x.
    Raises:
        TypeError: for an integer or complex x, or a bound that is not a Python number.
        ValueError: for a negative bound.
    Shape:
        - x, y: any, the same
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
    result: Tensor
    if torch.compiler.is_compiling():  # no plain torch operation clips a gradient
        result = _COMPILED_CLIP_GRADIENT.apply(x, bound)
    else:
        result = apply_function(_CLIP_GRADIENT, _copy, x, bound)
    return result


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
        - x, y: any, the same
    Example:
        >>> x = torch.tensor(3.0)
        >>> torch.func.grad(lambda x: x * hog.ops.stop_gradient(x))(x)
        tensor(3.)
    """
    return validation.differentiable("x", x).detach()


def clipped_gradient_linear(x: Tensor, weight: Tensor, *, bound: float) -> Tensor:
    r"""A linear map that clips the gradient by x, and not the one by its weight.

        y = x W^T        g -> (min(max(g W, -c), c), g^T x)

    Second derivatives and forward mode are those of `clip_gradient` before `linear`: second derivatives
    depend on the order of modes. In reverse and forward mode, under vmap.

    Args:
        x: A real floating-point tensor.
        weight: W.
        bound: c, a Python number of at least 0.
    Returns:
        y.
    Raises:
        TypeError: for integer or complex tensors, or a bound that is not a Python number.
        ValueError: for shapes that do not fit, or a negative bound.
    Shape:
        - x: [..., in]
        - weight: [out, in]
        - y: [..., out]
    Example:
        >>> x, W = torch.ones(1, 2), torch.tensor([[0.5, 3.0]])
        >>> f = lambda x, W: hog.ops.clipped_gradient_linear(x, W, bound=1.0).sum()
        >>> torch.func.grad(f, (0, 1))(x, W)
        (tensor([[0.5000, 1.0000]]), tensor([[1., 1.]]))
    """
    validation.real("weight", weight)
    return linear(clip_gradient(x, bound=bound), weight)


def _copy(x: Tensor, *_: float) -> Tensor:
    return x.clone()


def _heaviside(x: Tensor) -> Tensor:
    return torch.heaviside(x, x.new_zeros(()))


def _make_straight_through(step: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def reference(x: Tensor) -> Tensor:
        return step(x.detach()) + zero_with_slope_one(x)

    return define(step, [lambda *_: 1], reference=reference, surrogate=True, keep="none")


_STRAIGHT_THROUGH = {
    "sign": _make_straight_through(torch.sign),
    "heaviside": _make_straight_through(_heaviside),
    "round": _make_straight_through(torch.round),
}


def _scaled_reference(x: Tensor, scale: float) -> Tensor:
    return x.detach() + scale * zero_with_slope_one(x)


_scale_gradient = define(
    _copy,
    [lambda x, scale, _: scale, None],
    reference=_scaled_reference,
    surrogate=True,
    keep="none",
)


def _clip_backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
    bound = saved.inputs[1]
    return [grad.clamp(-bound, bound), None]


def _clip_jvp(saved: Saved, tangent: Tensor, _: None) -> Tensor:
    return tangent.clone()


_CLIP_GRADIENT = make_function(
    "ClipGradient",
    2,
    forward=_copy,
    backward=_clip_backward,
    jvp=_clip_jvp,
    vmap=vmap_by_broadcasting,
    keep_inputs=(),
)
_COMPILED_CLIP_GRADIENT = without_jvp(_CLIP_GRADIENT)
