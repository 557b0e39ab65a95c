"""Layer, batch, instance and weight norm, right in every mode and at every order.

Layer, batch and instance norm share mean 0 and variance 1 along rows, and its derivatives:

    d = x - mean(x)        r = (mean(d^2) + eps)^(-1/2)        y = d r

torch's layer_norm and batch_norm take mean and r for constants in forward mode. So every mode but plain
reverse mode runs these equations in torch operations.

Plain reverse mode runs torch's fused kernels; instance norm is a layer norm of each channel. torch's
double backward takes mean and r for constants, so that third derivatives are wrong. Here the backward
(`FusedNormGradient`) is a Function with a written-out derivative. For n values with h = d r, the
projection, a symmetric map, is

    P u = r (u - mean(u) - h mean(u h))

Batch norm has a weight w and a bias b for each channel (a row), layer norm for each element of a row;
dw and db are sums over the values that share a parameter.
With G = w g and k = r / n, for each row of n values:

    y  = w h + b
    dx = P G        dw = sum(g h)        db = sum(g)                               for g by y
    Dw = sum(g P v)        Dg = w P v + a h + c                           for v, a, c by dx, dw, db
    Dx = P((a - w k sum(v h)) g - k sum(G h) v) - k sum(G P v) h

A backward that is not differentiated again computes P u by torch's kernel of the first backward (with
sum(u h), for batch norm); otherwise by torch operations.

Batch and instance norm normalise each channel by statistics of the input or by running statistics; the
mean of batch norm is also over the batch.
"""

from collections.abc import Sequence
from math import inf, nan, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.validation import TorchValueError
from hoglib._core.runtime.ambient import AMBIENT
from hoglib._core.torch_api.mixed_precision import autocast_on, upcast_dtype
from hoglib._core.torch_api.torch_internals import transforms_active
from hoglib._core.torch_api.torch_modes import plain_reverse_mode, without_stand_ins
from hoglib._core.torch_api.torch_private import private
from hoglib.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from hoglib.ops._stand_in import OVER, OVER_FORWARD, SILENT, stands_in_for

__all__ = ["batch_norm", "instance_norm", "layer_norm", "weight_norm"]

Parameter = Tensor | None
Mask = tuple[bool, ...]
Normalized = tuple[Tensor, Tensor, Tensor]  # y, mean and r
Gradients = tuple[Tensor, Parameter, Parameter]  # dx, dw and db
_THIRD = f"{OVER_FORWARD}; so are third derivatives"


def _can_fuse(x: Tensor, eps: float) -> bool:
    """Whether torch's kernels normalise x with the right derivatives: they divide by sqrt(0 + eps)."""
    return eps > 0 and x.numel() > 0 and plain_reverse_mode()


def _moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Differences from the mean, and the biased variance, along dims, with keepdim."""
    d = x - x.mean(dims, keepdim=True)
    return d, (d * d).mean(dims, keepdim=True)


def _standardize(d: Tensor, var: Tensor, w: Tensor | None, eps: float, at_zero: float) -> Tensor:
    """d (var + eps)^(-1/2) w; where var + eps is 0, at_zero with derivative 0."""
    spread = var + eps
    if eps > 0:  # a Python number: this branch reads no data
        r = spread.rsqrt()
        return d * (r if w is None else r * w)
    none = spread <= 0
    r = torch.where(none, 0.0, torch.where(none, 1.0, spread).rsqrt())
    y = torch.where(none, at_zero, d * r)
    return y if w is None else y * w


def _scale_and_shift(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y * weight + bias, each if given, in one kernel."""
    if weight is not None and bias is not None:
        return torch.addcmul(bias, y, weight)
    if weight is not None:
        return y * weight
    return y if bias is None else y + bias


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None or x.dtype == dtype else x.to(dtype)


def _check_dtypes(input: Tensor, **parameters: Tensor | None) -> None:
    """Raise unless parameters have the input's dtype, or all float32 for an input in half precision."""
    given = {name: value for name, value in parameters.items() if value is not None}
    for name, value in given.items():
        validation.tensor(name, value)
    dtypes = {value.dtype for value in given.values()}
    allowed = [{input.dtype}, {upcast_dtype(input.dtype)}]
    if dtypes and dtypes not in allowed:
        names = ", ".join(f"{name} {value.dtype}" for name, value in given.items())
        raise TorchValueError(
            f"{names}: expected {' or '.join(sorted({str(*d) for d in allowed}))} for all of them, as "
            f"the input is {input.dtype}; convert them with `.to`."
        )


