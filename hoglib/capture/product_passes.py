"""Passes over the matrix products of a captured graph: layouts, merging, and the choice of kernels."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from hoglib._core import torch_kernels
from hoglib.capture.kernel_choice import Product, choose_onednn
from hoglib.capture.passes import fake_value, new_node, replace_node, swapped_dims
from hoglib.capture.writes import writes_in_place

aten: Any = torch.ops.aten

PRODUCTS: dict[Any, tuple[Any, tuple[int, ...]]] = {
    aten.mm.default: (aten.t.default, ()),
    aten.bmm.default: (aten.transpose.int, (1, 2)),
}
_ELEMENTWISE = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar,
    aten.div.Scalar, aten.add.Scalar, aten.neg.default,
)  # fmt: skip


def arrange(module: fx.GraphModule) -> None:
    """Moves transposes towards the outputs, where most of them cancel with another one.

        A^T + B^T = (A + B)^T        (A B)^T = B^T A^T, if only the transpose of the product is used

    Autograd computes the gradient of a weight as the transpose of a product, and adds it to row-major
    matrices. A sum of two layouts takes four times as long as a sum of one, while a matrix product
    reads transposed factors at no cost.
    """
    graph = module.graph
    before = set(graph.nodes)
    for node in list(graph.nodes):
        if node.target in _ELEMENTWISE:
            _sink_transpose(graph, node)
    for node in list(graph.nodes):
        if node.target in PRODUCTS:
            _swap_factors(graph, node)
    _update_metadata(graph, set(graph.nodes) - before)


def _update_metadata(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Recomputes fake tensors after changed nodes; views become reshapes, as layouts may differ."""
    for node in graph.nodes:
        new = node in changed or changed.isdisjoint(node.all_input_nodes)
        if new or node.op != "call_function" or writes_in_place(node):
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


def _sink_transpose(graph: fx.Graph, node: fx.Node) -> None:
    given = [x for x in node.args if isinstance(x, fx.Node)]
    if not given or not all(swapped_dims(x) == swapped_dims(given[0]) is not None for x in given):
        return
    if len({str(fake_value(x).shape) for x in given}) > 1:  # symbolic sizes have no hash
        return
    before = {x: x.args[0] for x in given}
    with graph.inserting_before(node):
        args = tuple(before.get(x, x) if isinstance(x, fx.Node) else x for x in node.args)
        inner = new_node(graph, node.target, args, node.kwargs)
        replace_node(graph, node, new_node(graph, given[0].target, (inner, *given[0].args[1:])))


def _swap_factors(graph: fx.Graph, node: fx.Node) -> None:
    turn, how = PRODUCTS[node.target]
    last = {0, 1} if node.target is aten.mm.default else {1, 2}
    if not node.users or any(swapped_dims(user) != last for user in node.users):
        return
    with graph.inserting_before(node):
        a, b = (new_node(graph, turn, (x, *how)) for x in node.args)
        product = new_node(graph, node.target, (b, a))
    for user in list(node.users):
        replace_node(graph, user, product)
    graph.erase_node(node)


MAX_NODES = 5000  # of a graph; merging a larger one takes too long


def merge(module: fx.GraphModule) -> None:
    """Merges matrix products into fewer and larger ones.

        x1 W, x2 W              =  [x1; x2] W             one product of all rows
        a1^T b1 + a2^T b2       =  [a1; a2]^T [b1; b2]    one product without a sum

    A step with a penalty runs a network several times: on real and on fake points, forward, backward,
    and backward again. Each run has a product with each weight, and adds its gradient to the others. On
    a CPU, a product of few rows takes the time to read the weight, and a sum of gradients the time to
    read and write them. The order of sums changes, so this pass is for compiled code only.
    """
    graph = module.graph
    if len(graph.nodes) > MAX_NODES:
        return
    _merge_sums(graph)
    _merge_common_factors(graph)
    graph.eliminate_dead_code()


