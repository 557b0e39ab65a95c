"""Convolutions whose derivatives are convolutions.

With T(x, w, g) = <conv(x, w), g>, which is linear in each of its three arguments, there are three
maps, one for each argument that is left open:

    C(x, w)  = conv(x, w)     = dT/dg     y from x and w
    X(g, w)  the transposed   = dT/dx     what flows back to x
    W(x, g)  the correlation  = dT/dw     what flows back to w

The derivative of each by either of its arguments is one of the other two: X(g, w) by g is C, by w is
W, and so on. So three Functions that name one another are differentiable to any order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.ops._define import Saved, call, conj, make_function

Size = int | Sequence[int]


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

    Shapes: x [N, C, L] or [C, L], weight [O, C / groups, K], bias [O] or None; y [N, O, L'] or
    [O, L'] with L' = (L + 2 p - d (K - 1) - 1) // s + 1. stride s, padding p and dilation d are an int
    or one int a dimension; padding may be "valid" (none) or "same" (L' = L, stride 1; of an odd total
    the extra zero goes to the end). Options as in `torch.nn.functional.conv1d`.

    Differentiable to any order in x, weight and bias, in every mode and under vmap, for real and
    complex tensors. Under autocast it runs in the autocast dtype, as torch's own does.
    Raises TypeError for integer tensors or options; ValueError for shapes or options that do not fit.
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

    Shapes: x [N, C, H, W] or [C, H, W], weight [O, C / groups, K, K'], bias [O] or None; y
    [N, O, H', W'] or [O, H', W']. Options, orders, modes and errors as for `conv1d`.
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

    Shapes: x [N, C, D, H, W] or [C, D, H, W], weight [O, C / groups, K, K', K''], bias [O] or None; y
    [N, O, D', H', W'] or [O, D', H', W']. Options, orders, modes and errors as for `conv1d`.
    """
    return _conv(3, x, weight, bias, stride, padding, dilation, groups)


@dataclass(frozen=True)
class _Geometry:
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    image: tuple[int, ...]  # of x, without batch and channels
    kernel: tuple[int, ...]

    def repeated(self, batch_size: int) -> "_Geometry":
        """For as many independent convolutions beside one another, in the channels."""
        return replace(self, groups=self.groups * batch_size)


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
    _check_tensors(name, rank, x, weight, bias, validation.at_least("groups", groups, 1))
    strides, dilations = _tuple("stride", stride, rank, 1), _tuple("dilation", dilation, rank, 1)
    kernel = tuple(weight.shape[2:])
    pads, extra = _pads(padding, strides, dilations, kernel)
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        # What backward reads must have the dtype that forward computed in.
        dtype = torch.get_autocast_dtype(device_type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if any(extra):
        x = F.pad(x, [n for right in reversed(extra) for n in (0, right)])
    image = tuple(x.shape[-rank:])
    geometry = _Geometry(strides, pads, dilations, groups, image, kernel)
    _check_fit(name, geometry)
    batched = x if x.dim() == rank + 2 else x.unsqueeze(0)
    y: Tensor = call(_CONV, _reference, geometry, batched, weight, bias)
    return y if x.dim() == rank + 2 else y.squeeze(0)


def _reference(geometry: _Geometry, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    run = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.kernel) - 1]
    return run(
        x,
        weight,
        bias,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.groups,
    )


# The three maps on real tensors, by torch's kernels, which need not be differentiable themselves.


