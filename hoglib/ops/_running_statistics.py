"""Batch and instance norm, by statistics of the input or by running ones: what these must be, and how
they run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.torch_errors import Refused
from hoglib._core.torch_internals import transforms_active
from hoglib.errors import ArgumentIndexError, ArgumentValueError
from hoglib.ops._normalization import (
    affine,
    can_fuse,
    flat_value,
    moments,
    same_dtype,
    scaled,
    upcast,
    upcast_dtype,
)


class Statistics(NamedTuple):
    """Running statistics that move in this call, or None."""

    mean: Tensor | None
    var: Tensor | None
    momentum: float


# (x, weight, bias, statistics, eps) -> y in one kernel, the statistics moved; or None where it
# cannot
Fuse = Callable[[Tensor, Tensor | None, Tensor | None, Statistics, float], Tensor | None]

_KEPT: ContextVar[bool] = ContextVar("statistics_kept", default=False)


@contextmanager
def statistics_kept() -> Iterator[None]:
    """Inside, running statistics do not move: what is computed there is no step of a training."""
    token = _KEPT.set(True)
    try:
        yield
    finally:
        _KEPT.reset(token)


def keeping_statistics() -> bool:
    return _KEPT.get()


def normalised(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    by_input: bool,
    momentum: float,
    eps: float,
    dims: tuple[int, ...],
    fuse: Fuse,
) -> Tensor:
    """The input normalised by its own statistics along dims, or by the running ones."""
    validation.real("input", input)
    given = {
        "weight": weight,
        "bias": bias,
        "running_mean": running_mean,
        "running_var": running_var,
    }
    per_channel(input, **given)
    check(input, running_mean, running_var, needed=not by_input)
    same_dtype(input, **given)
    inner = upcast_dtype(input.dtype)
    x = input if input.dtype == inner else input.to(inner)
    weight, bias = upcast(weight, inner), upcast(bias, inner)
    if not by_input:
        assert running_mean is not None
        assert running_var is not None
        return evaluated(x, running_mean, running_var, weight, bias, eps).to(input.dtype)
    moving = running_mean is not None and running_var is not None and _move(x)
    statistics = Statistics(*(running_mean, running_var) if moving else (None, None), momentum)
    if can_fuse(x, eps):
        y = fuse(x, _flat(weight), _flat(bias), statistics, eps)
        if y is not None:
            return y if y.dtype == input.dtype else y.to(input.dtype)
    update(x, dims, statistics)
    weight, bias = (None if p is None else along_channels(p, x) for p in (weight, bias))
    if not x.numel():  # there is no mean, and NaN times nothing would reach the weight
        return affine(x, weight, bias).to(input.dtype)
    y = scaled(*moments(x, dims), weight, eps, flat_value(eps))
    return (y if bias is None else y + bias).to(input.dtype)


def check(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, needed: bool
) -> None:
    """Both or neither, neither differentiable; both where they are `needed`."""
    given = {"running_mean": running_mean, "running_var": running_var}
    missing = [name for name, value in given.items() if value is None]
    if needed and missing:
        raise Refused(
            f"{', '.join(missing)}: expected running statistics, got None; without statistics of the "
            "input there are no others."
        )
    if len(missing) == 1:
        raise ArgumentValueError(
            f"{missing[0]}: expected running_mean and running_var, or neither, got None."
        )
    for name, value in given.items():
        if value is not None and value.requires_grad and torch.is_grad_enabled():
            raise Refused(
                f"{name}: expected a tensor that does not require grad; batch norm is not "
                "differentiable by it. Pass it detached."
            )


def per_channel(input: Tensor, **given: Tensor | None) -> None:
    """One element of each tensor for each channel, dimension 1 of the input."""
    if input.dim() == 1 and not input.numel():
        return  # torch takes this for no batch
    if input.dim() < 2:
        raise ArgumentIndexError(
            f"input: expected [N, C, ...], got {validation.describe(input)}; unsqueeze what it lacks."
        )
    for name, value in given.items():
        if value is not None and value.numel() != input.shape[1]:
            raise Refused(
                f"{name}: expected {input.shape[1]} elements, one a channel, got "
                f"{validation.describe(value)}."
            )


def along_channels(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(-1, *[1] * (x.dim() - 2))


def evaluated(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x - mean) (var + eps)^(-1/2) weight + bias as one multiplication and addition by channels."""
    scale = (var.detach().reshape(-1).to(x.dtype) + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean.detach().reshape(-1).to(x.dtype) * scale
    shift = shift if bias is None else shift + bias
    return torch.addcmul(along_channels(shift, x), x, along_channels(scale, x))


def _flat(value: Tensor | None) -> Tensor | None:
    return value if value is None or value.dim() == 1 else value.reshape(-1)


def _move(x: Tensor) -> bool:
    """Whether running statistics move, which under a torch.func transform they do not: they would take
    what belongs to the transform."""
    compiling = torch.compiler.is_compiling()  # the compiler cannot read a context variable
    return bool(x.numel()) and not transforms_active() and (compiling or not _KEPT.get())


def update(x: Tensor, dims: tuple[int, ...], statistics: Statistics) -> None:
    """Move them toward the mean and the variance of x along dims; what is left is averaged."""
    if statistics.mean is None:
        return
    with torch.no_grad():
        x = x.detach()
        mean = x.mean(dims, keepdim=True)
        var = (x - mean).square().mean(dims)  # a third of the time of `torch.var`
        if 0 not in dims:
            mean, var = mean.reshape(x.shape[:2]).mean(0), var.mean(0)
        count = x.numel() // x.shape[1] // (1 if 0 in dims else x.shape[0])
        move(statistics, mean, var, count)


def move(statistics: Statistics, mean: Tensor, var: Tensor, count: int) -> None:
    """Move them by `momentum` toward a mean and the biased variance of `count` values; no grad mode."""
    if statistics.mean is None or statistics.var is None:
        return
    unbiased = var * (count / (count - 1) if count > 1 else inf)
    for running, now in ((statistics.mean, mean), (statistics.var, unbiased)):
        old = running.to(now.dtype)
        moved = old * (1 - statistics.momentum) + now.reshape(old.shape) * statistics.momentum
        running.copy_(moved)
