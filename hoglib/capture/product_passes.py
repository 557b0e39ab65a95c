"""Matrix products, and what is done with them, in the layout that runs fastest."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from hoglib._core import matrix_products, torch_internals
from hoglib.capture.passes import made, replaced, turns, value_of, writes

aten: Any = torch.ops.aten

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


# === The same graph with fewer and larger products: what is computed for two batches, or added up.
#
# A step with a penalty runs a network several times: at real points and at fake ones, forward,
# backward
# and backward again. Each run has its own product with each weight, and each of its gradients is a
# product that is added to the others'. On a processor a product of few rows takes its time to read
# the
# weight, and sums of weight-sized matrices take theirs to read and write them:
#
#     x1 W, x2 W              =  [x1; x2] W             one product of all rows
#     a1^T b1 + a2^T b2       =  [a1; a2]^T [b1; b2]    one product, without a sum
#
# Sums are in another order then, so this is done for compiled code only.

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


# === Matrix products of a graph by oneDNN, where that is faster on this machine.
ONEDNN_PRODUCTS = (aten.mm.default, aten.addmm.default)

# An operation of our own, which torch's compiler calls as it is: its own way with oneDNN's wants
# weights that are constants.
torch.library.define("hoglib::affine", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


torch.library.impl("hoglib::affine", "CPU", torch_internals.onednn_affine)
torch.library.register_fake("hoglib::affine", _fake)


def depends_on(module: fx.GraphModule) -> str:
    """What is chosen on this machine, of a graph that can have it: others wait for no timing."""
    found = (node for node in module.graph.nodes if node.target in ONEDNN_PRODUCTS)
    return matrix_products.state() if any(_may_be(value_of(node)) for node in found) else ""


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
    if not (torch_internals.onednn_takes(a) and torch_internals.onednn_takes(b)):
        return False
    return matrix_products.chosen(
        a.shape[0], a.shape[1], b.shape[1], columns=not torch_internals.by_rows(a)
    )
