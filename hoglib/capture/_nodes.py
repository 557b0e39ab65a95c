"""Nodes of a graph: what is known of one, and how to make and replace them."""

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
VIEWS = {
    *RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default,
    aten.alias.default, aten.detach.default, aten.slice.Tensor, aten.select.int,
}  # fmt: skip


def turns(node: fx.Node) -> set[int] | None:
    """The two dimensions that a node exchanges, if it is a transpose."""
    if node.target is aten.t.default and value_of(node).dim() == 2:
        return {0, 1}
    if node.target is aten.transpose.int:
        dims, given = value_of(node).dim(), [n for n in node.args[1:] if isinstance(n, int)]
        return {n % dims for n in given} if dims else None
    return None


def value_of(node: Any) -> Tensor:
    """What stands for the node's output: a tensor with a shape and a layout, and no values."""
    value: Tensor = node.meta["val"]
    return value


def made(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
    """A node where the graph inserts, with what stands for its output."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta["val"] = target(*fx.map_arg(args, value_of), **(kwargs or {}))
    return node


def replaced(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    """The node goes, and another one is used for it."""
    node.replace_all_uses_with(other)
    graph.erase_node(node)
