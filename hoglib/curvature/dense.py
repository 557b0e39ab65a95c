"""Whole Hessians, for networks small enough to hold one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _functorch, _tree
from hoglib._explaining import explaining
from hoglib._recording import recordable, recording
from hoglib._substitution import lingering
from hoglib.curvature.products import gradient_graph
from hoglib.stand_ins import stand_ins_if

Tree = Any


def hessian(
    func: Callable[..., Tensor],
    params: Tree,
    *args: Any,
    create_graph: bool = False,
    stand_ins: bool = True,
) -> Tree:
    r"""The whole Hessian of a scalar function, in the layout of `torch.func.hessian`.

        H[a][b][i, j] = d^2 func(params, *args) / d params[a][i] d params[b][j]

    Shapes: for params a dict, H is a dict of dicts and H[a][b] has the shape of params[a] followed by
    that of params[b]; for any other pytree the nesting is alike, for one tensor H is one tensor.

    Computed row by row, reverse-over-reverse, one backward pass a row: P passes for P numbers in
    params, and P^2 numbers of memory. (`torch.func.hessian` batches the rows with vmap, which is
    silently wrong in the rows of a LayerNorm's weight.) Inside torch.func transforms it is
    `jacfwd(grad)`. create_graph: whether H can be differentiated again. stand_ins: as in `hvp`. The
    inputs are not changed, and it works under no_grad and inference_mode.
    Raises what `hvp` raises.
    """
    arguments.function("func", func)
    arguments.parameters(params)
    leaves, structure = _tree.flatten(params)
    if any(leaf.is_complex() for leaf in leaves):
        raise arguments.WrongType(
            "params: expected real tensors, got a complex one, for which there is no one Hessian; pass "
            "its real view, `torch.view_as_real(p)`, and rebuild it in func."
        )
    with recording(), lingering(), stand_ins_if(stand_ins):
        leaves, inputs = recordable((leaves, args))

        def of_leaves(*values: Tensor) -> Tensor:
            value = func(_tree.unflatten(values, structure), *inputs)
            return arguments.scalar("func(params, *args)", value)

        if _functorch.transforms_active():
            every = tuple(range(len(leaves)))
            rows = torch.func.jacfwd(torch.func.grad(of_leaves, every), every)(*leaves)
        else:
            rows = _rows(of_leaves, leaves, create_graph)
    return _tree.unflatten([_tree.unflatten(row, structure) for row in rows], structure)


def _rows(
    func: Callable[..., Tensor], leaves: list[Tensor], create_graph: bool
) -> list[list[Tensor]]:
    """H[a][b] for each pair of leaves."""
    _, own, gradient = gradient_graph(func, leaves, create_graph, "hessian")
    blocks = []
    for grad, leaf in zip(gradient, own, strict=True):
        columns: list[list[Tensor]] = [[] for _ in own]
        if grad is not None and grad.requires_grad:
            for entry in grad.reshape(-1).unbind():
                with explaining("hessian"):
                    row = torch.autograd.grad(
                        entry, own, retain_graph=True, create_graph=create_graph, allow_unused=True
                    )
                for column, part, other in zip(columns, row, own, strict=True):
                    column.append(torch.zeros_like(other) if part is None else part)
        blocks.append(
            [
                torch.stack(column).reshape(leaf.shape + other.shape)
                if column
                else leaf.new_zeros(leaf.shape + other.shape)
                for column, other in zip(columns, own, strict=True)
            ]
        )
    return blocks
