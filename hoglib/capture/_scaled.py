"""The same graph with factors as products of their own, where torch's compiler loses them.

    add(x, y, alpha=c)              =  x + c y
    addmm(x, a, b, beta=c, alpha=d) =  c x + d (a b)        and as such addmv, baddbmm

The compiler makes addmm of a sum with a matrix product whatever alpha is, and a sum of addmm whatever
alpha and beta are (torch 2.11 and 2.13; the results are wrong, and nothing says so).
"""

from typing import Any

import torch
from torch import fx

from hoglib.capture._functional import writes
from hoglib.capture._nodes import made, replaced

aten: Any = torch.ops.aten
SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor)
PRODUCTS = {
    aten.addmm.default: aten.mm.default, aten.addmm_.default: aten.mm.default,
    aten.addmv.default: aten.mv.default, aten.addmv_.default: aten.mv.default,
    aten.baddbmm.default: aten.bmm.default, aten.baddbmm_.default: aten.bmm.default,
}  # fmt: skip


def unscale(module: fx.GraphModule) -> None:
    """Takes the factors out of the options of sums, in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in SUMS and node.kwargs:
            with graph.inserting_before(node):
                x, y = node.args
                y = _times(graph, y, node.kwargs.get("alpha", 1))
                replaced(graph, node, made(graph, node.target, (x, y)))
        elif node.target in PRODUCTS and node.kwargs:
            with graph.inserting_before(node):
                x, a, b = node.args
                found = made(graph, PRODUCTS[node.target], (a, b))
                found = _times(graph, found, node.kwargs.get("alpha", 1))
                beta = node.kwargs.get("beta", 1)
                if beta != 0:  # of which NaN and infinity are nothing
                    found = made(graph, aten.add.Tensor, (_times(graph, x, beta), found))
                if writes(node):
                    found = made(graph, aten.copy_.default, (x, found))
                replaced(graph, node, found)
    module.recompile()


def _times(graph: fx.Graph, value: Any, factor: Any) -> Any:
    if isinstance(factor, int | float) and factor == 1:
        return value
    if not isinstance(value, fx.Node):
        return value * factor
    return made(graph, aten.mul.Tensor, (value, factor))
