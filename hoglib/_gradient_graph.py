"""The gradient of a scalar function of leaves, with a graph of its own; and products through that."""

from collections.abc import Callable

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib._explaining import explaining
from hoglib._graph import check_functions, reached_directly, telling_of_cuts
from hoglib._leaves import Vector, own_leaves

OfLeaves = Callable[..., Tensor]


def gradient_graph(
    func: OfLeaves, leaves: Vector, what: str, create_graph: bool
) -> tuple[Tensor, Vector, list[Tensor | None]]:
    """The value, the leaves that it was computed from, and its gradient with a graph of its own."""
    own = own_leaves(leaves, create_graph)
    value = func(*own)
    check_functions(value, what)
    if not create_graph and value.requires_grad:
        only_as_given(value, leaves, what)
    gradient: list[Tensor | None] = [None]
    if value.requires_grad:
        with explaining(what), telling_of_cuts(value, what):
            gradient = list(torch.autograd.grad(value, own, create_graph=True, allow_unused=True))
    if all(part is None for part in gradient):
        raise arguments.NoSecondDerivative(
            "func(params, *args): expected a value that depends on params, got one that does not; "
            "look for .detach(), .item(), .data or a torch.no_grad() in func, and for a func that "
            "uses the model's own parameters instead of the params it is given."
        )
    return value, own, gradient


def only_as_given(value: Tensor, leaves: Vector, what: str) -> None:
    """The value comes from the copies of the leaves that func was given, not from the leaves too."""
    direct = reached_directly(value, leaves)
    if direct:
        shapes = ", ".join(str(tuple(leaves[i].shape)) for i in direct)
        raise arguments.NoSecondDerivative(
            f"{what}: expected a func that uses the params it is given, got one that uses the "
            f"same tensors (of shape {shapes}) from elsewhere too: a part of the derivatives would be "
            "missing. Look for the model's own parameters in func, model.parameters() or a list of "
            "weights; take them from params, or detach() what is meant as a constant."
        )


def through(
    gradient: list[Tensor | None],
    own: Vector,
    vector: Vector,
    what: str,
    keep: bool = False,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """d <gradient, vector> / d own, by a backward pass through the gradient's graph."""
    pairs = [
        (g, v) for g, v in zip(gradient, vector, strict=True) if g is not None and g.requires_grad
    ]
    if not pairs:
        return [None] * len(own)
    with explaining(what):
        return list(
            torch.autograd.grad(
                [g for g, _ in pairs],
                own,
                [v for _, v in pairs],
                retain_graph=keep or create_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
        )
