"""Batch norm by torch's fused kernels, right at every order of reverse mode.

torch's own double backward takes the mean and r for constants, so its third derivatives are wrong. Here
the backward is a Function of its own, and the derivative of that one is written out. For a channel of n
values, d = x - mean(x), r = (mean(d^2) + eps)^(-1/2), h = d r, P u = r (u - mean(u) - h mean(u h)):

    y  = w h + b
    dx = w P g        dw = sum(g h)        db = sum(g)                             for g by y
    Dw = sum(g P v)        Dg = w P v + a h + c                          for v, a, c by dx, dw, db
    Dx = P((a - k sum(v h)) g - k sum(g h) v) - k Dw h        k = w r / n

for P is symmetric. The kernel of the first backward gives P u and sum(u h) at once.
"""

from typing import Any

import torch
from torch import Tensor

from hoglib.ops._modes import aside, plain
from hoglib.ops._running import Statistics, move, update
from hoglib.ops._standardise import moments

Parameter = Tensor | None


def normalised(
    x: Tensor, weight: Parameter, bias: Parameter, statistics: Statistics, eps: float
) -> Tensor:
    """Standardised by channels, the running statistics moved. Where `plain()`, for an eps above 0."""
    y: Tensor = _Forward.apply(x, weight, bias, statistics, eps)
    return y


class _Forward(torch.autograd.Function):
    watched = False
    part_of_an_op = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter, statistics: Statistics, eps: float
    ) -> Tensor:
        with aside():
            y, mean, r = _kernel(x, weight, bias, statistics, eps)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, r = ctx.saved_tensors
        needed, eps = ctx.needs_input_grad, ctx.eps
        with aside():
            if not plain():
                dx, dw, db = _first(g, x, weight, eps)
            elif torch.is_grad_enabled():
                dx, dw, db = _Backward.apply(g, x, weight, mean, r, eps)
            else:
                return *_backward_kernel(g, x, weight, mean, r, eps, needed[:3]), None, None
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
        ctx: Any, g: Tensor, x: Tensor, weight: Parameter, mean: Tensor, r: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx, dw, db = _backward_kernel(g, x, weight, mean, r, eps, (True, True, True))
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight, mean, r, dw)
        return dx, dw, db

    @staticmethod
    def backward(ctx: Any, v: Parameter, a: Parameter, c: Parameter) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, r, gh = ctx.saved_tensors
        needed, eps = ctx.needs_input_grad[:3], ctx.eps
        with aside():
            v = torch.zeros_like(x) if v is None else v
            if torch.is_grad_enabled() or not plain():
                return *_second(v, a, c, g, weight, _Composite(x, eps), None, needed), *(None,) * 3
            return *_second(v, a, c, g, weight, _Kernels(x, mean, r, eps), gh, needed), *(None,) * 3


def _kernel(
    x: Tensor, weight: Parameter, bias: Parameter, statistics: Statistics, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and r."""
    if x.device.type != "cpu" or x.dim() == 2 or x.numel() < 2**13:
        taken = [value for value in statistics[:2] if value is not None]
        if any(value.dtype != x.dtype or value.dim() != 1 for value in taken):
            update(x, _over(x), statistics)
            statistics = Statistics(None, None, 0.0)
        return torch.native_batch_norm(
            x, weight, bias, statistics.mean, statistics.var, True, statistics.momentum, eps
        )
    # its statistics of images take several times as long as these
    dims = _over(x)
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square_().mean(dims)
    mean = mean.view(-1)
    move(statistics, mean, var, x.numel() // x.shape[1])
    y = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
    return y, mean, (var + eps).rsqrt_()


def _backward_kernel(
    g: Tensor, x: Tensor, weight: Parameter, mean: Tensor, r: Tensor, eps: float,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw and db; those that are not wanted are None."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward.default(
        g, x, weight, None, None, mean, r, True, eps, wanted
    )
    return found


class _Kernels:
    """h, r and P by the kernels, for a pass that is not differentiated."""

    def __init__(self, x: Tensor, mean: Tensor, r: Tensor, eps: float) -> None:
        self.x, self.mean, self.r, self.eps = x, mean, r, eps
        self.h = (x - along(mean, x)).mul_(along(r, x))

    def projected(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """P u and sum(u h)."""
        wanted = (True, True, False)
        return _backward_kernel(u, self.x, None, self.mean, self.r, self.eps, wanted)[:2]


class _Composite:
    """The same in torch's operations, which can be differentiated."""

    def __init__(self, x: Tensor, eps: float) -> None:
        self.dims = _over(x)
        d, var = moments(x, self.dims)
        r = (var + eps).rsqrt()
        self.h, self.r = d * r, r.view(-1)

    def projected(self, u: Tensor) -> tuple[Tensor, Tensor]:
        centered = u - u.mean(self.dims, keepdim=True)
        uh = centered * self.h
        p = centered - self.h * uh.mean(self.dims, keepdim=True)
        return p * along(self.r, u), uh.sum(self.dims)


def _plus(y: Tensor, term: Tensor, factor: Tensor, value: float = 1.0) -> Tensor:
    # not in place: a vmap around the backward, of the old kind too, may batch the factor alone
    return torch.addcmul(y, term, along(factor, y), value=value)


def _first(g: Tensor, x: Tensor, weight: Parameter, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db."""
    p, gh = _Composite(x, eps).projected(g)
    return p if weight is None else p * along(weight, g), gh, g.sum(_over(x))


def _second(
    v: Tensor, a: Parameter, c: Parameter, g: Tensor, weight: Parameter, by: _Kernels | _Composite,
    gh: Parameter, needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Dg, Dx and Dw."""
    n = v.numel() // v.shape[1]
    k = by.r if weight is None else by.r * weight  # times n
    p, vh = by.projected(v)
    dw = (p * g).sum(_over(v))
    dg = dx = None
    if needed[0]:
        dg = p if weight is None else p * along(weight, p)
        dg = dg if a is None else _plus(dg, by.h, a)
        dg = dg if c is None else dg + along(c, dg)
    if needed[1]:
        gh = (g * by.h).sum(_over(v)) if gh is None else gh
        factor = k * vh * (-1 / n) if a is None else torch.addcmul(a, k, vh, value=-1 / n)
        u = _plus(g * along(factor, g), v, k * gh, -1 / n)
        dx = _plus(by.projected(u)[0], by.h, k * dw, -1 / n)
    return dg, dx, dw if needed[2] else None


def along(value: Tensor, x: Tensor) -> Tensor:
    """One element a channel of x."""
    return value if x.dim() == 2 else value.view(-1, *[1] * (x.dim() - 2))


def _over(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))
