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

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib._core.torch_modes import plain_reverse_mode, without_stand_ins
from hoglib.errors import ArgumentValueError
from hoglib.ops import _running_statistics
from hoglib.ops._normalization import fused, moments
from hoglib.ops._running_statistics import Statistics, move, update

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
        with without_stand_ins():
            y, mean, r = _kernel(x, weight, bias, statistics, eps)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, r = ctx.saved_tensors
        needed, eps = ctx.needs_input_grad, ctx.eps
        with without_stand_ins():
            if not plain_reverse_mode():
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
        with without_stand_ins():
            v = torch.zeros_like(x) if v is None else v
            if torch.is_grad_enabled() or not plain_reverse_mode():
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


# === Batch norm, right in every mode and at every order.


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Batch norm of each channel over the batch, as `torch.nn.functional.batch_norm`.

        training    d = x - mean(x)    y = d / sqrt(mean(d^2) + eps) * weight + bias
        evaluation  y = (x - running_mean) / sqrt(running_var + eps) * weight + bias

    Shapes: input [N, C, ...]; all others [C] or None; y like input. In training the running statistics,
    where given, move by momentum toward the batch's, with the unbiased variance; under a torch.func
    transform, and without elements, they stay. They have no derivative. Half precision is computed in
    float32, and may have float32 parameters. To any order, in every mode, under vmap.
    Raises ValueError in training for one value a channel or an eps of 0 or less, for one running
    statistic alone; TypeError for an integer or complex input; RuntimeError for missing running
    statistics, for those that require grad, and for shapes and dtypes that do not fit.
    Ioffe & Szegedy, Batch Normalization, 2015.
    """
    values = validation.real("input", input).numel()
    if training and input.dim() > 1 and values and values == input.shape[1]:
        raise ArgumentValueError(
            "input: expected more than 1 value per channel when training, got input size "
            f"{tuple(input.shape)}."
        )
    if eps < 0 or (training and eps == 0):
        raise ArgumentValueError(f"eps: expected a positive number, got {eps}.")
    return _torch_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )


def _torch_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`torch.batch_norm`, which takes one value a channel, and any eps."""
    dims = (0, *range(2, input.dim()))
    return _running_statistics.normalised(
        input,
        weight,
        bias,
        running_mean,
        running_var,
        training,
        momentum,
        eps,
        dims,
        _batch_norm_in_one,
    )


def _batch_norm_in_one(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: _running_statistics.Statistics,
    eps: float,
) -> Tensor | None:
    if plain_reverse_mode():
        return normalised(x, weight, bias, statistics, eps)
    if not x.is_contiguous():  # others, channels last above all, keep their layout
        return None
    _running_statistics.update(x, (0, *range(2, x.dim())), statistics)
    across = x.transpose(0, 1)
    y = fused(across.reshape(1, x.shape[1], -1), weight, bias, eps)
    return y.reshape(across.shape).transpose(0, 1).contiguous()


BATCH_NORM: dict[Callable[..., Any], Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: _torch_batch_norm,
}


# === Instance norm, right in every mode and at every order.


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Instance norm of each channel of each example, as `torch.nn.functional.instance_norm`.

        d = x - mean(x)        y = d / sqrt(mean(d^2) + eps) * weight + bias

    with mean over the dimensions after the second; without use_input_stats running_mean and
    running_var stand for mean(x) and mean(d^2). Shapes: input [N, C, ...]; all others [C] or None; y
    like input. With use_input_stats the running statistics, where given, move by momentum toward the
    mean over N of the input's, with unbiased variances; under a torch.func transform they stay. They
    have no derivative. Half precision is computed in float32, and may have float32 parameters. Where
    the variance is 0 and eps too, y = bias and the derivative is 0. To any order, in every mode,
    under vmap.
    Raises ValueError for one value a channel, for one running statistic alone; TypeError for an
    integer or complex input; RuntimeError for missing running statistics, for those that require
    grad, and for shapes and dtypes that do not fit.
    Ulyanov, Vedaldi & Lempitsky, Instance Normalization, 2016.
    """
    if use_input_stats and prod(validation.real("input", input).shape[2:]) == 1:
        raise ArgumentValueError(
            "input: expected more than 1 spatial element when training, got input size "
            f"{tuple(input.shape)}."
        )
    return _torch_instance_norm(
        input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps
    )


def _torch_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`torch.instance_norm`, which takes one value a channel."""
    rows = input[..., None] if input.dim() == 2 else input
    dims = tuple(range(2, rows.dim()))
    y = _running_statistics.normalised(
        rows,
        weight,
        bias,
        running_mean,
        running_var,
        use_input_stats,
        momentum,
        eps,
        dims,
        _instance_norm_in_one,
    )
    return y.reshape(input.shape)


def _instance_norm_in_one(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: _running_statistics.Statistics,
    eps: float,
) -> Tensor:
    _running_statistics.update(x, tuple(range(2, x.dim())), statistics)
    return fused(x.flatten(2), weight, bias, eps).reshape(x.shape)


INSTANCE_NORM: dict[Callable[..., Any], Callable[..., Any]] = {
    F.instance_norm: instance_norm,
    torch.instance_norm: _torch_instance_norm,
}
