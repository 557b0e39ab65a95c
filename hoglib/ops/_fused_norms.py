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

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hoglib._core.torch_modes import plain_reverse_mode, without_stand_ins
from hoglib.ops._normalization import moments
from hoglib.ops._running_statistics import RunningStatistics

Parameter = Tensor | None
Mask = tuple[bool, bool, bool]


def fused_batch_norm(
    x: Tensor, weight: Parameter, bias: Parameter, statistics: RunningStatistics, eps: float
) -> Tensor:
    """Standardised by channels, the running statistics updated; in plain reverse mode, for eps > 0."""
    y: Tensor = FusedNorm.apply(x, weight, bias, _BatchNorm(statistics, eps))
    return y


def fused_layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Parameter, bias: Parameter, eps: float
) -> Tensor:
    """Standardised along the last dimensions; in plain reverse mode, for eps > 0."""
    y: Tensor = FusedNorm.apply(x, weight, bias, _LayerNorm(shape, eps))
    return y


class FusedNorm(torch.autograd.Function):
    runs_user_code = False
    part_of_an_op = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter, norm: "_BatchNorm | _LayerNorm"
    ) -> Tensor:
        with without_stand_ins():
            y, mean, r = norm.kernel(x, weight, bias)
        ctx.norm = norm
        ctx.save_for_backward(x, weight, bias if norm.reads_bias else None, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, r = ctx.saved_tensors
        needs, norm = ctx.needs_input_grad[:3], ctx.norm
        with without_stand_ins():
            if not plain_reverse_mode():
                grads = norm.gradients(g, x, weight)
            elif torch.is_grad_enabled():
                grads = FusedNormGradient.apply(g, x, weight, bias, mean, r, norm)
            else:
                return *norm.kernel_gradients(g, x, weight, bias, mean, r, needs), None
        pairs = zip(needs, grads, strict=True)
        return *(grad if need else None for need, grad in pairs), None


class FusedNormGradient(torch.autograd.Function):
    runs_user_code = False
    part_of_an_op = True

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Parameter, bias: Parameter, mean: Tensor, r: Tensor,
        norm: "_BatchNorm | _LayerNorm",
    ) -> tuple[Tensor, Parameter, Parameter]:  # fmt: skip
        dx, dw, db = norm.kernel_gradients(g, x, weight, bias, mean, r, (True, True, True))
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight, mean, r, dw if norm.reads_dw else None)
        return dx, dw, db

    @staticmethod
    def backward(ctx: Any, v: Parameter, a: Parameter, c: Parameter) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, r, gh = ctx.saved_tensors
        with without_stand_ins():
            v = torch.zeros_like(x) if v is None else v
            by: _Kernels | _Composite
            if torch.is_grad_enabled() or not plain_reverse_mode():
                by, gh = _Composite(x, ctx.norm), None  # gh would be a constant there
            else:
                by = _Kernels(x, mean, r, ctx.norm)
            found = ctx.norm.double_backward(v, a, c, g, weight, by, gh, ctx.needs_input_grad)
            return *found, *(None,) * 4


class _Kernels:
    """h, r and P by the kernels, for a pass that is not differentiated."""

    def __init__(self, x: Tensor, mean: Tensor, r: Tensor, norm: "_BatchNorm | _LayerNorm") -> None:
        self.x, self.mean, self.r, self.norm = x, mean, r, norm
        self.h = (x - norm.along(mean, x)).mul_(norm.along(r, x))

    def project(self, u: Tensor) -> tuple[Tensor, Parameter]:
        """P u, and for batch norm sum(u h)."""
        given = u, self.x, None, None, self.mean, self.r, (True, True, False)
        return self.norm.kernel_gradients(*given)[:2]


