"""What layer, batch and instance norm share: mean 0 and variance 1 along rows, and its derivatives.

    d = x - mean(x)        r = (mean(d^2) + eps)^(-1/2)        y = d r

torch's layer_norm and batch_norm take mean and r for constants in forward mode; its group_norm takes
them for outputs, and is right in every mode and at third order. A group that is a row makes it any of
the others, in one kernel that keeps x only. Its fused backward refuses tangents, so in forward mode
the equations are written out.
"""

from collections.abc import Callable
from math import nan
from typing import Any

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import HALF_DTYPES
from hoglib._core.torch_errors import Refused
from hoglib._core.torch_internals import forward_mode_active


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of that dtype are normalised in."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


def upcast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None or x.dtype == dtype else x.to(dtype)


def same_dtype(input: Tensor, **parameters: Tensor | None) -> None:
    """Parameters have the dtype of the input, or are all float32 beside an input of half precision."""
    given = {name: value for name, value in parameters.items() if value is not None}
    for name, value in given.items():
        validation.tensor(name, value)
    dtypes = {value.dtype for value in given.values()}
    allowed = [{input.dtype}, {upcast_dtype(input.dtype)}]
    if dtypes and dtypes not in allowed:
        names = ", ".join(f"{name} {value.dtype}" for name, value in given.items())
        raise Refused(
            f"{names}: expected {' or '.join(sorted({str(*d) for d in allowed}))} for all of them, the "
            f"input being {input.dtype}; convert them with `.to`."
        )


def can_fuse(x: Tensor, eps: float) -> bool:
    return eps > 0 and x.numel() > 0 and not forward_mode_active()


def fused(rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Rows [N, C, n] standardised along n, with a weight and a bias for each of C."""
    # torch's own refuses to differentiate twice with a bias and no weight
    inside = None if weight is None else bias
    cudnn: bool = torch.backends.cudnn.enabled
    y = torch.group_norm(rows, rows.shape[1], weight, inside, eps, cudnn)
    return y if weight is not None or bias is None else y + bias[:, None]


def moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Differences from the mean, and their biased variance, along dims that are kept."""
    d = x - x.mean(dims, keepdim=True)
    return d, (d * d).mean(dims, keepdim=True)


def scaled(d: Tensor, variance: Tensor, weight: Tensor | None, eps: float, flat: float) -> Tensor:
    """d (variance + eps)^(-1/2) weight, and where the root has no value, `flat` with derivative 0."""
    spread = variance + eps
    if eps > 0:  # a number of the model's, not of its data
        r = spread.rsqrt()
        return d * (r if weight is None else r * weight)
    none = spread <= 0
    r = torch.where(none, 0.0, torch.where(none, 1.0, spread).rsqrt())
    y = torch.where(none, flat, d * r)
    return y if weight is None else y * weight


def flat_value(eps: float) -> float:
    """What batch norm gives at variance 0, which torch lets pass where eps is 0."""
    return 0.0 if eps == 0 else nan


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y weight + bias, where given, in one kernel."""
    if weight is not None and bias is not None:
        return torch.addcmul(bias, y, weight)
    if weight is not None:
        return y * weight
    return y if bias is None else y + bias


# === Weight norm, right in every mode and at every order.


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    r"""A weight from its direction and its length, as `torch._weight_norm`.

        w = g v / ||v||        dw/dv = (g / ||v||) (1 - v v^T / ||v||^2)        dw/dg = v / ||v||

    with one norm for each index along dim, over all other dimensions; dim -1 means one norm over all
    dimensions, not the last. Shapes: v any; g has an element for each norm (along the first and the
    last dimension), or broadcasts with v; w like v. Where v is 0, w and all derivatives are 0, by
    convention: torch's w is NaN there. Half precision is computed in float32. To any order, in every
    mode, under vmap, complex numbers too.
    Raises TypeError for whole numbers, IndexError for a dim that v lacks, RuntimeError for shapes and
    dtypes that do not fit.
    Salimans & Kingma, Weight Normalization, 2016.
    """
    return _weight_norm(v, g, dim)[0]


def _weight_norm(v: Tensor, g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The weight, and the squares of the norms."""
    validation.differentiable("v", v)
    validation.differentiable("g", g)
    rank = v.dim()
    kept = None if dim == -1 else validation.dim("dim", dim, rank)
    dtype = _result_type(v, g)
    inner = upcast_dtype(dtype)
    direction, length = v.to(inner), g.to(inner)
    others = [d for d in range(rank) if d != kept]
    squares = (direction * direction.conj()).real
    total = squares.sum(others, keepdim=True) if others else squares
    if rank and kept is not None and dim in (0, rank - 1):
        length = _one_each(v, g, length, total)
    zero = total == 0
    scale = torch.where(zero, 0.0, length * torch.where(zero, 1.0, total).rsqrt())
    return (direction * scale).to(dtype), total


def _result_type(v: Tensor, g: Tensor) -> torch.dtype:
    """`torch.result_type`, which the compiler does not take: a g without dimensions widens nothing."""
    if v.dim() and not g.dim() and v.is_complex() >= g.is_complex():
        return v.dtype
    return torch.promote_types(v.dtype, g.dtype)


def _one_each(v: Tensor, g: Tensor, length: Tensor, total: Tensor) -> Tensor:
    """Along the first and the last dimension torch reads g as a list, whatever its shape."""
    if v.dtype != g.dtype or g.numel() != total.numel():
        raise Refused(
            f"g: expected {total.numel()} elements of {v.dtype}, one for each norm, got "
            f"{validation.describe(g)}."
        )
    return length.reshape(total.shape)


def _interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """`torch._weight_norm_interface`: the norms too, as constants, in the dtype computed in."""
    if dim not in (0, v.dim() - 1):
        raise Refused(f"dim: expected the first or the last dimension, got {dim}.")
    w, total = _weight_norm(v, g, dim)
    return w, total.detach().sqrt()


WEIGHT_NORM: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._weight_norm: weight_norm,
    torch._weight_norm_interface: _interface,
}
