"""The same graph with fewer and larger products: what is computed for two batches, or added up.

A step with a penalty runs a network several times: at real points and at fake ones, forward, backward
and backward again. Each run has its own product with each weight, and each of its gradients is a
product that is added to the others'. On a processor a product of few rows takes its time to read the
weight, and sums of weight-sized matrices take theirs to read and write them:

    x1 W, x2 W              =  [x1; x2] W             one product of all rows
    a1^T b1 + a2^T b2       =  [a1; a2]^T [b1; b2]    one product, without a sum

Sums are in another order then, so this is done for compiled code only.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hoglib.capture._nodes import made, value_of

aten: Any = torch.ops.aten
MOST = 5000  # nodes of a graph, beyond which no one waits for this


def merge(module: fx.GraphModule) -> None:
    """Merges products of a graph, in place."""
    graph = module.graph
    if len(graph.nodes) > MOST:
        return
    _sums(graph)
    _one_factor(graph)
    graph.eliminate_dead_code()
    module.recompile()


def _sums(graph: fx.Graph) -> None:
    """Sums of products of few inner entries become one product of more."""
    for root in reversed(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if not root.users or not _is_sum(root) or _within_a_sum(root):
            continue
        terms = list(_terms(root, False))
        pairs = [(term, pair) for term in terms if (pair := _factors(term)) is not None]
        rows, columns = value_of(root).shape
        inner = sum(value_of(a).shape[1] for _, (a, _, _) in pairs)
        if len(pairs) < 2 or inner * (rows + columns) > rows * columns * (len(pairs) - 1):
            continue
        known = {node for (node, _), _ in pairs}
        with graph.inserting_before(root):
            left = [_transpose(graph, b) if turned else a for _, (a, b, turned) in pairs]
            right = [_transpose(graph, a) if turned else b for _, (a, b, turned) in pairs]
            found = made(
                graph, aten.mm.default, (_joined(graph, left, 1), _joined(graph, right, 0))
            )
            for term, turned in terms:
                if term not in known:
                    other = _transpose(graph, term) if turned else term
                    found = made(graph, aten.add.Tensor, (found, other))
        root.replace_all_uses_with(found)
        graph.eliminate_dead_code()


def _terms(node: fx.Node, turned: bool) -> Iterator[tuple[fx.Node, bool]]:
    """The terms of a sum of matrices, and whether each is transposed before it is added."""
    for term in node.args[:2]:
        at, turns = term, turned
        while isinstance(at, fx.Node) and at.target is aten.t.default and len(at.users) == 1:
            at, turns = at.args[0], not turns
        if isinstance(at, fx.Node) and _is_sum(at) and len(at.users) == 1:
            yield from _terms(at, turns)
        else:
            yield at, turns  # type: ignore[misc]


def _is_sum(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or value_of(node).dim() != 2:
        return False
    return all(
        isinstance(x, fx.Node) and value_of(x).shape == value_of(node).shape for x in node.args[:2]
    )


def _within_a_sum(node: fx.Node) -> bool:
    """Whether a sum is a term of another one only."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is not aten.t.default:
            return _is_sum(node)
    return False


def _factors(term: tuple[Any, bool]) -> tuple[fx.Node, fx.Node, bool] | None:
    """a, b, and whether the term is (a b)^T and not a b."""
    product, turned = term
    if product.target is not aten.mm.default or len(product.users) > 1:
        return None
    return *product.args, turned


def _transpose(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.target is aten.t.default:
        return node.args[0]  # type: ignore[return-value]
    return made(graph, aten.t.default, (node,))


def _joined(graph: fx.Graph, parts: list[fx.Node], dim: int) -> fx.Node:
    """Parts side by side; of transposed ones the originals, which lie as they do in memory."""
    if all(part.target is aten.t.default for part in parts):
        return made(graph, aten.t.default, (_joined(graph, [p.args[0] for p in parts], 1 - dim),))  # type: ignore[misc]
    return made(graph, aten.cat.default, (parts, dim))


def _one_factor(graph: fx.Graph) -> None:
    """Products of different rows with one matrix, none of which waits for another, become one."""
    kinds: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        found = _rows_and_rest(node)
        if found is not None and _is_of_few_rows(*found):
            kinds.setdefault((node.target, *found[1]), []).append(node)
    merged = False
    for nodes in kinds.values():
        while len(nodes) > 1:
            first = nodes.pop(0)
            together = [first]
            for node in list(nodes):
                if not any(_needs(node, one) or _needs(one, node) for one in together):
                    together.append(node)
                    nodes.remove(node)
            if len(together) > 1:
                _put_together(graph, together)
                merged = True
    if merged:
        _in_order(graph)


def _rows_and_rest(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.mm.default:
        return node.args[0], (node.args[1],)  # type: ignore[return-value]
    if node.target is aten.addmm.default and value_of(node.args[0]).dim() == 1:
        return node.args[1], (node.args[0], node.args[2])  # type: ignore[return-value]
    return None


def _is_of_few_rows(rows: fx.Node, rest: tuple[fx.Node, ...]) -> bool:
    """Whether it is the matrix that takes its time to read, and not the rows that are put together."""
    count, inner = value_of(rows).shape
    columns = value_of(rest[-1]).shape[1]
    return 2 * count * (inner + columns) <= inner * columns


def _needs(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node is computed from another one."""
    pending, seen = [node], {node}
    while pending:
        for before in pending.pop().all_input_nodes:
            if before is other:
                return True
            if before not in seen:
                seen.add(before)
                pending.append(before)
    return False


def _put_together(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    rows = [_rows_and_rest(node)[0] for node in nodes]  # type: ignore[index]
    sizes = [value_of(x).shape[0] for x in rows]
    with graph.inserting_after(nodes[-1]):
        joined = made(graph, aten.cat.default, (rows, 0))
    at = nodes[0].args.index(rows[0])
    given = [joined if k == at else x for k, x in enumerate(nodes[0].args)]
    with graph.inserting_after(joined):
        product = made(graph, nodes[0].target, tuple(given))
    begin, last = 0, product
    for node, size in zip(nodes, sizes, strict=True):
        with graph.inserting_after(last):
            last = made(graph, aten.slice.Tensor, (product, 0, begin, begin + size))
        node.replace_all_uses_with(last)
        begin += size
    for node in nodes:
        graph.erase_node(node)


def _in_order(graph: fx.Graph) -> None:
    """Each node behind those that it is computed from, and otherwise in the order that there was."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    done: set[fx.Node] = set()
    end = next(iter(reversed(graph.nodes)))
    for root in list(graph.nodes):
        pending = [root]
        while pending:
            node = pending[-1]
            before = [x for x in node.all_input_nodes if x not in done]
            if node in done or not before:
                pending.pop()
                if node not in done and node is not end:
                    end.prepend(node)
                done.add(node)
            else:
                pending.extend(sorted(before, key=place.__getitem__, reverse=True))
