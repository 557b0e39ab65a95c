"""What element-by-element functions share: promotion, broadcasting, and its undoing in backward."""

from typing import Any

import torch
from torch import Tensor


def promoted(*inputs: Any) -> tuple[Any, ...]:
    """The inputs with one dtype for all floating-point and complex tensors, by torch's promotion.

    Inside a Function it would be too late: under vmap a tensor of no dimensions has one more, and
    would count in the promotion.
    """
    floating = [value for value in inputs if _is_floating(value)]
    if all(value.dtype == floating[0].dtype for value in floating):
        return inputs
    dtypes: list[torch.dtype | None] = [None, None]  # of those with and those without dimensions
    for value in floating:
        group = value.dim() == 0
        known = dtypes[group]
        dtypes[group] = value.dtype if known is None else torch.promote_types(known, value.dtype)
    dtype, scalars = dtypes
    if dtype is None:
        dtype = scalars
    elif scalars is not None and scalars.is_complex and not dtype.is_complex:
        dtype = dtype.to_complex()
    return tuple(value.to(dtype) if _is_floating(value) else value for value in inputs)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def vmap_broadcasting(
    function: type[torch.autograd.Function],
    batch_size: int,
    in_dims: tuple[int | None, ...],
    *inputs: Any,
) -> tuple[Tensor, int]:
    """Batch dimensions to the front, then ordinary broadcasting."""
    ranks = [
        value.dim() - (dim is not None) if isinstance(value, Tensor) else 0
        for value, dim in zip(inputs, in_dims, strict=True)
    ]
    rank = max(ranks)
    aligned = [
        value if dim is None else value.movedim(dim, 0)[(slice(None),) + (None,) * (rank - own)]
        for value, dim, own in zip(inputs, in_dims, ranks, strict=True)
    ]
    return function.apply(*aligned), 0


def times(factor: Tensor, partial: Any) -> Tensor:
    if not isinstance(partial, Tensor):
        return factor if partial == 1 else factor * partial
    if partial.dtype == torch.bool:
        return torch.where(partial, factor, 0)
    return factor * partial


def sum_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the dimensions that broadcasting added or stretched."""
    return tensor if tensor.shape == shape else tensor.sum_to_size(shape)