def _kernel_y(at: _Geometry, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    none = [0] * len(at.kernel)
    y: Tensor = torch.ops.aten.convolution(
        x, weight, bias, at.stride, at.padding, at.dilation, False, none, at.groups
    )
    return y


def _kernel_x(at: _Geometry, grad: Tensor, weight: Tensor) -> Tensor:
    x = grad.new_empty(()).expand(grad.shape[0], weight.shape[1] * at.groups, *at.image)
    return _kernel_backward(at, grad, x, weight, 0)


def _kernel_weight(at: _Geometry, x: Tensor, grad: Tensor) -> Tensor:
    weight = x.new_empty(()).expand(grad.shape[1], x.shape[1] // at.groups, *at.kernel)
    return _kernel_backward(at, grad, x, weight, 1)


def _kernel_backward(at: _Geometry, grad: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
    mask = [which == 0, which == 1, False]
    none = [0] * len(at.kernel)
    result: Tensor = torch.ops.aten.convolution_backward(
        grad, x, weight, None, at.stride, at.padding, at.dilation, False, none, at.groups, mask
    )[which]
    return result


def _bilinear(kernel: Callable[..., Tensor], at: _Geometry, a: Tensor, b: Tensor) -> Tensor:
    """A map that is linear in a and in b, of complex tensors too, which have no kernels."""
    if not a.is_complex():
        return kernel(at, a, b)
    real = kernel(at, a.real, b.real) - kernel(at, a.imag, b.imag)
    return torch.complex(real, kernel(at, a.real, b.imag) + kernel(at, a.imag, b.real))


def _channels(bias: Tensor, rank: int) -> Tensor:
    return bias.reshape(-1, *(1,) * rank)


# The same three as Functions.


def _make_conv() -> type[torch.autograd.Function]:
    def forward(at: _Geometry, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_complex():
            return _kernel_y(at, x, weight, bias)
        y = _bilinear(_kernel_y, at, x, weight)
        return y if bias is None else y + _channels(bias, len(at.kernel))

    def backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
        at, x, weight, _ = saved.inputs
        _, by_x, by_weight, by_bias = saved.needed
        return [
            None,
            _TO_X.apply(at, grad, conj(weight)) if by_x else None,
            _TO_WEIGHT.apply(at, conj(x), grad) if by_weight else None,
            grad.sum([0, *range(2, grad.dim())]) if by_bias else None,
        ]

    def jvp(saved: Saved, _: None, *tangents: Tensor | None) -> Tensor:
        at, x, weight, _bias = saved.inputs
        by_x, by_weight, by_bias = tangents
        terms = []
        if by_x is not None:
            terms.append(_CONV.apply(at, by_x, weight, None))
        if by_weight is not None:
            terms.append(_CONV.apply(at, x, by_weight, None))
        if by_bias is not None:
            terms.append(_channels(by_bias, len(at.kernel)).expand(saved.output_shapes[0]))
        return _total(terms)

    def vmap(
        function: type[torch.autograd.Function],
        batch_size: int,
        in_dims: tuple[int | None, ...],
        at: _Geometry,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, int]:
        if in_dims[2] is None and in_dims[3] is None:
            return _vmap_samples(function, batch_size, in_dims[1], at, x, weight, bias)
        x = _into(_to_front(x, in_dims[1], batch_size), 1)
        weight = _to_front(weight, in_dims[2], batch_size).flatten(0, 1)
        if bias is not None:
            bias = _to_front(bias, in_dims[3], batch_size).flatten(0, 1)
        return _split(function.apply(at.repeated(batch_size), x, weight, bias), 1, batch_size), 1

    return make_function(
        "Conv", 4, forward=forward, backward=backward, jvp=jvp, vmap=vmap, keep_inputs=(1, 2),
        keep_outputs=(),
    )  # fmt: skip


def _make_to_x() -> type[torch.autograd.Function]:
    def forward(at: _Geometry, grad: Tensor, weight: Tensor) -> Tensor:
        return _bilinear(_kernel_x, at, grad, weight)

    def backward(saved: Saved, u: Tensor) -> list[Tensor | None]:
        at, grad, weight = saved.inputs
        _, by_grad, by_weight = saved.needed
        return [
            None,
            _CONV.apply(at, u, conj(weight), None) if by_grad else None,
            _TO_WEIGHT.apply(at, u, conj(grad)) if by_weight else None,
        ]

    def jvp(saved: Saved, _: None, by_grad: Tensor | None, by_weight: Tensor | None) -> Tensor:
        at, grad, weight = saved.inputs
        terms = [] if by_grad is None else [_TO_X.apply(at, by_grad, weight)]
        if by_weight is not None:
            terms.append(_TO_X.apply(at, grad, by_weight))
        return _total(terms)

    def vmap(
        function: type[torch.autograd.Function],
        batch_size: int,
        in_dims: tuple[int | None, ...],
        at: _Geometry,
        grad: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, int]:
        if in_dims[2] is None:
            return _vmap_samples(function, batch_size, in_dims[1], at, grad, weight)
        grad = _into(_to_front(grad, in_dims[1], batch_size), 1)
        weight = _to_front(weight, in_dims[2], batch_size).flatten(0, 1)
        return _split(function.apply(at.repeated(batch_size), grad, weight), 1, batch_size), 1

    return make_function(
        "ConvToInput", 3, forward=forward, backward=backward, jvp=jvp, vmap=vmap, keep_outputs=()
    )


def _make_to_weight() -> type[torch.autograd.Function]:
    def forward(at: _Geometry, x: Tensor, grad: Tensor) -> Tensor:
        return _bilinear(_kernel_weight, at, x, grad)

    def backward(saved: Saved, v: Tensor) -> list[Tensor | None]:
        at, x, grad = saved.inputs
        _, by_x, by_grad = saved.needed
        return [
            None,
            _TO_X.apply(at, conj(grad), v) if by_x else None,
            _CONV.apply(at, conj(x), v, None) if by_grad else None,
        ]

    def jvp(saved: Saved, _: None, by_x: Tensor | None, by_grad: Tensor | None) -> Tensor:
        at, x, grad = saved.inputs
        terms = [] if by_x is None else [_TO_WEIGHT.apply(at, by_x, grad)]
        if by_grad is not None:
            terms.append(_TO_WEIGHT.apply(at, x, by_grad))
        return _total(terms)

    def vmap(
        function: type[torch.autograd.Function],
        batch_size: int,
        in_dims: tuple[int | None, ...],
        at: _Geometry,
        x: Tensor,
        grad: Tensor,
    ) -> tuple[Tensor, int]:
        x = _into(_to_front(x, in_dims[1], batch_size), 1)
        grad = _into(_to_front(grad, in_dims[2], batch_size), 1)
        return _split(function.apply(at.repeated(batch_size), x, grad), 0, batch_size), 0

    return make_function(
        "ConvToWeight", 3, forward=forward, backward=backward, jvp=jvp, vmap=vmap, keep_outputs=()
    )


def _vmap_samples(
    function: type[torch.autograd.Function],
    batch_size: int,
    dim: int | None,
    at: _Geometry,
    samples: Tensor,
    *rest: Tensor | None,
) -> tuple[Tensor, int]:
    """Where all share a weight, the batch of vmap is only more samples."""
    merged = _into(_to_front(samples, dim, batch_size), 0)
    return _split(function.apply(at, merged, *rest), 0, batch_size), 0


def _to_front(tensor: Tensor, dim: int | None, batch_size: int) -> Tensor:
    return tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _into(tensor: Tensor, dim: int) -> Tensor:
    """The first dimension as the outer part of another one."""
    return tensor.movedim(0, dim).flatten(dim, dim + 1)


def _split(tensor: Tensor, dim: int, batch_size: int) -> Tensor:
    """Back again: the outer part of a dimension as one of its own, before it."""
    size = tensor.shape[dim] // batch_size
    return tensor.unflatten(dim, (batch_size, size))


def _total(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


_CONV = _make_conv()
_TO_X = _make_to_x()
_TO_WEIGHT = _make_to_weight()


def _tuple(what: str, value: Any, rank: int, minimum: int) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        return (validation.at_least(what, value, minimum),) * rank
    if len(value) not in (1, rank):
        raise ArgumentValueError(
            f"{what}: expected a whole number or {rank} of them, got {tuple(value)}."
        )
    numbers = tuple(validation.at_least(f"{what}[{i}]", n, minimum) for i, n in enumerate(value))
    return numbers * rank if len(numbers) == 1 else numbers


def _pads(
    padding: Any, stride: tuple[int, ...], dilation: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Zeros on both sides of each dimension, and more of them at its end."""
    none = (0,) * len(kernel)
    if not isinstance(padding, str):
        return _tuple("padding", padding, len(kernel), 0), none
    if validation.one_of("padding", padding, ["same", "valid"]) == "valid":
        return none, none
    if any(step != 1 for step in stride):
        raise ArgumentValueError(
            f"padding: expected a number with stride {stride}, got 'same', which needs stride 1."
        )
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return tuple(n // 2 for n in totals), tuple(n % 2 for n in totals)


def _check_tensors(
    name: str, rank: int, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int
) -> None:
    validation.differentiable("x", x)
    validation.differentiable("weight", weight)
    if bias is not None:
        validation.differentiable("bias", bias)
    fits = (
        x.dim() in (rank + 1, rank + 2)
        and weight.dim() == rank + 2
        and x.shape[-rank - 1] == weight.shape[1] * groups
        and weight.shape[0] % groups == 0
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        sizes = ("L", "H, W", "D, H, W")[rank - 1]
        got = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        got += "" if bias is None else f", bias {tuple(bias.shape)}"
        raise ArgumentValueError(
            f"{name}: expected x [N, C, {sizes}] or [C, {sizes}], weight [O, C / groups, one size a "
            f"dimension] with O a multiple of groups, and bias [O] or None, got {got} and "
            f"groups={groups}."
        )
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(x.device.type):
        raise ArgumentTypeError(
            f"{name}: expected x, weight and bias of one dtype, got x {x.dtype}, weight "
            f"{weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}") + "; convert one."
        )


def _check_fit(name: str, at: _Geometry) -> None:
    for size, pad, dilation, kernel in zip(
        at.image, at.padding, at.dilation, at.kernel, strict=True
    ):
        if kernel < 1 or size + 2 * pad < dilation * (kernel - 1) + 1:
            raise ArgumentValueError(
                f"{name}: expected a kernel that fits into the padded input, got sizes "
                f"{at.image} padded by {at.padding}, kernel {at.kernel} and dilation {at.dilation}; "
                f"add padding, or use a smaller kernel."
            )
