"""Reductions over dimensions.

Inside a Function a reduced dimension stays, with size 1, so that what it kept broadcasts to x; the
public functions drop it.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.errors import ArgumentIndexError
from hoglib.ops._function import Batch, Saved, apply_function, conj, make_function

Dims = int | Sequence[int] | None


def sum(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Sum over dimensions.

        y = sum_i x_i        g -> g for every i

    The sum of an empty dimension is 0. Nothing is kept for the derivatives. Differentiable to any
    order, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        dim: The dimensions to reduce, an int or several; None and () mean all.
        keepdim: Whether the reduced dimensions stay, with size 1. Default: False.
    Returns:
        y, of the dtype of x.
    Raises:
        TypeError: for an integer x.
        IndexError: for a dim that x lacks; also a ValueError.
    Shape:
        - x: any
        - y: x without the dimensions dim, or with size 1 there
    Example:
        >>> hog.ops.sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)
        tensor([4., 6.])
    """
    return _reduce(_SUM, torch.sum, x, dim, keepdim)


def mean(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Mean over dimensions.

        y = sum_i x_i / n        g -> g / n for every i

    n is the number of entries that are averaged; the mean of none is NaN, as in torch. Nothing is kept
    for the derivatives. Differentiable to any order, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        dim: The dimensions to reduce, an int or several; None and () mean all.
        keepdim: Whether the reduced dimensions stay, with size 1. Default: False.
    Returns:
        y, of the dtype of x.
    Raises:
        TypeError: for an integer x.
        IndexError: for a dim that x lacks; also a ValueError.
    Shape:
        - x: any
        - y: x without the dimensions dim, or with size 1 there
    Example:
        >>> hog.ops.mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)
        tensor([2., 3.])
    """
    return _reduce(_MEAN, torch.mean, x, dim, keepdim)


def amax(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Maximum over dimensions.

        y = max_i x_i        g -> g / m where x_i = y, else 0

    m is the number of entries that attain the maximum: they share the gradient equally, as in
    torch.amax. The second derivative is 0, away from ties and, by this rule, at them. x and y are kept
    for the derivatives. In reverse and forward mode, under vmap.

    Args:
        x: A real floating-point tensor.
        dim: The dimensions to reduce, an int or several; None and () mean all.
        keepdim: Whether the reduced dimensions stay, with size 1. Default: False.
    Returns:
        y, of the dtype of x.
    Raises:
        TypeError: for an integer or complex x.
        IndexError: for a dim that x lacks or that is empty; also a ValueError.
    Shape:
        - x: any
        - y: x without the dimensions dim, or with size 1 there
    Example:
        >>> x = torch.tensor([1.0, 3.0, 3.0])
        >>> hog.ops.amax(x, 0), torch.func.grad(lambda x: hog.ops.amax(x, 0))(x)
        (tensor(3.), tensor([0.0000, 0.5000, 0.5000]))
    """
    validation.real("x", x)
    dims = validation.dims("dim", dim, x.dim())
    if x.dim() and 0 in [x.shape[d] for d in dims]:
        raise ArgumentIndexError(
            f"dim: expected dimensions with entries, got {dim} of x {tuple(x.shape)}; "
            f"an empty dimension has no maximum."
        )
    return _reduce(_AMAX, torch.amax, x, dim, keepdim)


