"""Matrix products, and what is done with them, in the layout that runs fastest."""

from typing import Any

import torch
from torch import Tensor, fx

from hoglib.capture._functional import writes
from hoglib.capture._nodes import made, replaced, turns, value_of

aten = torch.ops.aten
PRODUCTS: dict[Any, tuple[Any, tuple[int, ...]]] = {
    aten.mm.default: (aten.t.default, ()),
    aten.bmm.default: (aten.transpose.int, (1, 2)),
}
BY_ELEMENT = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar,
    aten.div.Scalar, aten.add.Scalar, aten.neg.default,
)  # fmt: skip


def arrange(module: fx.GraphModule) -> None:
    """Transposes go as far down as they can, where most meet another one and both are gone.

        A^T + B^T = (A + B)^T        (A B)^T = B^T A^T, where the product is used transposed alone

    Autograd gives the gradient of a weight as the transpose of a product, and adds transposes to what
    lies by rows: such a sum takes four times as long as one of two that lie alike. A matrix product
    reads either of its factors transposed for nothing.
    """
    graph = module.graph
    before = set(graph.nodes)
    for node in list(graph.nodes):
        if node.target in BY_ELEMENT:
            _sink(graph, node)
    for node in list(graph.nodes):
        if node.target in PRODUCTS:
            _turn(graph, node)
    _renew(graph, set(graph.nodes) - before)


def _renew(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """What follows may lie otherwise in memory now, where a view may have to be a copy."""
    for node in graph.nodes:
        new = node in changed or changed.isdisjoint(node.all_input_nodes)
        if new or node.op != "call_function" or writes(node):
            continue
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        was, node.meta["val"] = node.meta["val"], node.target(*args, **kwargs)
        if _strides(was) != _strides(node.meta["val"]):
            changed.add(node)


def _strides(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_strides(x) for x in value]
    return value.stride() if isinstance(value, Tensor) else None


def _sink(graph: fx.Graph, node: fx.Node) -> None:
    given = [x for x in node.args if isinstance(x, fx.Node)]
    if not given or not all(turns(x) == turns(given[0]) is not None for x in given):
        return
    if len({tuple(value_of(x).shape) for x in given}) > 1:
        return
    before = {x: x.args[0] for x in given}
    with graph.inserting_before(node):
        args = tuple(before.get(x, x) if isinstance(x, fx.Node) else x for x in node.args)
        inner = made(graph, node.target, args, node.kwargs)
        replaced(graph, node, made(graph, given[0].target, (inner, *given[0].args[1:])))


def _turn(graph: fx.Graph, node: fx.Node) -> None:
    turn, how = PRODUCTS[node.target]
    last = {0, 1} if node.target is aten.mm.default else {1, 2}
    if not node.users or any(turns(user) != last for user in node.users):
        return
    with graph.inserting_before(node):
        a, b = (made(graph, turn, (x, *how)) for x in node.args)
        product = made(graph, node.target, (b, a))
    for user in list(node.users):
        replaced(graph, user, product)
    graph.erase_node(node)