class _Composite:
    """The same in torch's operations, which can be differentiated."""

    def __init__(self, x: Tensor, norm: "_BatchNorm | _LayerNorm") -> None:
        self.dims = norm.dims(x)
        d, var = moments(x, self.dims)
        self.r = (var + norm.eps).rsqrt()
        self.h = d * self.r

    def project(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """P u and sum(u h)."""
        centered = u - u.mean(self.dims, keepdim=True)
        uh = (centered * self.h).sum(self.dims, keepdim=True)
        return (centered - self.h * (uh * (uh.numel() / u.numel()))) * self.r, uh


@dataclass
class _BatchNorm:
    statistics: RunningStatistics
    eps: float
    reads_bias: ClassVar[bool] = False  # in a backward
    reads_dw: ClassVar[bool] = True

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return (0, *range(2, x.dim()))

    def along(self, value: Tensor, x: Tensor) -> Tensor:
        """One element for each channel of x, so that it broadcasts."""
        return value if x.dim() == 2 else value.view(-1, *[1] * (x.dim() - 2))

    def kernel(
        self, x: Tensor, weight: Parameter, bias: Parameter
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y, mean and r."""
        statistics, eps, dims = self.statistics, self.eps, self.dims(x)
        if x.device.type != "cpu" or x.dim() == 2 or x.numel() < 2**13:
            running = [value for value in statistics[:2] if value is not None]
            if any(value.dtype != x.dtype or value.dim() != 1 for value in running):
                statistics.update(x, dims)
                statistics = RunningStatistics(None, None, 0.0)
            return torch.native_batch_norm(
                x, weight, bias, statistics.mean, statistics.var, True, statistics.momentum, eps
            )
        # its statistics of images take several times as long as these
        mean = x.mean(dims, keepdim=True)
        var = (x - mean).square_().mean(dims)
        mean = mean.view(-1)
        statistics.move_toward(mean, var, x.numel() // x.shape[1])
        y = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
        return y, mean, (var + eps).rsqrt_()

    def kernel_gradients(
        self, g: Tensor, x: Tensor, weight: Parameter, bias: Parameter, mean: Tensor, r: Tensor,
        mask: Mask,
    ) -> tuple[Tensor, Parameter, Parameter]:  # fmt: skip
        """dx, dw and db; None where the mask is False."""
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward.default(
            g, x, weight, None, None, mean, r, True, self.eps, mask
        )
        return grads

    def gradients(self, g: Tensor, x: Tensor, weight: Parameter) -> tuple[Tensor, Tensor, Tensor]:
        """dx, dw and db."""
        p, gh = _Composite(x, self).project(g)
        dx = p if weight is None else p * self.along(weight, g)
        return dx, gh.view(-1), g.sum(self.dims(g))

    def double_backward(
        self, v: Tensor, a: Parameter, c: Parameter, g: Tensor, weight: Parameter,
        by: _Kernels | _Composite, gh: Parameter, needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Dg, Dx and Dw."""
        n = v.numel() // v.shape[1]
        r = by.r.view(-1)
        k = r if weight is None else r * weight  # times n
        p, sums = by.project(v)
        assert sums is not None
        vh = sums.view(-1)
        dw = (p * g).sum(self.dims(v))
        dg = dx = None
        if needs[0]:
            dg = p if weight is None else p * self.along(weight, p)
            dg = dg if a is None else _plus(dg, by.h, self.along(a, dg))
            dg = dg if c is None else dg + self.along(c, dg)
        if needs[1]:
            gh = (g * by.h).sum(self.dims(v)) if gh is None else gh
            factor = k * vh * (-1 / n) if a is None else torch.addcmul(a, k, vh, value=-1 / n)
            u = _plus(g * self.along(factor, g), v, self.along(k * gh, v), -1 / n)
            dx = _plus(by.project(u)[0], by.h, self.along(k * dw, v), -1 / n)
        return dg, dx, dw if needs[2] else None


@dataclass
class _LayerNorm:
    shape: tuple[int, ...]
    eps: float
    reads_bias: ClassVar[bool] = True
    reads_dw: ClassVar[bool] = False

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return tuple(range(-len(self.shape), 0))

    def along(self, value: Tensor, x: Tensor) -> Tensor:
        return value

    def kernel(
        self, x: Tensor, weight: Parameter, bias: Parameter
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y, mean and r."""
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def kernel_gradients(
        self, g: Tensor, x: Tensor, weight: Parameter, bias: Parameter, mean: Tensor, r: Tensor,
        mask: Mask,
    ) -> tuple[Tensor, Parameter, Parameter]:  # fmt: skip
        """dx, dw and db; None where the mask is False, or where there is no parameter."""
        wanted = mask[0], mask[1] and weight is not None, mask[2] and bias is not None
        grads: tuple[Tensor, Parameter, Parameter]
        grads = torch.ops.aten.native_layer_norm_backward.default(
            g, x, self.shape, mean, r, weight, bias, wanted
        )
        return grads

    def gradients(self, g: Tensor, x: Tensor, weight: Parameter) -> tuple[Tensor, Tensor, Tensor]:
        """dx, dw and db."""
        by = _Composite(x, self)
        dx = by.project(g if weight is None else g * weight)[0]
        return dx, self._sum_over_rows(g * by.h), self._sum_over_rows(g)

    def double_backward(
        self, v: Tensor, a: Parameter, c: Parameter, g: Tensor, weight: Parameter,
        by: _Kernels | _Composite, gh: Parameter, needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Dg, Dx and Dw."""
        p = by.project(v)[0]
        dg = dx = dw = None
        if needs[2] or needs[1]:
            gp = g * p
            dw = self._sum_over_rows(gp) if needs[2] else None
        if needs[1]:
            dims = self.dims(v)
            k = by.r * (-1 / torch.Size(self.shape).numel())
            scaled = g if weight is None else g * weight
            vh = (v * by.h).sum(dims, keepdim=True)
            gh = (scaled * by.h).sum(dims, keepdim=True)
            q = (gp if weight is None else gp * weight).sum(dims, keepdim=True)
            u = _plus(scaled * (k * vh), v, k * gh)
            u = u if a is None else _plus(u, g, a)
            dx = _plus(by.project(u)[0], by.h, k * q)
        if needs[0]:
            dg = p if weight is None else p * weight
            dg = dg if a is None else _plus(dg, by.h, a)
            dg = dg if c is None else dg + c
        return dg, dx, dw

    def _sum_over_rows(self, value: Tensor) -> Tensor:
        """Summed over all but the last dimensions."""
        rows = tuple(range(value.dim() - len(self.shape)))
        return value.sum(rows) if rows else value


def _plus(y: Tensor, term: Tensor, factor: Tensor, value: float = 1.0) -> Tensor:
    # not in place: a vmap around the backward, of the old kind too, may batch the factor alone
    return torch.addcmul(y, term, factor, value=value)