def logsumexp(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Logarithm of a sum of exponentials.

        y = m + log sum_i exp(x_i - m), m = max_i x_i        dy/dx_i = p_i = exp(x_i - y)
        d2y/dx_i dx_j = p_i (i = j) - p_i p_j

    As in torch, y of a row of -inf is -inf and has derivatives NaN; a row with other entries gives
    its -inf the derivative 0; y of an empty dimension is -inf. x and y are kept for the derivatives.
    Differentiable to any order, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        dim: The dimensions to reduce, an int or several; None and () mean all.
        keepdim: Whether the reduced dimensions stay, with size 1. Default: False.
    Returns:
        y, of the dtype of x.
    Raises:
        TypeError: for an integer x.
        IndexError: for a dim that x lacks; also a ValueError.
    Shape:
        - x: any
        - y: x without the dimensions dim, or with size 1 there
    Example:
        >>> x = torch.zeros(2)
        >>> hog.ops.logsumexp(x, 0), hog.hessian(lambda x: hog.ops.logsumexp(x, 0), x)
        (tensor(0.6931), tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]]))
    """
    return _reduce(_LOGSUMEXP, torch.logsumexp, x, dim, keepdim)


def _reduce(
    function: type[torch.autograd.Function],
    reference: Callable[..., Tensor],
    x: Tensor,
    dim: Dims,
    keepdim: bool,
) -> Tensor:
    validation.differentiable("x", x)
    validation.flag("keepdim", keepdim)
    dims = validation.dims("dim", dim, x.dim())
    if x.dim() == 0:
        return apply_function(function, reference, x.reshape(1), dims, True).reshape(())
    y: Tensor = apply_function(function, reference, x, dims, True)
    return y if keepdim else y.squeeze(dims)


def _vmap(batch: Batch, x: Tensor, dims: tuple[int, ...], keepdim: bool) -> tuple[Tensor, int]:
    return batch.function.apply(batch.to_front(0, x), tuple(d + 1 for d in dims), keepdim), 0


def _make_reduction(
    name: str,
    forward: Callable[..., Tensor],
    *,
    backward: Callable[[Saved, Tensor], Tensor],
    jvp: Callable[[Saved, Tensor], Tensor],
    keep: bool,
) -> type[torch.autograd.Function]:
    return make_function(
        name,
        3,
        forward=forward,
        backward=lambda saved, grad: (backward(saved, grad), None, None),
        jvp=lambda saved, tangent, *_: jvp(saved, tangent),
        vmap=_vmap,
        keep_inputs=(0,) if keep else (),
        keep_outputs=(0,) if keep else (),
    )


def _input_shape(saved: Saved) -> torch.Size:
    (shape, _, _) = saved.input_shapes
    assert shape is not None
    return shape


def _expand(saved: Saved, grad: Tensor) -> Tensor:
    return grad.expand(_input_shape(saved))


def _sum_tangent(saved: Saved, tangent: Tensor) -> Tensor:
    return torch.sum(tangent, saved.inputs[1], True)


def _mean_backward(saved: Saved, grad: Tensor) -> Tensor:
    shape = _input_shape(saved)
    return _expand(saved, grad / prod(shape[d] for d in saved.inputs[1]))


def _mean_tangent(saved: Saved, tangent: Tensor) -> Tensor:
    return torch.mean(tangent, saved.inputs[1], True)


def _maxima(saved: Saved) -> tuple[Tensor, Tensor]:
    """Where the maximum is attained, and how often."""
    (x, dims, _), (y,) = saved.inputs, saved.outputs
    mask = x == y
    return mask, mask.sum(dims, True)


def _amax_backward(saved: Saved, grad: Tensor) -> Tensor:
    mask, count = _maxima(saved)
    return torch.where(mask, grad, 0) / count


def _amax_tangent(saved: Saved, tangent: Tensor) -> Tensor:
    mask, count = _maxima(saved)
    return _sum_tangent(saved, torch.where(mask, tangent, 0)) / count


def _softmax(saved: Saved) -> Tensor:
    (y,) = saved.outputs
    return torch.exp(saved.inputs[0] - y)


def _logsumexp_backward(saved: Saved, grad: Tensor) -> Tensor:
    return grad * conj(_softmax(saved))


def _logsumexp_tangent(saved: Saved, tangent: Tensor) -> Tensor:
    return _sum_tangent(saved, _softmax(saved) * tangent)


_SUM = _make_reduction("Sum", torch.sum, backward=_expand, jvp=_sum_tangent, keep=False)
_MEAN = _make_reduction("Mean", torch.mean, backward=_mean_backward, jvp=_mean_tangent, keep=False)
_AMAX = _make_reduction("AMax", torch.amax, backward=_amax_backward, jvp=_amax_tangent, keep=True)
_LOGSUMEXP = _make_reduction(
    "LogSumExp", torch.logsumexp, backward=_logsumexp_backward, jvp=_logsumexp_tangent, keep=True
)
