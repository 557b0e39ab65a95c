"""Batch and instance norm, right in every mode and at every order.

Both normalise each channel by statistics of the input or by running ones; they differ in the
dimensions that the mean is over, and in the kernel that does it in one go.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import upcast_dtype
from hoglib._core.running_statistics import running_statistics_frozen
from hoglib._core.torch_errors import TorchValueError
from hoglib._core.torch_internals import transforms_active
from hoglib._core.torch_modes import plain_reverse_mode
from hoglib.errors import ArgumentIndexError, ArgumentValueError
from hoglib.ops._fused_norms import fused_batch_norm
from hoglib.ops._normalization import (
    can_fuse,
    cast,
    check_dtypes,
    moments,
    normalize_rows,
    scale_and_shift,
    standardize,
    value_at_zero_variance,
)
from hoglib.ops._running_statistics import RunningStatistics, check_running_statistics


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

    In training the running statistics, where given, move by momentum toward the batch's, with the
    unbiased variance; under a torch.func transform, and without elements, they stay. They have no
    derivative. Half precision is computed in float32, and may have float32 parameters. Differentiable
    to any order, in every mode, under vmap.

    Args:
        input: x, a real floating-point tensor.
        running_mean: Running mean, updated in place; None only in training, and then both are.
        running_var: Running variance, updated in place; None only in training, and then both are.
        weight: Scale of each channel. Default: none.
        bias: Shift of each channel. Default: none.
        training: Whether to normalise by the statistics of the batch. Default: False.
        momentum: Step of the running statistics, from 0 to 1. Default: 0.1.
        eps: Added to the variance. Default: 1e-5.
    Returns:
        y, like input.
    Raises:
        TypeError: for an integer or complex input.
        ValueError: in training for one value in a channel or an eps of 0 or less; for one running
            statistic alone.
        RuntimeError: for missing running statistics, for those that require grad, and for shapes and
            dtypes that do not fit.
    Shape:
        - input, y: [N, C, ...]
        - running_mean, running_var, weight, bias: [C]
    References:
        Ioffe and Szegedy, Batch Normalization, 2015.
    Example:
        >>> x = torch.tensor([[0.0], [1.0], [5.0]])
        >>> hog.ops.batch_norm(x, None, None, training=True)
        tensor([[-0.9258],
                [-0.4629],
                [ 1.3887]])
        >>> f = lambda x: hog.ops.batch_norm(x, None, None, training=True)[0].sum()
        >>> hog.hvp(f, x, torch.ones(3, 1))[1].abs().max() < 1e-5  # a shift changes nothing
        tensor(True)
    """
    values = validation.real("input", input).numel()
    if training and input.dim() > 1 and values and values == input.shape[1]:
        raise ArgumentValueError(
            "input: expected more than 1 value per channel when training, got input size "
            f"{tuple(input.shape)}."
        )
    if eps < 0 or (training and eps == 0):
        raise ArgumentValueError(f"eps: expected a positive number, got {eps}.")
    return torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


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
    r"""Instance norm of each channel of each sample, as `torch.nn.functional.instance_norm`.

        d = x - mean(x)        y = d / sqrt(mean(d^2) + eps) * weight + bias

    The mean is over the dimensions after the second; without use_input_stats running_mean and
    running_var stand for mean(x) and mean(d^2). With it the running statistics, where given, move by
    momentum toward the mean over N of the input's, with unbiased variances; under a torch.func
    transform they stay. They have no derivative. Half precision is computed in float32, and may have
    float32 parameters. Where the variance and eps are 0, y = bias and the derivative is 0.
    Differentiable to any order, in every mode, under vmap.

    Args:
        input: x, a real floating-point tensor.
        running_mean: Running mean, updated in place. Default: none.
        running_var: Running variance, updated in place. Default: none.
        weight: Scale of each channel. Default: none.
        bias: Shift of each channel. Default: none.
        use_input_stats: Whether to normalise by the statistics of the input. Default: True.
        momentum: Step of the running statistics, from 0 to 1. Default: 0.1.
        eps: Added to the variance. Default: 1e-5.
    Returns:
        y, like input.
    Raises:
        TypeError: for an integer or complex input.
        ValueError: for one value in a channel of a sample; for one running statistic alone.
        RuntimeError: for missing running statistics, for those that require grad, and for shapes and
            dtypes that do not fit.
    Shape:
        - input, y: [N, C, ...]
        - running_mean, running_var, weight, bias: [C]
    References:
        Ulyanov, Vedaldi and Lempitsky, Instance Normalization, 2016.
    Example:
        >>> x = torch.tensor([[[0.0, 1.0, 5.0]]])
        >>> hog.ops.instance_norm(x)
        tensor([[[-0.9258, -0.4629,  1.3887]]])
    """
    if use_input_stats and prod(validation.real("input", input).shape[2:]) == 1:
        raise ArgumentValueError(
            "input: expected more than 1 spatial element when training, got input size "
            f"{tuple(input.shape)}."
        )
    return torch_instance_norm(
        input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps
    )


