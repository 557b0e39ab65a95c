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
from hoglib.ops._define import Saved, call, conj, make_function

Dims = int | Sequence[int] | None


def sum(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Sum over dimensions.

        y = sum_i x_i        g -> g for every i

    Shapes: x any; y is x without the dimensions dim, an int or several, or with size 1 there under
    keepdim; None and () mean all. The sum of an empty dimension is 0. Nothing is kept. To any order,
    in reverse and forward mode, under vmap.
    Raises TypeError for an integer x, ValueError for a dim that x lacks.
    """
    return _reduce(_SUM, torch.sum, x, dim, keepdim)


def mean(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Mean over dimensions.

        y = sum_i x_i / n        g -> g / n for every i

    n is the number of entries that are averaged; the mean of none is NaN, as in torch. Shapes, orders,
    modes and errors as for `sum`.
    """
    return _reduce(_MEAN, torch.mean, x, dim, keepdim)


def amax(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Maximum over dimensions.

        y = max_i x_i        g -> g / m where x_i = y, else 0

    m is the number of entries that attain the maximum: they share the gradient equally, as in
    torch.amax. The second derivative is 0, away from ties and, by this rule, at them. Shapes as for
    `sum`; x and y are kept. In reverse and forward mode, under vmap.
    Raises TypeError for an integer or complex x, ValueError for a dim that x lacks or that is empty.
    """
    validation.real("x", x)
    dims = validation.dims("dim", dim, x.dim())
    if x.dim() and 0 in [x.shape[d] for d in dims]:
        raise ArgumentIndexError(
            f"dim: expected dimensions with entries, got {dim} of x {tuple(x.shape)}; "
            f"there is no maximum of nothing."
        )
    return _reduce(_AMAX, torch.amax, x, dim, keepdim)


def logsumexp(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Logarithm of a sum of exponentials.

        y = m + log sum_i exp(x_i - m), m = max_i x_i        dy/dx_i = p_i = exp(x_i - y)
        d2y/dx_i dx_j = p_i (i = j) - p_i p_j

    As in torch, y of a row of -inf is -inf and has derivatives NaN; a row with other entries gives
    its -inf the derivative 0; y of an empty dimension is -inf. Shapes as for `sum`; x and y are kept.
    To any order, in reverse and forward mode, under vmap.
    Raises TypeError for an integer x, ValueError for a dim that x lacks.
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
        return call(function, reference, x.reshape(1), dims, True).reshape(())
    y: Tensor = call(function, reference, x, dims, True)
    return y if keepdim else y.squeeze(dims)


def _vmap(
    function: type[torch.autograd.Function],
    batch_size: int,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
) -> tuple[Tensor, int]:
    assert in_dims[0] is not None
    y = function.apply(x.movedim(in_dims[0], 0), tuple(d + 1 for d in dims), keepdim)
    return y, 0


def _make(
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


def _spread(saved: Saved, grad: Tensor) -> Tensor:
    (shape, _, _) = saved.input_shapes
    assert shape is not None
    return grad.expand(shape)


def _total(saved: Saved, tangent: Tensor) -> Tensor:
    return torch.sum(tangent, saved.inputs[1], True)


def _count(saved: Saved) -> int:
    (shape, _, _) = saved.input_shapes
    assert shape is not None
    return prod(shape[d] for d in saved.inputs[1])


def _mean_backward(saved: Saved, grad: Tensor) -> Tensor:
    return _spread(saved, grad / _count(saved))


def _mean_jvp(saved: Saved, tangent: Tensor) -> Tensor:
    return torch.mean(tangent, saved.inputs[1], True)


def _attains(saved: Saved) -> tuple[Tensor, Tensor]:
    """Where the maximum is attained, and how often."""
    (x, dims, _), (y,) = saved.inputs, saved.outputs
    mask = x == y
    return mask, mask.sum(dims, True)


def _amax_backward(saved: Saved, grad: Tensor) -> Tensor:
    mask, often = _attains(saved)
    return torch.where(mask, grad, 0) / often


def _amax_jvp(saved: Saved, tangent: Tensor) -> Tensor:
    mask, often = _attains(saved)
    return _total(saved, torch.where(mask, tangent, 0)) / often


def _softmax(saved: Saved) -> Tensor:
    (y,) = saved.outputs
    return torch.exp(saved.inputs[0] - y)


def _logsumexp_backward(saved: Saved, grad: Tensor) -> Tensor:
    return grad * conj(_softmax(saved))


def _logsumexp_jvp(saved: Saved, tangent: Tensor) -> Tensor:
    return _total(saved, _softmax(saved) * tangent)


_SUM = _make("Sum", torch.sum, backward=_spread, jvp=_total, keep=False)
_MEAN = _make("Mean", torch.mean, backward=_mean_backward, jvp=_mean_jvp, keep=False)
_AMAX = _make("AMax", torch.amax, backward=_amax_backward, jvp=_amax_jvp, keep=True)
_LOGSUMEXP = _make(
    "LogSumExp",
    torch.logsumexp,
    backward=_logsumexp_backward,
    jvp=_logsumexp_jvp,
    keep=True,
)
