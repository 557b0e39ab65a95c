"""What layer, batch and instance norm share: mean 0 and variance 1 along rows, and its derivatives.

    d = x - mean(x)        r = (mean(d^2) + eps)^(-1/2)        y = d r

torch's layer_norm and batch_norm take mean and r for constants in forward mode; its group_norm takes
them for outputs, and is right in every mode and at third order. A group that is a row makes it any of
the others, in one kernel that keeps x only. Its fused backward refuses tangents, so in forward mode
the equations are written out.
"""

from math import nan

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import upcast_dtype
from hoglib._core.torch_errors import TorchValueError
from hoglib._core.torch_internals import forward_mode_active


def can_fuse(x: Tensor, eps: float) -> bool:
    """Whether torch's kernels normalise x with the right derivatives: they divide by sqrt(0 + eps)."""
    return eps > 0 and x.numel() > 0 and not forward_mode_active()


def normalize_rows(rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Rows [N, C, n] standardised along n, with a weight and a bias for each of C, by group_norm."""
    # torch's own refuses to differentiate twice with a bias and no weight
    inside = None if weight is None else bias
    cudnn: bool = torch.backends.cudnn.enabled
    y = torch.group_norm(rows, rows.shape[1], weight, inside, eps, cudnn)
    return y if weight is not None or bias is None else y + bias[:, None]


def moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Differences from the mean, and their biased variance, along dims that are kept."""
    d = x - x.mean(dims, keepdim=True)
    return d, (d * d).mean(dims, keepdim=True)


def standardize(
    d: Tensor, variance: Tensor, weight: Tensor | None, eps: float, at_zero: float
) -> Tensor:
    """d (variance + eps)^(-1/2) weight; where variance + eps is 0, at_zero with derivative 0."""
    spread = variance + eps
    if eps > 0:  # a number of the model's, not of its data
        r = spread.rsqrt()
        return d * (r if weight is None else r * weight)
    none = spread <= 0
    r = torch.where(none, 0.0, torch.where(none, 1.0, spread).rsqrt())
    y = torch.where(none, at_zero, d * r)
    return y if weight is None else y * weight


def value_at_zero_variance(eps: float) -> float:
    """What batch norm gives at variance 0, which torch lets pass where eps is 0."""
    return 0.0 if eps == 0 else nan


def scale_and_shift(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y weight + bias, where given, in one kernel."""
    if weight is not None and bias is not None:
        return torch.addcmul(bias, y, weight)
    if weight is not None:
        return y * weight
    return y if bias is None else y + bias


def cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None or x.dtype == dtype else x.to(dtype)


def check_dtypes(input: Tensor, **parameters: Tensor | None) -> None:
    """Parameters have the dtype of the input, or are all float32 beside an input of half precision."""
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