def _merge_sums(graph: fx.Graph) -> None:
    """Merges sums of products if their inner dimension is small."""
    for root in reversed(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if not root.users or not _is_sum(root) or _within_a_sum(root):
            continue
        terms = list(_terms(root, False))
        pairs = [(term, pair) for term in terms if (pair := _factors(term)) is not None]
        rows, columns = fake_value(root).shape
        inner = sum(fake_value(a).shape[1] for _, (a, _, _) in pairs)
        if len(pairs) < 2 or inner * (rows + columns) > rows * columns * (len(pairs) - 1):
            continue
        known = {node for (node, _), _ in pairs}
        with graph.inserting_before(root):
            left = [_transpose(graph, b) if turned else a for _, (a, b, turned) in pairs]
            right = [_transpose(graph, a) if turned else b for _, (a, b, turned) in pairs]
            found = new_node(
                graph,
                aten.mm.default,
                (_concatenate(graph, left, 1), _concatenate(graph, right, 0)),
            )
            for term, turned in terms:
                if term not in known:
                    other = _transpose(graph, term) if turned else term
                    found = new_node(graph, aten.add.Tensor, (found, other))
        root.replace_all_uses_with(found)
        graph.eliminate_dead_code()


def _terms(node: fx.Node, turned: bool) -> Iterator[tuple[fx.Node, bool]]:
    """The terms of a sum of matrices, and whether each is transposed."""
    for term in node.args[:2]:
        at, turns = term, turned
        while isinstance(at, fx.Node) and at.target is aten.t.default and len(at.users) == 1:
            at, turns = at.args[0], not turns
        if isinstance(at, fx.Node) and _is_sum(at) and len(at.users) == 1:
            yield from _terms(at, turns)
        else:
            yield at, turns  # type: ignore[misc]


def _is_sum(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or fake_value(node).dim() != 2:
        return False
    return all(
        isinstance(x, fx.Node) and fake_value(x).shape == fake_value(node).shape
        for x in node.args[:2]
    )


def _within_a_sum(node: fx.Node) -> bool:
    """Whether a sum is only used as a term of another sum."""
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
    return new_node(graph, aten.t.default, (node,))


def _concatenate(graph: fx.Graph, parts: list[fx.Node], dim: int) -> fx.Node:
    """The parts concatenated; if all are transposes, the transpose of the concatenated originals."""
    if all(part.target is aten.t.default for part in parts):
        originals: Any = [part.args[0] for part in parts]
        return new_node(graph, aten.t.default, (_concatenate(graph, originals, 1 - dim),))
    return new_node(graph, aten.cat.default, (parts, dim))


def _merge_common_factors(graph: fx.Graph) -> None:
    """Merges products with the same matrix that do not depend on one another."""
    kinds: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        found = _split_rows(node)
        if found is not None and _has_few_rows(*found):
            kinds.setdefault((node.target, *found[1]), []).append(node)
    merged = False
    for nodes in kinds.values():
        while len(nodes) > 1:
            first = nodes.pop(0)
            together = [first]
            for node in list(nodes):
                if not any(_depends_on(node, one) or _depends_on(one, node) for one in together):
                    together.append(node)
                    nodes.remove(node)
            if len(together) > 1:
                _merge_products_of(graph, together)
                merged = True
    if merged:
        _sort_topologically(graph)


def _split_rows(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.mm.default:
        return node.args[0], (node.args[1],)  # type: ignore[return-value]
    if node.target is aten.addmm.default and fake_value(node.args[0]).dim() == 1:
        return node.args[1], (node.args[0], node.args[2])  # type: ignore[return-value]
    return None


def _has_few_rows(rows: fx.Node, rest: tuple[fx.Node, ...]) -> bool:
    """Whether reading the matrix takes longer than concatenating the rows."""
    count, inner = fake_value(rows).shape
    columns = fake_value(rest[-1]).shape[1]
    return 2 * count * (inner + columns) <= inner * columns


def _depends_on(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node depends on another one."""
    pending, seen = [node], {node}
    while pending:
        for before in pending.pop().all_input_nodes:
            if before is other:
                return True
            if before not in seen:
                seen.add(before)
                pending.append(before)
    return False


def _merge_products_of(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    rows = [_split_rows(node)[0] for node in nodes]  # type: ignore[index]
    sizes = [fake_value(x).shape[0] for x in rows]
    with graph.inserting_after(nodes[-1]):
        joined = new_node(graph, aten.cat.default, (rows, 0))
    at = nodes[0].args.index(rows[0])
    given = [joined if k == at else x for k, x in enumerate(nodes[0].args)]
    with graph.inserting_after(joined):
        product = new_node(graph, nodes[0].target, tuple(given))
    begin, last = 0, product
    for node, size in zip(nodes, sizes, strict=True):
        with graph.inserting_after(last):
            last = new_node(graph, aten.slice.Tensor, (product, 0, begin, begin + size))
        node.replace_all_uses_with(last)
        begin += size
    for node in nodes:
        graph.erase_node(node)


def _sort_topologically(graph: fx.Graph) -> None:
    """Moves each node behind those that it depends on, and keeps the order otherwise."""
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


NARROW = 8  # columns
SMALL = 4096  # entries of the wide factor


def turn_narrow(module: fx.GraphModule) -> None:
    """Computes a product of few columns as one of few rows.

        A B = (B^T A^T)^T

    A BLAS takes up to ten times as long for 2 to 8 columns as for as many rows, unless A is row-major
    and B column-major. Layers with few inputs have such products in their gradients.
    """
    graph = module.graph
    before = set(graph.nodes)
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        a, b = node.args
        (m, k), n = fake_value(a).shape, fake_value(b).shape[1]
        by_rows = torch_kernels.by_rows(fake_value(a)), torch_kernels.by_rows(fake_value(b))
        if not 2 <= n <= NARROW < m or m * k < SMALL or by_rows == (True, False):
            continue
        if fake_value(a).device.type == "cpu":
            with graph.inserting_before(node):
                factors = _transpose(graph, b), _transpose(graph, a)
                turned = new_node(graph, aten.mm.default, factors)
                replace_node(graph, node, new_node(graph, aten.t.default, (turned,)))
    _update_metadata(graph, set(graph.nodes) - before)


# An operator of our own, which torch's compiler calls without a change: its own lowering to oneDNN
# requires constant weights.
torch.library.define("hoglib::affine", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


torch.library.impl("hoglib::affine", "CPU", torch_kernels.onednn_affine)
torch.library.register_fake("hoglib::affine", _fake)


def by_onednn(module: fx.GraphModule, record: Path) -> None:
    """Replaces the matrix products that oneDNN computes faster on this machine.

        mm(a, b) = affine(a, b^T)        addmm(c, a, b) = affine(a, b^T, c), or c + affine(a, b^T)

    record: the file with the choices for this graph.
    """
    graph = module.graph
    products = {node: product for node in graph.nodes if (product := _product(node)) is not None}
    chosen = choose_onednn(products.values(), record)
    for node, product in products.items():
        if product in chosen:
            *added, a, b = node.args
            with graph.inserting_before(node):
                replace_node(graph, node, _affine(graph, a, b, added[0] if added else None))


def _product(node: fx.Node) -> Product | None:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    a, b = node.args[-2:]
    return Product.of(fake_value(a), fake_value(b))


def _affine(graph: fx.Graph, a: Any, b: Any, added: Any) -> fx.Node:
    weight = new_node(graph, aten.t.default, (b,))
    is_bias = added is not None and fake_value(added).shape == fake_value(weight).shape[:1]
    affine: Any = torch.ops.hoglib.affine.default
    y = new_node(graph, affine, (a, weight, added if is_bias else None))
    return y if added is None or is_bias else new_node(graph, aten.add.Tensor, (y, added))
