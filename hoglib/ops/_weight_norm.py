"""Weight norm, right in every mode and at every order."""

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import upcast_dtype
from hoglib._core.torch_errors import TorchValueError


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


def torch_weight_norm_interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """`torch._weight_norm_interface`: the norms too, as constants, in the dtype computed in."""
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
    """`torch.result_type`, which the compiler does not take."""
    if v.dim() and not g.dim() and v.is_complex() >= g.is_complex():
        return v.dtype  # a tensor without dimensions does not count
    return torch.promote_types(v.dtype, g.dtype)


def _one_for_each_norm(v: Tensor, g: Tensor, length: Tensor, squares: Tensor) -> Tensor:
    """Along the first and the last dimension torch reads g as a list, whatever its shape."""
    if v.dtype != g.dtype or g.numel() != squares.numel():
        raise TorchValueError(
            f"g: expected {squares.numel()} elements of {v.dtype}, one for each norm, got "
            f"{validation.describe(g)}."
        )
    return length.reshape(squares.shape)
