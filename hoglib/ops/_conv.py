"""Convolutions whose derivatives are convolutions.

With T(x, w, g) = <conv(x, w), g>, which is linear in each of its three arguments, there are three
maps, one for each argument that is left open:

    C(x, w)  = conv(x, w)     = dT/dg     y from x and w
    X(g, w)  the transposed   = dT/dx     what flows back to x
    W(x, g)  the correlation  = dT/dw     what flows back to w

The derivative of each by either of its arguments is one of the other two: X(g, w) by g is C, by w is
W, and so on. So three Functions that name one another are differentiable to any order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib.ops._conv_geometry import (
    Geometry,
    Size,
    check_kernel_fits,
    check_tensors,
    int_tuple,
    resolve_padding,
)
from hoglib.ops._function import (
    Batch,
    Saved,
    apply_function,
    conj,
    make_function,
    sum_terms,
)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    r"""Convolution over one dimension (cross-correlation, as everywhere in deep learning).

        y[n, o, t] = b[o] + sum over c, k of w[o, c, k] x[n, c, t s + k d - p]
        g -> (transposed convolution of g with w, correlation of x with g, sum of g over n and t)

    Differentiable to any order in x, weight and bias, in every mode and under vmap, for real and
    complex tensors. Under autocast it runs in the autocast dtype, as torch's own does.

    Args:
        x: A floating-point or complex tensor.
        weight: w.
        bias: b. Default: none.
        stride: s, an int or one for each dimension. Default: 1.
        padding: p, the zeros at both ends, an int or one for each dimension; or "valid" (none) or
            "same" (y as large as x, for stride 1; of an odd total the extra zero goes to the end).
            Default: 0.
        dilation: d, an int or one for each dimension. Default: 1.
        groups: Groups of channels that are convolved separately. Default: 1.
    Returns:
        y.
    Raises:
        TypeError: for integer tensors, tensors of several dtypes, or options that are no whole numbers.
        ValueError: for shapes or options that do not fit.
    Shape:
        - x: [N, C, L] or [C, L]
        - weight: [O, C / groups, K]
        - bias: [O]
        - y: [N, O, L'] or [O, L'], with L' = (L + 2 p - d (K - 1) - 1) // s + 1
    Example:
        >>> x, w = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[[1.0, -1.0]]])
        >>> hog.ops.conv1d(x, w)
        tensor([[-1., -1.]])
        >>> hog.hvp(lambda w: hog.ops.conv1d(x, w).square().sum(), w, torch.ones(1, 1, 2))[1]
        tensor([[[26., 42.]]])
    """
    return _conv(1, x, weight, bias, stride, padding, dilation, groups)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    r"""Convolution over two dimensions.

        y[n, o, t] = b[o] + sum over c, k of w[o, c, k] x[n, c, t s + k d - p], t and k pairs
        g -> (transposed convolution of g with w, correlation of x with g, sum of g over n and t)

    Differentiable to any order in x, weight and bias, in every mode and under vmap, for real and
    complex tensors. Under autocast it runs in the autocast dtype, as torch's own does.

    Args:
        x: A floating-point or complex tensor.
        weight: w.
        bias: b. Default: none.
        stride: s, an int or one for each dimension. Default: 1.
        padding: p, the zeros at both ends, an int or one for each dimension; or "valid" (none) or
            "same" (y as large as x, for stride 1; of an odd total the extra zero goes to the end).
            Default: 0.
        dilation: d, an int or one for each dimension. Default: 1.
        groups: Groups of channels that are convolved separately. Default: 1.
    Returns:
        y.
    Raises:
        TypeError: for integer tensors, tensors of several dtypes, or options that are no whole numbers.
        ValueError: for shapes or options that do not fit.
    Shape:
        - x: [N, C, H, W] or [C, H, W]
        - weight: [O, C / groups, K, K']
        - bias: [O]
        - y: [N, O, H', W'] or [O, H', W'], with H' = (H + 2 p - d (K - 1) - 1) // s + 1, W' likewise
    Example:
        >>> x, w = torch.ones(1, 2, 2), torch.tensor([[[[1.0, 2.0]]]])
        >>> hog.ops.conv2d(x, w)
        tensor([[[3.],
                 [3.]]])
        >>> hog.hvp(lambda w: hog.ops.conv2d(x, w).square().sum(), w, torch.ones(1, 1, 1, 2))[1]
        tensor([[[[8., 8.]]]])
    """
    return _conv(2, x, weight, bias, stride, padding, dilation, groups)


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    r"""Convolution over three dimensions.

        y[n, o, t] = b[o] + sum over c, k of w[o, c, k] x[n, c, t s + k d - p], t and k triples
        g -> (transposed convolution of g with w, correlation of x with g, sum of g over n and t)

    Differentiable to any order in x, weight and bias, in every mode and under vmap, for real and
    complex tensors. Under autocast it runs in the autocast dtype, as torch's own does.

    Args:
        x: A floating-point or complex tensor.
        weight: w.
        bias: b. Default: none.
        stride: s, an int or one for each dimension. Default: 1.
        padding: p, the zeros at both ends, an int or one for each dimension; or "valid" (none) or
            "same" (y as large as x, for stride 1; of an odd total the extra zero goes to the end).
            Default: 0.
        dilation: d, an int or one for each dimension. Default: 1.
        groups: Groups of channels that are convolved separately. Default: 1.
    Returns:
        y.
    Raises:
        TypeError: for integer tensors, tensors of several dtypes, or options that are no whole numbers.
        ValueError: for shapes or options that do not fit.
    Shape:
        - x: [N, C, D, H, W] or [C, D, H, W]
        - weight: [O, C / groups, K, K', K'']
        - bias: [O]
        - y: [N, O, D', H', W'] or [O, D', H', W'], with D' = (D + 2 p - d (K - 1) - 1) // s + 1, and
          H' and W' likewise
    Example:
        >>> x, w = torch.ones(1, 2, 2, 2), torch.ones(1, 1, 2, 2, 2)
        >>> hog.ops.conv3d(x, w)
        tensor([[[[8.]]]])
        >>> hog.hvp(lambda w: hog.ops.conv3d(x, w).square().sum(), w, w)[1][0, 0, 0]
        tensor([[16., 16.],
                [16., 16.]])
    """
    return _conv(3, x, weight, bias, stride, padding, dilation, groups)


def _conv(
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
) -> Tensor:
    name = f"conv{rank}d"
    check_tensors(name, rank, x, weight, bias, validation.at_least("groups", groups, 1))
    strides, dilations = (
        int_tuple("stride", stride, rank, 1),
        int_tuple("dilation", dilation, rank, 1),
    )
    kernel = tuple(weight.shape[2:])
    pads, extra = resolve_padding(padding, strides, dilations, kernel)
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        # What backward reads must have the dtype that forward computed in.
        dtype = torch.get_autocast_dtype(device_type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if any(extra):
        x = F.pad(x, [n for right in reversed(extra) for n in (0, right)])
    image = tuple(x.shape[-rank:])
    geometry = Geometry(strides, pads, dilations, groups, image, kernel)
    check_kernel_fits(name, geometry)
    batched = x if x.dim() == rank + 2 else x.unsqueeze(0)
    y: Tensor = apply_function(_CONV, _reference, geometry, batched, weight, bias)
    return y if x.dim() == rank + 2 else y.squeeze(0)


def _reference(geometry: Geometry, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    run = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.kernel) - 1]
    steps = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    return run(x, weight, bias, *steps)


# The three maps on real tensors, by torch's kernels, which need not be differentiable themselves.


def _kernel_y(geometry: Geometry, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.aten.convolution(x, weight, bias, *geometry.options)
    return y


def _kernel_x(geometry: Geometry, grad: Tensor, weight: Tensor) -> Tensor:
    x = grad.new_empty(()).expand(grad.shape[0], weight.shape[1] * geometry.groups, *geometry.image)
    return _kernel_backward(geometry, grad, x, weight, 0)


def _kernel_weight(geometry: Geometry, x: Tensor, grad: Tensor) -> Tensor:
    weight = x.new_empty(()).expand(grad.shape[1], x.shape[1] // geometry.groups, *geometry.kernel)
    return _kernel_backward(geometry, grad, x, weight, 1)


def _kernel_backward(
    geometry: Geometry, grad: Tensor, x: Tensor, weight: Tensor, which: int
) -> Tensor:
    run = torch.ops.aten.convolution_backward
    mask = [which == 0, which == 1, False]
    result: Tensor = run(grad, x, weight, None, *geometry.options, mask)[which]
    return result


def _bilinear(kernel: Callable[..., Tensor], geometry: Geometry, a: Tensor, b: Tensor) -> Tensor:
    """A map that is linear in a and in b, of complex tensors too, which have no kernels."""
    if not a.is_complex():
        return kernel(geometry, a, b)
    real = kernel(geometry, a.real, b.real) - kernel(geometry, a.imag, b.imag)
    return torch.complex(real, kernel(geometry, a.real, b.imag) + kernel(geometry, a.imag, b.real))


def _channels(bias: Tensor, rank: int) -> Tensor:
    return bias.reshape(-1, *(1,) * rank)


# The same three as Functions.


def _make_conv() -> type[torch.autograd.Function]:
    def forward(geometry: Geometry, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_complex():
            return _kernel_y(geometry, x, weight, bias)
        y = _bilinear(_kernel_y, geometry, x, weight)
        return y if bias is None else y + _channels(bias, len(geometry.kernel))

    def backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
        geometry, x, weight, _ = saved.inputs
        _, by_x, by_weight, by_bias = saved.needs_input_grad
        return [
            None,
            _TO_X.apply(geometry, grad, conj(weight)) if by_x else None,
            _TO_WEIGHT.apply(geometry, conj(x), grad) if by_weight else None,
            grad.sum([0, *range(2, grad.dim())]) if by_bias else None,
        ]

    def jvp(saved: Saved, _: None, *tangents: Tensor | None) -> Tensor:
        geometry, x, weight, _bias = saved.inputs
        by_x, by_weight, by_bias = tangents
        terms = []
        if by_x is not None:
            terms.append(_CONV.apply(geometry, by_x, weight, None))
        if by_weight is not None:
            terms.append(_CONV.apply(geometry, x, by_weight, None))
        if by_bias is not None:
            terms.append(_channels(by_bias, len(geometry.kernel)).expand(saved.output_shapes[0]))
        return sum_terms(terms)

    return make_function(
        "Conv", 4, forward=forward, backward=backward, jvp=jvp, vmap=_vmap, keep_inputs=(1, 2)
    )


def _make_map(
    name: str, kernel: Callable[..., Tensor], backward: Callable[..., tuple[Any, Any]],
    vmap: Callable[..., Any],
) -> Any:  # fmt: skip
    """A map that is linear in a and in b. backward(u, a, b) gives for each of them the Function
    that is its gradient, and what that is applied to."""

    def run_backward(saved: Saved, u: Tensor) -> list[Tensor | None]:
        geometry, *factors = saved.inputs
        pairs = zip(backward(u, *factors), saved.needs_input_grad[1:], strict=True)
        return [
            None,
            *(
                other.apply(geometry, *given) if needed else None
                for (other, *given), needed in pairs
            ),
        ]

    def jvp(saved: Saved, _: None, by_a: Tensor | None, by_b: Tensor | None) -> Tensor:
        geometry, a, b = saved.inputs
        terms = [] if by_a is None else [made.apply(geometry, by_a, b)]
        if by_b is not None:
            terms.append(made.apply(geometry, a, by_b))
        return sum_terms(terms)

    made: Any = make_function(
        name, 3, forward=partial(_bilinear, kernel), backward=run_backward, jvp=jvp, vmap=vmap
    )
    return made


def _vmap(batch: Batch, geometry: Geometry, x: Tensor, *others: Tensor | None) -> Any:
    """The batch becomes more channels; where all share a weight, more samples."""
    if not any(dim is not None for dim in batch.in_dims[2:]):
        merged = _merge_batch(batch.to_front(1, x), 0)
        return _split_batch(batch.function.apply(geometry, merged, *others), 0, batch.size), 0
    own = [
        None if y is None else batch.to_front(i, y).flatten(0, 1) for i, y in enumerate(others, 2)
    ]
    x = _merge_batch(batch.to_front(1, x), 1)
    y = batch.function.apply(geometry.repeat_groups(batch.size), x, *own)
    return _split_batch(y, 1, batch.size), 1


def _vmap_to_weight(batch: Batch, geometry: Geometry, *given: Tensor) -> Any:
    merged = [_merge_batch(batch.to_front(i, y), 1) for i, y in enumerate(given, 1)]
    weight = batch.function.apply(geometry.repeat_groups(batch.size), *merged)
    return _split_batch(weight, 0, batch.size), 0


def _merge_batch(tensor: Tensor, dim: int) -> Tensor:
    """The batch dimension, which is first, as the outer part of dimension dim."""
    return tensor.movedim(0, dim).flatten(dim, dim + 1)


def _split_batch(tensor: Tensor, dim: int, batch_size: int) -> Tensor:
    """The inverse of _merge_batch: the outer part of a dimension as one of its own, before it."""
    size = tensor.shape[dim] // batch_size
    return tensor.unflatten(dim, (batch_size, size))


_CONV = _make_conv()
_TO_X: Any = _make_map(
    "ConvToInput",
    _kernel_x,
    lambda u, grad, weight: ((_CONV, u, conj(weight), None), (_TO_WEIGHT, u, conj(grad))),
    _vmap,
)
_TO_WEIGHT: Any = _make_map(
    "ConvToWeight",
    _kernel_weight,
    lambda v, x, grad: ((_TO_X, conj(grad), v), (_CONV, conj(x), v, None)),
    _vmap_to_weight,
)
