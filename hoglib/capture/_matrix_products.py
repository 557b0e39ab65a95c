"""Matrix products of a graph by oneDNN, where that is faster on this machine."""

from typing import Any

import torch
from torch import Tensor, fx

from hoglib import _matrix_products as products
from hoglib import _onednn as onednn
from hoglib.capture._nodes import made, replaced, value_of

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)

# An operation of our own, which torch's compiler calls as it is: its own way with oneDNN's wants
# weights that are constants.
torch.library.define("hoglib::affine", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


torch.library.impl("hoglib::affine", "CPU", onednn.affine)
torch.library.register_fake("hoglib::affine", _fake)


def depends_on(module: fx.GraphModule) -> str:
    """What is chosen on this machine, of a graph that can have it: others wait for no timing."""
    found = (node for node in module.graph.nodes if node.target in PRODUCTS)
    return products.state() if any(_may_be(value_of(node)) for node in found) else ""


def _may_be(product: Tensor) -> bool:
    return product.dtype is torch.float32 and product.device.type == "cpu"


def by_onednn(module: fx.GraphModule) -> None:
    """Products that oneDNN computes faster become its own; the others stay as they are.

    mm(a, b) = affine(a, b^T, none)        addmm(c, a, b) = affine(a, b^T, c), or its sum with c
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is aten.mm.default:
            (a, b), added = node.args, None
        elif node.target is aten.addmm.default and not node.kwargs:
            added, a, b = node.args
        else:
            continue
        if _is_chosen(value_of(a), value_of(b)):
            with graph.inserting_before(node):
                replaced(graph, node, _affine(graph, a, b, added))
    module.recompile()


def _affine(graph: fx.Graph, a: Any, b: Any, added: Any) -> fx.Node:
    weight = made(graph, aten.t.default, (b,))
    is_bias = added is not None and value_of(added).shape == value_of(weight).shape[:1]
    affine: Any = torch.ops.hoglib.affine.default
    y = made(graph, affine, (a, weight, added if is_bias else None))
    return y if added is None or is_bias else made(graph, aten.add.Tensor, (y, added))


def _is_chosen(a: Tensor, b: Tensor) -> bool:
    if not all(isinstance(size, int) for size in (*a.shape, *b.shape)):
        return False
    if not (onednn.takes(a) and onednn.takes(b)):
        return False
    return products.chosen(a.shape[0], a.shape[1], b.shape[1], columns=not onednn.by_rows(a))