class _RunningStatistics(NamedTuple):
    """The running statistics that a call updates."""

    mean: Tensor | None  # None: there is nothing to update
    var: Tensor | None
    momentum: float  # the step toward the new statistics

    def update(self, x: Tensor, dims: tuple[int, ...]) -> None:
        """Move toward the mean and the variance of x along dims, averaged over samples."""
        if self.mean is None:
            return
        with torch.no_grad():
            x = x.detach()
            mean = x.mean(dims, keepdim=True)
            var = (x - mean).square().mean(dims)  # a third of the time of `torch.var`
            if 0 not in dims:
                # instance norm has statistics for each sample: take their average
                mean, var = mean.reshape(x.shape[:2]).mean(0), var.mean(0)
            count = x.numel() // x.shape[1] // (1 if 0 in dims else x.shape[0])
            self.move_toward(mean, var, count)

    def move_toward(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Move by `momentum` toward a mean and the biased variance of `count` values, under no_grad."""
        if self.mean is None or self.var is None:
            return
        # a single value has an infinite unbiased variance, as in torch
        unbiased = var * (count / (count - 1) if count > 1 else inf)
        for running, now in ((self.mean, mean), (self.var, unbiased)):
            old = running.to(now.dtype)
            running.copy_(old * (1 - self.momentum) + now.reshape(old.shape) * self.momentum)


def _check_running_statistics(mean: Tensor | None, var: Tensor | None, *, required: bool) -> None:
    """Raise unless both or neither are given (both if required), without requires_grad."""
    given = {"running_mean": mean, "running_var": var}
    missing = [name for name, value in given.items() if value is None]
    if required and missing:
        raise TorchValueError(
            f"{', '.join(missing)}: expected running statistics, got None; pass both, or normalise by "
            "the statistics of the input."
        )
    if len(missing) == 1:
        text = f"{missing[0]}: expected running_mean and running_var, or neither, got None."
        raise ArgumentValueError(text)
    for name, value in given.items():
        if value is not None and value.requires_grad and torch.is_grad_enabled():
            raise TorchValueError(
                f"{name}: expected a tensor that does not require grad; batch norm is not "
                "differentiable by it. Pass it detached."
            )


class FusedNorm(torch.autograd.Function):
    """A norm by torch's fused kernel, which also updates the running statistics of batch norm.

    For plain reverse mode and eps > 0.
    """

    runs_user_code = False
    # saves the intermediates mean and r: right only in its op, with FusedNormGradient as backward
    part_of_an_op = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Parameter, b: Parameter, norm: "_LayerNorm") -> Tensor:
        with without_stand_ins():
            y, mean, r = norm.kernel(x, w, b)
        ctx.norm = norm
        ctx.save_for_backward(x, w, b, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, r = ctx.saved_tensors
        needs, norm = ctx.needs_input_grad[:3], ctx.norm
        with without_stand_ins():
            if not plain_reverse_mode():
                # forward mode or a transform was entered after forward: torch operations have all modes
                grads = norm.gradients(g, x, weight)
            elif torch.is_grad_enabled():
                grads = FusedNormGradient.apply(g, x, weight, bias, mean, r, norm)
            else:
                return *norm.kernel_gradients(g, x, weight, bias, mean, r, needs), None
        return *(grad if need else None for need, grad in zip(needs, grads, strict=True)), None


class FusedNormGradient(torch.autograd.Function):
    """The gradients (dx, dw, db) by torch's kernel, with a written-out derivative."""

    runs_user_code = False
    part_of_an_op = True

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Gradients:
        g, x, weight, bias, mean, r, norm = inputs
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        found = norm.kernel_gradients(g, x, weight, bias, mean, r, (True, True, True))
        ctx.save_for_backward(g, x, weight, mean, r, found[1] if norm.has_row_parameters else None)
        return found

    @staticmethod
    def backward(ctx: Any, v: Parameter, a: Parameter, c: Parameter) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, r, dw = ctx.saved_tensors
        with without_stand_ins():
            by: Pass
            if torch.is_grad_enabled() or not plain_reverse_mode():
                by = _Composite(x, ctx.norm)
            else:
                by = _Kernels(x, mean, r, ctx.norm, dw)
            v = torch.zeros_like(x) if v is None else v
            found = ctx.norm.double_backward(v, a, c, g, weight, by, ctx.needs_input_grad)
            return *found, *(None,) * 4


class _Kernels:
    """h, r, P and sum(g h) by the kernels, for a backward that is not differentiated."""

    def __init__(self, x: Tensor, mu: Tensor, r: Tensor, norm: "_LayerNorm", dw: Parameter) -> None:
        self.given, self.norm, self.r = (mu, r), norm, norm.along(r, x)
        # in place, because autograd does not record this pass
        self.x, self.h = x, (x - norm.along(mu, x)).mul_(self.r)
        self.gh = dw

    def project(self, u: Tensor) -> tuple[Tensor, Parameter]:
        """P u, and for batch norm sum(u h)."""
        given = u, self.x, None, None, *self.given, (True, True, False)
        return self.norm.kernel_gradients(*given)[:2]


class _Composite:
    """h, r and P in torch operations, for a backward that is differentiated."""

    def __init__(self, x: Tensor, norm: "_LayerNorm") -> None:
        self.dims = norm.dims(x)
        d, var = _moments(x, self.dims)
        self.r = (var + norm.eps).rsqrt()
        self.h, self.gh = d * self.r, None

    def project(self, u: Tensor) -> tuple[Tensor, Parameter]:
        """P u, and None for sum(u h)."""
        centered = u - u.mean(self.dims, keepdim=True)
        uh = (centered * self.h).mean(self.dims, keepdim=True)
        return (centered - self.h * uh) * self.r, None


Pass = _Kernels | _Composite


class _LayerNorm:
    """The kernels of layer norm, and their derivatives; batch norm shares the derivatives."""

    has_row_parameters = False  # one weight and bias for each row

    def __init__(self, shape: tuple[int, ...], eps: float) -> None:
        self.shape, self.eps = shape, eps

    def dims(self, x: Tensor) -> tuple[int, ...]:
        """The dimensions of a row."""
        return tuple(range(-len(self.shape), 0))

    def along(self, value: Tensor, x: Tensor) -> Tensor:
        """A parameter, the mean or r, in a shape that broadcasts to x."""
        return value

    def sum_over_shares(self, value: Tensor) -> Tensor:
        """The sum over all elements that share a parameter."""
        rows = tuple(range(value.dim() - len(self.shape)))
        return value.sum(rows) if rows else value

    def sum_over_rows(self, value: Tensor, weight: Parameter, known: Parameter) -> Tensor:
        """sum(w u) over each row, u = value; known: `sum_over_shares` of u, if it was computed."""
        value = value if weight is None else value * weight
        return value.sum(self.dims(value), keepdim=True)

    def kernel(self, x: Tensor, weight: Parameter, bias: Parameter) -> Normalized:
        """y, mean and r."""
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def kernel_gradients(
        self, g: Tensor, x: Tensor, w: Parameter, b: Parameter, mean: Tensor, r: Tensor, mask: Mask
    ) -> Gradients:
        """dx, dw and db; None if the mask is False or the parameter is None."""
        wanted = mask[0], mask[1] and w is not None, mask[2] and b is not None
        given = g, x, self.shape, mean, r, w, b, wanted
        return torch.ops.aten.native_layer_norm_backward.default(*given)

    def gradients(self, g: Tensor, x: Tensor, weight: Parameter) -> Gradients:
        """dx, dw and db."""
        by = _Composite(x, self)
        dx, _ = by.project(g if weight is None else g * self.along(weight, g))
        return dx, self.sum_over_shares(g * by.h), self.sum_over_shares(g)

    def double_backward(
        self, v: Tensor, a: Parameter, c: Parameter, g: Tensor, w: Parameter, by: Pass, needs: Mask
    ) -> tuple[Tensor | None, ...]:
        """Dg, Dx and Dw of the docstring above; out of place, because vmap may batch some factors."""
        a, c, w = (None if value is None else self.along(value, v) for value in (a, c, w))
        p, vh = by.project(v)
        gp = g * p
        dw = self.sum_over_shares(gp)
        dg = dx = None
        if needs[0]:
            dg = p if w is None else p * w
            dg = dg if a is None else torch.addcmul(dg, by.h, a)
            dg = dg if c is None else dg + c
        if needs[1]:
            # k = -r / n, with n = v.numel() / r.numel() values in a row
            k = by.r * (-by.r.numel() / v.numel())
            factor = k * self.sum_over_rows(v * by.h if vh is None else v, None, vh)
            factor = factor if w is None else factor * w
            factor = factor if a is None else factor + a
            gh = self.sum_over_rows(g * by.h if by.gh is None else g, w, by.gh)
            u = torch.addcmul(g * factor, v, k * gh)
            dx = torch.addcmul(by.project(u)[0], by.h, k * self.sum_over_rows(gp, w, dw))
        return dg, dx, dw if needs[2] else None


class _BatchNorm(_LayerNorm):
    """A layer norm with the channels as rows, and one weight and bias for each row."""

    has_row_parameters = True

    def __init__(self, statistics: _RunningStatistics, eps: float) -> None:
        self.statistics, self.eps = statistics, eps

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return (0, *range(2, x.dim()))

    def along(self, value: Tensor, x: Tensor) -> Tensor:
        return _along_channels(value, x)

    def sum_over_shares(self, value: Tensor) -> Tensor:
        return value.sum(self.dims(value))

    def sum_over_rows(self, value: Tensor, weight: Parameter, known: Parameter) -> Tensor:
        # w is one number for each row: multiply after the sum
        found = self.along(self.sum_over_shares(value) if known is None else known, value)
        return found if weight is None else found * weight

    def kernel(self, x: Tensor, weight: Parameter, bias: Parameter) -> Normalized:
        statistics, eps, dims = self.statistics, self.eps, self.dims(x)
        if x.device.type != "cpu" or x.dim() == 2 or x.numel() < 2**13:
            running = [value for value in statistics[:2] if value is not None]
            if any(value.dtype != x.dtype or value.dim() != 1 for value in running):
                statistics.update(x, dims)
                statistics = _RunningStatistics(None, None, 0.0)
            mean, var, momentum = statistics
            return torch.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        # on a CPU torch's kernel takes several times as long for the statistics of images
        mean = x.mean(dims, keepdim=True)
        var = (x - mean).square_().mean(dims)
        mean = mean.view(-1)
        statistics.move_toward(mean, var, x.numel() // x.shape[1])
        y = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
        return y, mean, (var + eps).rsqrt_()

    def kernel_gradients(
        self, g: Tensor, x: Tensor, w: Parameter, b: Parameter, mean: Tensor, r: Tensor, mask: Mask
    ) -> Gradients:
        given = g, x, w, None, None, mean, r, True, self.eps, mask
        return torch.ops.aten.native_batch_norm_backward.default(*given)


@stands_in_for(F.layer_norm, lacks=_THIRD, modes=OVER, issue="196700")
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Layer norm over the last dimensions, as `torch.nn.functional.layer_norm`.

        d = x - mean(x)        y = d / sqrt(mean(d^2) + eps) * weight + bias

    Half precision is computed in float32, and may have float32 parameters. Where the variance and eps
    are 0, y is NaN, as torch's is, and its derivative 0. Differentiable to any order, in every mode,
    under vmap.

    Args:
        input: x, a real floating-point tensor.
        normalized_shape: The sizes of the last dimensions, over which the mean is taken.
        weight: Scale of each element. Default: none.
        bias: Shift of each element. Default: none.
        eps: Added to the variance. Default: 1e-5.
    Returns:
        y, like input.
    Raises:
        TypeError: for an integer or complex input, or a normalized_shape other than a tuple or list.
        RuntimeError: for shapes and dtypes that do not fit.
    Shape:
        - input, y: [..., \*normalized_shape]
        - weight, bias: normalized_shape
    References:
        Ba, Kiros and Hinton, Layer Normalization, 2016.
    Example:
        >>> x = torch.tensor([[0.0, 1.0, 5.0]])
        >>> hog.ops.layer_norm(x, (3,))
        tensor([[-0.9258, -0.4629,  1.3887]])
        >>> w = torch.ones(3)
        >>> hog.hvp(lambda w: hog.ops.layer_norm(x, (3,), w).square().sum(), w, w)[1]
        tensor([1.7143, 0.4286, 3.8571])
    """
    validation.real("input", input)
    if not isinstance(normalized_shape, tuple | list):
        raise ArgumentTypeError(
            "normalized_shape: expected a tuple of integers, got "
            f"{validation.describe(normalized_shape)}; write `(n,)`."
        )
    shape = tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise TorchValueError(
            f"normalized_shape: expected the last dimensions of the input, at least one, got "
            f"{list(shape)}; the input has shape {tuple(input.shape)}."
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and tuple(value.shape) != shape:
            text = f"{name}: expected normalized_shape {shape}, got {validation.describe(value)}."
            raise TorchValueError(text)
    dtype = input.dtype
    # autocast on a GPU runs layer norm in float32 and returns float32; on a CPU it has no rule for it
    if input.device.type != "cpu" and autocast_on(input.device.type):
        dtype = upcast_dtype(dtype)
    else:
        _check_dtypes(input, weight=weight, bias=bias)
    inner = upcast_dtype(dtype)
    x = input.to(inner)
    if _can_fuse(x, eps):
        norm = _LayerNorm(shape, eps)
        y: Tensor = FusedNorm.apply(x, _cast(weight, inner), _cast(bias, inner), norm)
    else:
        y = _standardize(*_moments(x, tuple(range(-len(shape), 0))), None, eps, nan)
        y = _scale_and_shift(y, _cast(weight, inner), _cast(bias, inner))
    return y if y.dtype == dtype else y.to(dtype)


@stands_in_for(torch.layer_norm, name="layer_norm")
def torch_layer_norm(*args: Any, cudnn_enable: bool = True, **options: Any) -> Tensor:
    """With the signature of `torch.layer_norm`: the sixth argument is cudnn_enable."""
    return layer_norm(*args[:5], **options)


@stands_in_for(F.batch_norm, lacks=_THIRD, modes=OVER, issue="196699")
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

        d = x - mean(x)    y = d / sqrt(mean(d^2) + eps) * weight + bias    in training
        y = (x - running_mean) / sqrt(running_var + eps) * weight + bias    in evaluation

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
        RuntimeError: for running statistics that are missing or require grad, and for shapes and
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


@stands_in_for(F.instance_norm, lacks=_THIRD, modes=OVER, issue="196699")
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
        RuntimeError: for running statistics that are missing or require grad, and for shapes and
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
    more = use_input_stats, momentum, eps
    return torch_instance_norm(input, weight, bias, running_mean, running_var, *more)


@stands_in_for(torch.batch_norm, name="batch_norm")
def torch_batch_norm(*args: Any, **options: Any) -> Tensor:
    """With the signature of `torch.batch_norm`, which accepts one value per channel, and any eps."""
    return _normalize(True, *args, **options)


@stands_in_for(torch.instance_norm, name="instance_norm")
def torch_instance_norm(*args: Any, **options: Any) -> Tensor:
    """With the signature of `torch.instance_norm`, which accepts one value per channel."""
    if "use_input_stats" in options:
        options["training"] = options.pop("use_input_stats")
    return _normalize(False, *args, **options)


def _normalize(
    over_batch: bool,
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
    """Batch norm (over_batch) or instance norm, by statistics of the input or running statistics."""
    validation.real("input", input)
    running = {"running_mean": running_mean, "running_var": running_var}
    _check_channels(input, weight=weight, bias=bias, **running)
    _check_running_statistics(running_mean, running_var, required=not training)
    _check_dtypes(input, weight=weight, bias=bias, **running)
    inner = upcast_dtype(input.dtype)
    weight, bias = _cast(weight, inner), _cast(bias, inner)
    x = input if input.dtype == inner else input.to(inner)
    # without dimensions after the channels, a row of instance norm is one value
    x = x if over_batch or x.dim() != 2 else x[..., None]
    dims = tuple(d for d in range(x.dim()) if d > 1 or (over_batch and d == 0))
    statistics = _RunningStatistics(None, None, momentum)
    if running_mean is not None and _updates_statistics(x):
        statistics = _RunningStatistics(running_mean, running_var, momentum)
    if not training and running_mean is not None and running_var is not None:
        y = _normalize_by_running(x, running_mean, running_var, weight, bias, eps)
    elif over_batch and _can_fuse(x, eps):
        y = FusedNorm.apply(x, _flat(weight), _flat(bias), _BatchNorm(statistics, eps))
    else:
        statistics.update(x, dims)
        weight, bias = (None if p is None else _along_channels(p, x) for p in (weight, bias))
        if _can_fuse(x, eps):
            rows = x.flatten(2)
            y = FusedNorm.apply(rows, None, None, _LayerNorm(rows.shape[2:], eps)).reshape(x.shape)
            y = _scale_and_shift(y, weight, bias)
        elif x.numel():  # torch accepts eps = 0, and so a variance of 0
            y = _standardize(*_moments(x, dims), weight, eps, 0.0 if eps == 0 else nan)
            y = y if bias is None else y + bias
        else:  # an empty input has a NaN mean, which would reach the weight's gradient
            y = _scale_and_shift(x, weight, bias)
    y = y if y.dtype == input.dtype else y.to(input.dtype)
    return y if y.shape == input.shape else y.reshape(input.shape)


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
    """Raise unless each tensor has one element for each channel, dimension 1 of the input."""
    if input.dim() == 1 and not input.numel():
        return  # torch accepts an empty vector
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


def _updates_statistics(x: Tensor) -> bool:
    """Whether running statistics are updated: not under a torch.func transform, because they would
    hold tensors of the transform's level."""
    compiling = torch.compiler.is_dynamo_compiling()  # the compiler cannot read a context variable
    frozen = not compiling and AMBIENT.statistics_frozen
    return bool(x.numel()) and not transforms_active() and not frozen


def _along_channels(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(-1, *[1] * (x.dim() - 2))


def _flat(value: Tensor | None) -> Tensor | None:
    return value if value is None or value.dim() == 1 else value.reshape(-1)


@stands_in_for(
    private("torch._weight_norm", None), lacks=f"a wrong double backward{SILENT}", modes=("rr",)
)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    r"""A weight from its direction and its length, as `torch._weight_norm`.

        w = g v / ||v||        dw/dv = (g / ||v||) (1 - v v^T / ||v||^2)        dw/dg = v / ||v||

    There is one norm for each index along dim, over all other dimensions. Where v is 0, w and all
    derivatives are 0, by convention: torch's w is NaN there. Half precision is computed in float32.
    Differentiable to any order, in every mode, under vmap, for complex numbers too.

    Args:
        v: The direction, a floating-point or complex tensor.
        g: The length for each norm.
        dim: The dimension along which there is one norm for each index; -1 means one norm over all
            dimensions, not the last. Default: 0.
    Returns:
        w, of the promoted dtype.
    Raises:
        TypeError: for integer tensors.
        IndexError: for a dim that v lacks.
        RuntimeError: for shapes and dtypes that do not fit.
    Shape:
        - v, w: any
        - g: along the first and the last dimension one element for each norm, else any shape that
          broadcasts with v
    References:
        Salimans and Kingma, Weight Normalization, 2016.
    Example:
        >>> v, g = torch.tensor([[3.0, 4.0]]), torch.ones(1, 1)
        >>> hog.ops.weight_norm(v, g)
        tensor([[0.6000, 0.8000]])
        >>> hog.hvp(lambda v: hog.ops.weight_norm(v, g).sum(), v, v)[1]
        tensor([[-0.0320,  0.0240]])
    """
    return _weight_and_squares(v, g, dim)[0]


@stands_in_for(private("torch._weight_norm_interface", None), name="weight_norm")
def torch_weight_norm_interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """`torch._weight_norm_interface`: also returns the norms, as constants, in the computing dtype."""
    if dim not in (0, v.dim() - 1):
        raise TorchValueError(f"dim: expected the first or the last dimension, got {dim}.")
    w, squares = _weight_and_squares(v, g, dim)
    return w, squares.detach().sqrt()


def _weight_and_squares(v: Tensor, g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The weight, and the squares of the norms."""
    validation.differentiable("v", v)
    validation.differentiable("g", g)
    rank = v.dim()
    kept = None if dim == -1 else validation.dim("dim", dim, rank)
    dtype = _result_type(v, g)
    inner = upcast_dtype(dtype)
    direction, length = v.to(inner), g.to(inner)
    others = [d for d in range(rank) if d != kept]
    entries = (direction * direction.conj()).real
    squares = entries.sum(others, keepdim=True) if others else entries
    if rank and kept is not None and dim in (0, rank - 1):
        length = _one_for_each_norm(v, g, length, squares)
    zero = squares == 0
    scale = torch.where(zero, 0.0, length * torch.where(zero, 1.0, squares).rsqrt())
    return (direction * scale).to(dtype), squares


def _result_type(v: Tensor, g: Tensor) -> torch.dtype:
    """`torch.result_type`, which Dynamo does not trace."""
    if v.dim() and not g.dim() and v.is_complex() >= g.is_complex():
        return v.dtype  # a scalar tensor takes no part in the promotion
    return torch.promote_types(v.dtype, g.dtype)


def _one_for_each_norm(v: Tensor, g: Tensor, length: Tensor, squares: Tensor) -> Tensor:
    """g in the shape of the norms: for dim first or last, torch accepts g of any shape."""
    if v.dtype != g.dtype or g.numel() != squares.numel():
        raise TorchValueError(
            f"g: expected {squares.numel()} elements of {v.dtype}, one for each norm, got "
            f"{validation.describe(g)}."
        )
    return length.reshape(squares.shape)
