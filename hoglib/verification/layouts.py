"""The memory layout of an argument, and copies with an equal layout.

    x[:, :3]      strides (5, 1)      gaps between the rows
    x.mT          strides (1, 4)      another order of the dimensions
    x.expand(4)   strides (0,)        one element for all

A Function may call `contiguous()` in forward and save the result. That is the input itself if the input
is contiguous, and otherwise a copy without a graph: its second derivative depends on the layout.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core.torch_api import pytree


class Layout(NamedTuple):
    """How a tensor's dimensions lie in memory, up to the sizes of gaps; only dimensions of size > 1."""

    order: tuple[int, ...]  # dimensions with nonzero stride, the innermost first
    gaps: tuple[int, ...]  # dimensions with unused memory between their elements
    repeated: tuple[int, ...]  # dimensions with stride 0


def layout_of(x: Tensor) -> Layout | None:
    """The layout; None for contiguous tensors, and for tensors that `copy_in_layout` cannot imitate."""
    if x.layout is not torch.strided or x.is_contiguous() or type(x) not in (Tensor, nn.Parameter):
        return None
    several = [d for d in range(x.dim()) if x.shape[d] > 1]
    order = sorted((d for d in several if x.stride(d)), key=x.stride)
    extent, gaps = 1, []
    for d in order:
        if x.stride(d) < extent:  # overlapping windows
            return None
        gaps += [d] * (x.stride(d) > extent)
        extent += (x.shape[d] - 1) * x.stride(d)
    return Layout(tuple(order), tuple(gaps), tuple(d for d in several if not x.stride(d)))


def copy_in_layout(x: Tensor, layout: Layout) -> Tensor:
    """A differentiable copy of x with this layout; repeated dimensions keep one element."""
    strides, extent = [0] * x.dim(), 1
    for d in layout.order:
        strides[d] = extent + (d in layout.gaps)
        extent += (x.shape[d] - 1) * strides[d]
    part = x
    for d in layout.repeated:
        part = part.narrow(d, 0, 1)
    memory = x.new_zeros(extent).as_strided_scatter(part, part.shape, strides)
    return memory.as_strided(x.shape, strides)


def match_layout(like: Tensor, x: Tensor) -> Tensor:
    """x with the memory layout of `like`."""
    layout = layout_of(like)
    return x if layout is None else copy_in_layout(x, layout)


def copy_with_layout(x: Tensor) -> Tensor:
    """A detached copy with an equal layout."""
    return match_layout(x, x.detach().clone())


def copy_argument(value: object) -> Any:
    """A copy of everything that a run may change: the values of a tensor, the state of a generator, the
    items of a container."""
    if isinstance(value, Tensor):
        return copy_with_layout(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return pytree.map(copy_argument, value) if isinstance(value, list | tuple | dict) else value


def make_non_contiguous(x: Tensor) -> Tensor:
    """x in a non-contiguous layout: reversed dimensions, and gaps between elements."""
    order = tuple(reversed(range(x.dim())))
    turned = x.permute(order)
    # take every second element of a stack of x and zeros
    return torch.stack([turned, torch.zeros_like(turned)], -1)[..., 0].permute(order)
