"""The memory layout of an argument, and copies that have the same one.

    x[:, :3]      strides (5, 1)      gaps between the rows
    x.mT          strides (1, 4)      another order of the dimensions
    x.expand(4)   strides (0,)        one element for all

A Function whose forward calls `contiguous()` saves a copy of the first two, and the input itself where
that is contiguous: its second derivative is right for some layouts only.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core.torch_api import pytree


class Layout(NamedTuple):
    """How the dimensions of a tensor are stored, but for the sizes of gaps.

    order: the dimensions of several elements, the innermost one first. gaps: those whose elements are
    further apart than they are long. repeated: those of stride 0.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    repeated: tuple[int, ...]


def layout_of(x: Tensor) -> Layout | None:
    """The layout; None for a contiguous tensor, and for one that cannot be copied with its own."""
    if x.layout is not torch.strided or x.is_contiguous() or type(x) not in (Tensor, nn.Parameter):
        return None
    several = [d for d in range(x.dim()) if x.shape[d] > 1]
    order = sorted((d for d in several if x.stride(d)), key=x.stride)
    extent, gaps = 1, []
    for d in order:
        if x.stride(d) < extent:  # windows that overlap
            return None
        gaps += [d] * (x.stride(d) > extent)
        extent += (x.shape[d] - 1) * x.stride(d)
    return Layout(tuple(order), tuple(gaps), tuple(d for d in several if not x.stride(d)))


def laid_out(x: Tensor, layout: Layout) -> Tensor:
    """x in new memory of that layout, differentiable; a repeated dimension keeps its first element."""
    strides, extent = [0] * x.dim(), 1
    for d in layout.order:
        strides[d] = extent + (d in layout.gaps)
        extent += (x.shape[d] - 1) * strides[d]
    part = x
    for d in layout.repeated:
        part = part.narrow(d, 0, 1)
    memory = x.new_zeros(extent).as_strided_scatter(part, part.shape, strides)
    return memory.as_strided(x.shape, strides)


def laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    layout = layout_of(like)
    return x if layout is None else laid_out(x, layout)


def copied(x: Tensor) -> Tensor:
    """A detached copy with the same layout."""
    return laid_out_as(x, x.detach().clone())


def fresh(value: object) -> Any:
    """A copy of what a run may change: a tensor's values, the state of a random generator, the items of
    a container."""
    if isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return pytree.map(fresh, value) if isinstance(value, list | tuple | dict) else value


def strided(x: Tensor) -> Tensor:
    """x, stored with its dimensions reversed and gaps between elements."""
    order = tuple(reversed(range(x.dim())))
    turned = x.permute(order)
    # every second element of a stack with zeros
    return torch.stack([turned, torch.zeros_like(turned)], -1)[..., 0].permute(order)
