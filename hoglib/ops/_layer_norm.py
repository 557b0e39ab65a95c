"""Layer norm by torch's fused kernels, right at every order of reverse mode.

As `_fused_batch_norm`, for rows of n values: d = x - mean(x), r = (mean(d^2) + eps)^(-1/2), h = d r,
P u = r (u - mean(u) - h mean(u h)). A weight has an element for each of the n, G = w g:

    y  = w h + b
    dx = P G        dw = sum(g h) over rows        db = sum(g) over rows             for g by y
    Dw = sum(g P v) over rows        Dg = w P v + a h + c                for v, a, c by dx, dw, db
    Dx = P(a g - k sum(v h) G - k sum(G h) v) - k sum(G P v) h        k = r / n
"""

from collections.abc import Callable, Sequence
from math import nan, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import autocast_on
from hoglib._core.torch_errors import Refused
from hoglib._core.torch_modes import plain_reverse_mode, without_stand_ins
from hoglib.errors import ArgumentTypeError
from hoglib.ops._normalization import (
    affine,
    can_fuse,
    fused,
    moments,
    same_dtype,
    scaled,
    upcast,
    upcast_dtype,
)

Parameter = Tensor | None


def normalised(
    x: Tensor, shape: tuple[int, ...], weight: Parameter, bias: Parameter, eps: float
) -> Tensor:
    """Standardised along the last dimensions. Where `plain()`, for an eps above 0."""
    y: Tensor = _Forward.apply(x, weight, bias, shape, eps)
    return y


class _Forward(torch.autograd.Function):
    watched = False
    part_of_an_op = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter, shape: tuple[int, ...], eps: float
    ) -> Tensor:
        with without_stand_ins():
            y, mean, r = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.shape, ctx.eps = shape, eps
        ctx.save_for_backward(x, weight, bias, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, r = ctx.saved_tensors
        needed, shape = ctx.needs_input_grad, ctx.shape
        with without_stand_ins():
            if not plain_reverse_mode():
                dx, dw, db = _first(g, x, weight, shape, ctx.eps)
            elif torch.is_grad_enabled():
                dx, dw, db = _Backward.apply(g, x, weight, bias, mean, r, shape, ctx.eps)
            else:
                return *_kernel(g, x, weight, bias, mean, r, shape, needed[:3]), None, None
        return (
            dx if needed[0] else None,
            dw if needed[1] else None,
            db if needed[2] else None,
            None,
            None,
        )


class _Backward(torch.autograd.Function):
    watched = False
    part_of_an_op = True

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Parameter, bias: Parameter, mean: Tensor, r: Tensor,
        shape: tuple[int, ...], eps: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        ctx.shape, ctx.eps = shape, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight, mean, r)
        wanted = (True, weight is not None, bias is not None)
        return _kernel(g, x, weight, bias, mean, r, shape, wanted)

    @staticmethod
    def backward(ctx: Any, v: Parameter, a: Parameter, c: Parameter) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, r = ctx.saved_tensors
        with without_stand_ins():
            v = torch.zeros_like(x) if v is None else v
            by: _Kernels | _Composite
            if torch.is_grad_enabled() or not plain_reverse_mode():
                by = _Composite(x, ctx.shape, ctx.eps)
            else:
                by = _Kernels(x, mean, r, ctx.shape)
            return *_second(v, a, c, g, weight, by, ctx.needs_input_grad), *(None,) * 5


