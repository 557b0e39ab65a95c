"""Batch and layer norm by torch's fused kernels, right at every order of reverse mode.

torch's own double backward takes the mean and r for constants, so its third derivatives are wrong.
Here the backward is a Function of its own, and the derivative of that one is written out. For n values
with d = x - mean(x), r = (mean(d^2) + eps)^(-1/2), h = d r, the projection, which is symmetric, is

    P u = r (u - mean(u) - h mean(u h))

Batch norm, for each channel of n values, with one weight and bias, and k = w r / n:

    y  = w h + b
    dx = w P g        dw = sum(g h)        db = sum(g)                             for g by y
    Dw = sum(g P v)        Dg = w P v + a h + c                          for v, a, c by dx, dw, db
    Dx = P((a - k sum(v h)) g - k sum(g h) v) - k Dw h

Layer norm, for each row of n values, with n weights and biases, G = w g and k = r / n:

    y  = w h + b
    dx = P G        dw = sum(g h) over rows        db = sum(g) over rows             for g by y
    Dw = sum(g P v) over rows        Dg = w P v + a h + c                for v, a, c by dx, dw, db
    Dx = P(a g - k sum(v h) G - k sum(G h) v) - k sum(G P v) h

A pass that is not differentiated again runs torch's kernel of the first backward, which gives P u (and
for batch norm sum(u h) with it); any other runs the same in torch's operations.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib._core.torch_modes import plain_reverse_mode, without_stand_ins
from hoglib.ops._normalization import moments
from hoglib.ops._running_statistics import RunningStatistics

Parameter = Tensor | None


def fused_batch_norm(
    x: Tensor, weight: Parameter, bias: Parameter, statistics: RunningStatistics, eps: float
) -> Tensor:
    """Standardised by channels, the running statistics updated; in plain reverse mode, for eps > 0."""
    y: Tensor = FusedBatchNorm.apply(x, weight, bias, statistics, eps)
    return y


def fused_layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Parameter, bias: Parameter, eps: float
) -> Tensor:
    """Standardised along the last dimensions; in plain reverse mode, for eps > 0."""
    y: Tensor = FusedLayerNorm.apply(x, weight, bias, shape, eps)
    return y


class FusedBatchNorm(torch.autograd.Function):
    runs_user_code = False
    part_of_an_op = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter,
        statistics: RunningStatistics,
        eps: float,
    ) -> Tensor:
        with without_stand_ins():
            y, mean, r = _batch_kernel(x, weight, bias, statistics, eps)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, r = ctx.saved_tensors
        needs, eps = ctx.needs_input_grad, ctx.eps
        with without_stand_ins():
            if not plain_reverse_mode():
                dx, dw, db = _batch_backward(g, x, weight, eps)
            elif torch.is_grad_enabled():
                dx, dw, db = FusedBatchNormGradient.apply(g, x, weight, mean, r, eps)
            else:
                return *_batch_kernel_backward(g, x, weight, mean, r, eps, needs[:3]), None, None
        return *_needed(needs, dx, dw, db), None, None


def _needed(needs: Sequence[bool], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(grad if need else None for need, grad in zip(needs, grads, strict=False))


class FusedBatchNormGradient(torch.autograd.Function):
    runs_user_code = False
    part_of_an_op = True

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Parameter, mean: Tensor, r: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx, dw, db = _batch_kernel_backward(g, x, weight, mean, r, eps, (True, True, True))
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight, mean, r, dw)
        return dx, dw, db

    @staticmethod
    def backward(ctx: Any, v: Parameter, a: Parameter, c: Parameter) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, r, gh = ctx.saved_tensors
        needs, eps = ctx.needs_input_grad[:3], ctx.eps
        with without_stand_ins():
            v = torch.zeros_like(x) if v is None else v
            by: _BatchKernels | _BatchComposite
            if torch.is_grad_enabled() or not plain_reverse_mode():
                by, gh = _BatchComposite(x, eps), None  # gh would be a constant there
            else:
                by = _BatchKernels(x, mean, r, eps)
            return *_batch_double_backward(v, a, c, g, weight, by, gh, needs), *(None,) * 3


def _batch_kernel(
    x: Tensor, weight: Parameter, bias: Parameter, statistics: RunningStatistics, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and r."""
    if x.device.type != "cpu" or x.dim() == 2 or x.numel() < 2**13:
        running = [value for value in statistics[:2] if value is not None]
        if any(value.dtype != x.dtype or value.dim() != 1 for value in running):
            statistics.update(x, _channel_dims(x))
            statistics = RunningStatistics(None, None, 0.0)
        return torch.native_batch_norm(
            x, weight, bias, statistics.mean, statistics.var, True, statistics.momentum, eps
        )
    # its statistics of images take several times as long as these
    dims = _channel_dims(x)
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square_().mean(dims)
    mean = mean.view(-1)
    statistics.move_toward(mean, var, x.numel() // x.shape[1])
    y = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
    return y, mean, (var + eps).rsqrt_()


def _batch_kernel_backward(
    g: Tensor, x: Tensor, weight: Parameter, mean: Tensor, r: Tensor, eps: float,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw and db; None where the mask is False."""
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward.default(
        g, x, weight, None, None, mean, r, True, eps, output_mask
    )
    return grads


class _BatchKernels:
    """h, r and P by the kernels, for a pass that is not differentiated."""

    def __init__(self, x: Tensor, mean: Tensor, r: Tensor, eps: float) -> None:
        self.x, self.mean, self.r, self.eps = x, mean, r, eps
        self.h = (x - _along_channels(mean, x)).mul_(_along_channels(r, x))

    def project(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """P u and sum(u h)."""
        output_mask = (True, True, False)
        return _batch_kernel_backward(u, self.x, None, self.mean, self.r, self.eps, output_mask)[:2]


class _BatchComposite:
    """The same in torch's operations, which can be differentiated."""

    def __init__(self, x: Tensor, eps: float) -> None:
        self.dims = _channel_dims(x)
        d, var = moments(x, self.dims)
        r = (var + eps).rsqrt()
        self.h, self.r = d * r, r.view(-1)

    def project(self, u: Tensor) -> tuple[Tensor, Tensor]:
        centered = u - u.mean(self.dims, keepdim=True)
        uh = centered * self.h
        p = centered - self.h * uh.mean(self.dims, keepdim=True)
        return p * _along_channels(self.r, u), uh.sum(self.dims)


def _batch_backward(
    g: Tensor, x: Tensor, weight: Parameter, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db."""
    p, gh = _BatchComposite(x, eps).project(g)
    return p if weight is None else p * _along_channels(weight, g), gh, g.sum(_channel_dims(x))


def _batch_double_backward(
    v: Tensor, a: Parameter, c: Parameter, g: Tensor, weight: Parameter,
    by: _BatchKernels | _BatchComposite, gh: Parameter, needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Dg, Dx and Dw."""
    n = v.numel() // v.shape[1]
    k = by.r if weight is None else by.r * weight  # times n
    p, vh = by.project(v)
    dw = (p * g).sum(_channel_dims(v))
    dg = dx = None
    if needs[0]:
        dg = p if weight is None else p * _along_channels(weight, p)
        dg = dg if a is None else _plus_by_channel(dg, by.h, a)
        dg = dg if c is None else dg + _along_channels(c, dg)
    if needs[1]:
        gh = (g * by.h).sum(_channel_dims(v)) if gh is None else gh
        factor = k * vh * (-1 / n) if a is None else torch.addcmul(a, k, vh, value=-1 / n)
        u = _plus_by_channel(g * _along_channels(factor, g), v, k * gh, -1 / n)
        dx = _plus_by_channel(by.project(u)[0], by.h, k * dw, -1 / n)
    return dg, dx, dw if needs[2] else None


def _plus_by_channel(y: Tensor, term: Tensor, factor: Tensor, value: float = 1.0) -> Tensor:
    return _plus(y, term, _along_channels(factor, y), value)


def _along_channels(value: Tensor, x: Tensor) -> Tensor:
    """One element for each channel of x, so that it broadcasts."""
    return value if x.dim() == 2 else value.view(-1, *[1] * (x.dim() - 2))


def _channel_dims(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


class FusedLayerNorm(torch.autograd.Function):
    runs_user_code = False
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
        needs, shape = ctx.needs_input_grad, ctx.shape
        with without_stand_ins():
            if not plain_reverse_mode():
                dx, dw, db = _layer_backward(g, x, weight, shape, ctx.eps)
            elif torch.is_grad_enabled():
                dx, dw, db = FusedLayerNormGradient.apply(
                    g, x, weight, bias, mean, r, shape, ctx.eps
                )
            else:
                return (
                    *_layer_kernel_backward(g, x, weight, bias, mean, r, shape, needs[:3]),
                    None,
                    None,
                )
        return *_needed(needs, dx, dw, db), None, None


class FusedLayerNormGradient(torch.autograd.Function):
    runs_user_code = False
    part_of_an_op = True

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Parameter, bias: Parameter, mean: Tensor, r: Tensor,
        shape: tuple[int, ...], eps: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        ctx.shape, ctx.eps = shape, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight, mean, r)
        output_mask = (True, weight is not None, bias is not None)
        return _layer_kernel_backward(g, x, weight, bias, mean, r, shape, output_mask)

    @staticmethod
    def backward(ctx: Any, v: Parameter, a: Parameter, c: Parameter) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, r = ctx.saved_tensors
        with without_stand_ins():
            v = torch.zeros_like(x) if v is None else v
            by: _LayerKernels | _LayerComposite
            if torch.is_grad_enabled() or not plain_reverse_mode():
                by = _LayerComposite(x, ctx.shape, ctx.eps)
            else:
                by = _LayerKernels(x, mean, r, ctx.shape)
            return *_layer_double_backward(v, a, c, g, weight, by, ctx.needs_input_grad), *(
                None,
            ) * 5


def _layer_kernel_backward(
    g: Tensor, x: Tensor, weight: Parameter, bias: Parameter, mean: Tensor, r: Tensor,
    shape: tuple[int, ...], output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, dw and db; None where the mask is False."""
    grads: tuple[Tensor, Tensor | None, Tensor | None]
    grads = torch.ops.aten.native_layer_norm_backward.default(
        g, x, shape, mean, r, weight, bias, output_mask
    )
    return grads


class _LayerKernels:
    """h, r and P by the kernels, for a pass that is not differentiated."""

    def __init__(self, x: Tensor, mean: Tensor, r: Tensor, shape: tuple[int, ...]) -> None:
        self.x, self.mean, self.r, self.shape = x, mean, r, shape
        self.h = (x - mean).mul_(r)

    def project(self, u: Tensor) -> Tensor:
        output_mask = (True, False, False)
        return _layer_kernel_backward(
            u, self.x, None, None, self.mean, self.r, self.shape, output_mask
        )[0]


class _LayerComposite:
    """The same in torch's operations, which can be differentiated."""

    def __init__(self, x: Tensor, shape: tuple[int, ...], eps: float) -> None:
        self.shape, self.dims = shape, tuple(range(-len(shape), 0))
        d, var = moments(x, self.dims)
        self.r = (var + eps).rsqrt()
        self.h = d * self.r

    def project(self, u: Tensor) -> Tensor:
        centered = u - u.mean(self.dims, keepdim=True)
        return (centered - self.h * (centered * self.h).mean(self.dims, keepdim=True)) * self.r


def _layer_backward(
    g: Tensor, x: Tensor, weight: Parameter, shape: tuple[int, ...], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db."""
    by = _LayerComposite(x, shape, eps)
    dx = by.project(g if weight is None else g * weight)
    return dx, _sum_over_rows(g * by.h, shape), _sum_over_rows(g, shape)


def _layer_double_backward(
    v: Tensor, a: Parameter, c: Parameter, g: Tensor, weight: Parameter,
    by: _LayerKernels | _LayerComposite, needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Dg, Dx and Dw."""
    p = by.project(v)
    dg = dx = dw = None
    if needs[2] or needs[1]:
        gp = g * p
        dw = _sum_over_rows(gp, by.shape) if needs[2] else None
    if needs[1]:
        dims = tuple(range(-len(by.shape), 0))
        k = by.r * (-1 / torch.Size(by.shape).numel())
        scaled = g if weight is None else g * weight
        vh = (v * by.h).sum(dims, keepdim=True)
        gh = (scaled * by.h).sum(dims, keepdim=True)
        q = (gp if weight is None else gp * weight).sum(dims, keepdim=True)
        u = _plus(scaled * (k * vh), v, k * gh)
        u = u if a is None else _plus(u, g, a)
        dx = _plus(by.project(u), by.h, k * q)
    if needs[0]:
        dg = p if weight is None else p * weight
        dg = dg if a is None else _plus(dg, by.h, a)
        dg = dg if c is None else dg + c
    return dg, dx, dw


def _sum_over_rows(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Summed over all but the last dimensions."""
    rows = tuple(range(value.dim() - len(shape)))
    return value.sum(rows) if rows else value


def _plus(y: Tensor, term: Tensor, factor: Tensor, value: float = 1.0) -> Tensor:
    # not in place: a vmap around the backward, of the old kind too, may batch the factor alone
    return torch.addcmul(y, term, factor, value=value)
