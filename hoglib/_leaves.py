"""Lists of tensors, one a parameter: to differentiate by, and what autograd gives for them."""

import torch
from torch import Tensor

Vector = list[Tensor]


def own_leaves(leaves: Vector, create_graph: bool) -> Vector:
    """Tensors like the leaves that require grad, connected to them only where that is asked for."""
    return [
        leaf.view_as(leaf)
        if create_graph and leaf.requires_grad
        else leaf.detach().requires_grad_()
        for leaf in leaves
    ]


def dense(part: Tensor) -> Tensor:
    """A gradient in the layout of its parameter; that of an embedding may be sparse."""
    return part if part.layout is torch.strided else part.to_dense()


def filled(parts: list[Tensor | None], like: Vector) -> Vector:
    """Zeros where autograd says None: what does not depend has a derivative of zero."""
    return [
        torch.zeros_like(leaf) if part is None else dense(part)
        for part, leaf in zip(parts, like, strict=True)
    ]
