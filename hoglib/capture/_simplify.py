"""The same graph with fewer nodes: nothing unused, nothing computed twice, no views of views."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from hoglib.capture._functional import writes
from hoglib.capture._nodes import RESHAPES, VIEWS
from hoglib.capture._trace import is_random


def simplify(module: fx.GraphModule) -> None:
    """Makes a graph smaller without changing what it computes, to the bit.

    Where operations work in place nothing but unused nodes go: what is the same before need not be the
    same after.
    """
    graph = module.graph
    graph.eliminate_dead_code(lambda node: node.is_impure() or is_random(node))
    if not any(writes(node) for node in graph.nodes):
        known: dict[Hashable, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or is_random(node):
                continue
            same = _base(node) or known.get(key := _key(node))
            if same is None:
                _shorten(node)
                known[key] = node
            else:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
        graph.eliminate_dead_code(lambda node: node.is_impure() or is_random(node))
    module.recompile()


def _key(node: fx.Node) -> Hashable:
    return node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list | tuple):
        return ("list", *map(_frozen, value))
    if isinstance(value, dict):
        return ("dict", *((key, _frozen(item)) for key, item in value.items()))
    if isinstance(value, fx.Node):
        return value
    return type(value), repr(value)


def _layout(node: Any) -> tuple[Any, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()


def _base(node: fx.Node) -> fx.Node | None:
    """What a view is a view of, if it is all of it as it was: the node that stands for both."""
    if node.target not in VIEWS:
        return None
    wanted = _layout(node)
    if wanted is None or not all(isinstance(n, int) for n in (*wanted[1], *wanted[2])):
        return None
    at: Any = node
    while isinstance(at, fx.Node) and at.target in VIEWS:
        at = at.args[0]
        if _layout(at) == wanted:
            return at if isinstance(at, fx.Node) else None
    return None


def _shorten(node: fx.Node) -> None:
    """A reshape of a reshape of what lies together is one."""
    if node.target not in RESHAPES:
        return
    source: Any = node.args[0]
    while (
        isinstance(source, fx.Node)
        and source.target in RESHAPES
        and isinstance(before := source.args[0], fx.Node)
        and isinstance(value := before.meta.get("val"), Tensor)
        and value.layout is torch.strided
        and value.is_contiguous()
    ):
        source = before
    if source is not node.args[0]:
        node.args = (source, *node.args[1:])