def _kernel(
    g: Tensor, x: Tensor, weight: Parameter, bias: Parameter, mean: Tensor, r: Tensor,
    shape: tuple[int, ...], wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, dw and db; those that are not wanted are None."""
    kernel = torch.ops.aten.native_layer_norm_backward.default
    found: tuple[Tensor, Tensor | None, Tensor | None]
    found = kernel(g, x, shape, mean, r, weight, bias, wanted)
    return found


class _Kernels:
    """h, r and P by the kernels, for a pass that is not differentiated."""

    def __init__(self, x: Tensor, mean: Tensor, r: Tensor, shape: tuple[int, ...]) -> None:
        self.x, self.mean, self.r, self.shape = x, mean, r, shape
        self.h = (x - mean).mul_(r)

    def projected(self, u: Tensor) -> Tensor:
        wanted = (True, False, False)
        return _kernel(u, self.x, None, None, self.mean, self.r, self.shape, wanted)[0]


class _Composite:
    """The same in torch's operations, which can be differentiated."""

    def __init__(self, x: Tensor, shape: tuple[int, ...], eps: float) -> None:
        self.shape, self.dims = shape, tuple(range(-len(shape), 0))
        d, var = moments(x, self.dims)
        self.r = (var + eps).rsqrt()
        self.h = d * self.r

    def projected(self, u: Tensor) -> Tensor:
        centered = u - u.mean(self.dims, keepdim=True)
        return (centered - self.h * (centered * self.h).mean(self.dims, keepdim=True)) * self.r


def _plus(y: Tensor, term: Tensor, factor: Tensor, value: float = 1.0) -> Tensor:
    # not in place: a vmap around the backward, of the old kind too, may batch the factor alone
    return torch.addcmul(y, term, factor, value=value)


def _first(
    g: Tensor, x: Tensor, weight: Parameter, shape: tuple[int, ...], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db."""
    by = _Composite(x, shape, eps)
    dx = by.projected(g if weight is None else g * weight)
    return dx, _over_rows(g * by.h, shape), _over_rows(g, shape)


def _second(
    v: Tensor, a: Parameter, c: Parameter, g: Tensor, weight: Parameter, by: _Kernels | _Composite,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Dg, Dx and Dw."""
    p = by.projected(v)
    dg = dx = dw = None
    if needed[2] or needed[1]:
        gp = g * p
        dw = _over_rows(gp, by.shape) if needed[2] else None
    if needed[1]:
        dims = tuple(range(-len(by.shape), 0))
        k = by.r * (-1 / torch.Size(by.shape).numel())
        scaled = g if weight is None else g * weight
        vh = (v * by.h).sum(dims, keepdim=True)
        gh = (scaled * by.h).sum(dims, keepdim=True)
        q = (gp if weight is None else gp * weight).sum(dims, keepdim=True)
        u = _plus(scaled * (k * vh), v, k * gh)
        u = u if a is None else _plus(u, g, a)
        dx = _plus(by.projected(u), by.h, k * q)
    if needed[0]:
        dg = p if weight is None else p * weight
        dg = dg if a is None else _plus(dg, by.h, a)
        dg = dg if c is None else dg + c
    return dg, dx, dw


def _over_rows(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Summed over all but the last dimensions."""
    rows = tuple(range(value.dim() - len(shape)))
    return value.sum(rows) if rows else value


# === Layer norm, right in every mode and at every order.


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Layer norm over the last dimensions, as `torch.nn.functional.layer_norm`.

        d = x - mean(x)        y = d / sqrt(mean(d^2) + eps) * weight + bias

    Shapes: input [..., *normalized_shape]; weight and bias normalized_shape or None; y like input.
    Half precision is computed in float32, and may have float32 parameters. Where the variance is 0
    and eps too, y is NaN, as torch's is, and its derivative 0. To any order, in every mode, under vmap.
    Raises TypeError for an integer or complex input, or a normalized_shape that is no tuple or list;
    RuntimeError for shapes and dtypes that do not fit.
    Ba, Kiros & Hinton, Layer Normalization, 2016.
    """
    validation.real("input", input)
    shape = _shape(input, normalized_shape)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and tuple(value.shape) != shape:
            raise Refused(
                f"{name}: expected normalized_shape {shape}, got {validation.describe(value)}."
            )
    dtype = input.dtype
    # on a GPU autocast runs it in float32, and its result stays so; on a CPU it leaves it alone
    if input.device.type != "cpu" and autocast_on(input.device.type):
        dtype = upcast_dtype(dtype)
    else:
        same_dtype(input, weight=weight, bias=bias)
    inner = upcast_dtype(dtype)
    x = input.to(inner)
    if can_fuse(x, eps) and plain_reverse_mode():
        scale, shift = upcast(weight, inner), upcast(bias, inner)
        y = normalised(x, shape, scale, shift, eps)
        return y if y.dtype == dtype else y.to(dtype)
    if can_fuse(x, eps):
        y = fused(x.reshape(1, -1, prod(shape)), None, None, eps).reshape(x.shape)
    else:
        y = scaled(*moments(x, tuple(range(-len(shape), 0))), None, eps, nan)
    return affine(y, upcast(weight, inner), upcast(bias, inner)).to(dtype)


def _shape(input: Tensor, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list):
        raise ArgumentTypeError(
            f"normalized_shape: expected a tuple of whole numbers, got {validation.describe(shape)}; "
            "write `(n,)`."
        )
    result = tuple(shape)
    if not result or tuple(input.shape[-len(result) :]) != result:
        raise Refused(
            f"normalized_shape: expected the last dimensions of the input, at least one, got "
            f"{list(result)}; the input has shape {tuple(input.shape)}."
        )
    return result


def _torch_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return layer_norm(input, normalized_shape, weight, bias, eps)


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: _torch_layer_norm,
}