def torch_batch_norm(
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
    """With the signature of `torch.batch_norm`, which takes one value a channel, and any eps."""
    statistics = RunningStatistics(running_mean, running_var, momentum)
    dims = (0, *range(2, input.dim()))
    return _normalize(input, weight, bias, statistics, training, eps, dims, _batch_norm_by_kernel)


def torch_instance_norm(
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
    """With the signature of `torch.instance_norm`, which takes one value a channel."""
    rows = input[..., None] if input.dim() == 2 else input
    statistics = RunningStatistics(running_mean, running_var, momentum)
    dims = tuple(range(2, rows.dim()))
    y = _normalize(
        rows, weight, bias, statistics, use_input_stats, eps, dims, _instance_norm_by_kernel
    )
    return y.reshape(input.shape)


# (x, weight, bias, statistics, eps) -> y in one kernel, with the statistics updated; or None for a
# layout that it does not take.
Kernel = Callable[[Tensor, Tensor | None, Tensor | None, RunningStatistics, float], Tensor | None]


def _normalize(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    given: RunningStatistics,
    by_input: bool,
    eps: float,
    dims: tuple[int, ...],
    kernel: Kernel,
) -> Tensor:
    """The input normalised by its own statistics along dims, or by the running ones."""
    validation.real("input", input)
    parameters = {
        "weight": weight,
        "bias": bias,
        "running_mean": given.mean,
        "running_var": given.var,
    }
    _check_channels(input, **parameters)
    check_running_statistics(given.mean, given.var, required=not by_input)
    check_dtypes(input, **parameters)
    inner = upcast_dtype(input.dtype)
    x = input if input.dtype == inner else input.to(inner)
    weight, bias = cast(weight, inner), cast(bias, inner)
    if not by_input:
        assert given.mean is not None
        assert given.var is not None
        y = _normalize_by_running(x, given.mean, given.var, weight, bias, eps)
        return y.to(input.dtype)
    updated = given.mean is not None and given.var is not None and _updates(x)
    statistics = given if updated else RunningStatistics(None, None, given.momentum)
    if can_fuse(x, eps):
        fused = kernel(x, _flat(weight), _flat(bias), statistics, eps)
        if fused is not None:
            return fused if fused.dtype == input.dtype else fused.to(input.dtype)
    statistics.update(x, dims)
    weight, bias = (None if p is None else _along_channels(p, x) for p in (weight, bias))
    if not x.numel():  # there is no mean, and NaN times nothing would reach the weight
        return scale_and_shift(x, weight, bias).to(input.dtype)
    y = standardize(*moments(x, dims), weight, eps, value_at_zero_variance(eps))
    return (y if bias is None else y + bias).to(input.dtype)


def _batch_norm_by_kernel(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: RunningStatistics,
    eps: float,
) -> Tensor | None:
    if plain_reverse_mode():
        return fused_batch_norm(x, weight, bias, statistics, eps)
    if not x.is_contiguous():  # others, channels last above all, keep their layout
        return None
    statistics.update(x, (0, *range(2, x.dim())))
    across = x.transpose(0, 1)
    y = normalize_rows(across.reshape(1, x.shape[1], -1), weight, bias, eps)
    return y.reshape(across.shape).transpose(0, 1).contiguous()


def _instance_norm_by_kernel(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: RunningStatistics,
    eps: float,
) -> Tensor:
    statistics.update(x, tuple(range(2, x.dim())))
    return normalize_rows(x.flatten(2), weight, bias, eps).reshape(x.shape)


def _normalize_by_running(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x - mean) (var + eps)^(-1/2) weight + bias as one multiplication and addition by channels."""
    scale = (var.detach().reshape(-1).to(x.dtype) + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean.detach().reshape(-1).to(x.dtype) * scale
    shift = shift if bias is None else shift + bias
    return torch.addcmul(_along_channels(shift, x), x, _along_channels(scale, x))


def _check_channels(input: Tensor, **given: Tensor | None) -> None:
    """Each tensor has one element for each channel, dimension 1 of the input."""
    if input.dim() == 1 and not input.numel():
        return  # torch takes this for no batch
    if input.dim() < 2:
        raise ArgumentIndexError(
            f"input: expected [N, C, ...], got {validation.describe(input)}; add the missing "
            "dimensions with `unsqueeze`."
        )
    for name, value in given.items():
        if value is not None and value.numel() != input.shape[1]:
            raise TorchValueError(
                f"{name}: expected {input.shape[1]} elements, one for each channel, got "
                f"{validation.describe(value)}."
            )


def _updates(x: Tensor) -> bool:
    """Whether running statistics are updated. Under a torch.func transform they are not: they would
    take values that belong to the transform."""
    compiling = torch.compiler.is_compiling()  # the compiler cannot read a context variable
    frozen = not compiling and running_statistics_frozen()
    return bool(x.numel()) and not transforms_active() and not frozen


def _along_channels(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(-1, *[1] * (x.dim() - 2))


def _flat(value: Tensor | None) -> Tensor | None:
    return value if value is None or value.dim() == 1 else value.reshape(-1)
