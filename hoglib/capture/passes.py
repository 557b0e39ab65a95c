"""Passes over captured graphs: simplification, sums of products, and layouts of convolutions.

A pass changes a graph in place, or returns a new one, with equal results up to rounding. It does not
recompile the code of the module, because that takes as long as the pass.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from operator import getitem as _get
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hoglib._core.torch_api.torch_private import private

aten: Any = torch.ops.aten
_unsafe_view = private("torch.ops.aten._unsafe_view.default")
_suggest_memory_format = private("torch._prims_common.suggest_memory_format")
_to_copy = private("torch.ops.aten._to_copy.default")

RESHAPES = (aten.view.default, _unsafe_view, aten.reshape.default)  # may view or copy
# operations with an output that may alias their input
VIEWS = {
    *RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default,
    aten.alias.default, aten.detach.default, aten.slice.Tensor, aten.select.int,
}  # fmt: skip


def optimize(graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool) -> fx.GraphModule:
    """A copy of a graph for which torch's compiler produces right and fast code."""
    module = clone(graph)
    expand_alpha_beta(module)
    lay_out_concatenations(module)
    if not dynamic:
        module = functionalize(module, tensors)
        merge_sums(module)
    specialize_convolutions(module.graph)
    if not dynamic and all(x.device.type == "cpu" for x in tensors):
        channels_last(module.graph)
    module.recompile()
    return module


def specialize_in_inductor(graph: fx.Graph) -> None:
    """The two passes over convolutions, in a graph of torch's compiler (after autograd)."""
    specialize_convolutions(graph)
    inputs = [fake_value(node) for node in graph.nodes if node.op == "placeholder"]
    if all(isinstance(x, Tensor) and x.is_cpu and _has_numbers(x) for x in inputs):
        channels_last(graph)


def _has_numbers(value: Tensor) -> bool:
    """Whether no size is a symbol."""
    return all(isinstance(n, int) for n in value.shape)


def clone(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, to be changed."""
    own = fx.Graph()
    own.output(own.graph_copy(module.graph, {}))
    return fx.GraphModule(module, own)


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _has_no_dropout(node)


def is_fresh(node: fx.Node) -> bool:
    """Whether an operation is a copy by `torch_internals.fresh_copy`."""
    layout = node.kwargs.get("memory_format")
    return node.target is aten.clone.default and layout is torch.preserve_format


def _has_no_dropout(node: fx.Node) -> bool:
    """Whether an operation is attention or a recurrent layer, which draw only for dropout, without
    dropout."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in arguments}
    given |= {**dict(zip(given, node.args, strict=False)), **node.kwargs}
    rates = [given[name] for name in ("dropout_p", "dropout") if name in given]
    return bool(rates) and all(rate in (0, 0.0) for rate in rates)


def takes_lists(node: fx.Node) -> bool:
    """Whether a node calls a user's operator of torch.library that takes or returns a list of
    tensors."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target.namespace in ("aten", "prims"):  # type: ignore[union-attr]
        return False
    kinds = [str(x.type) for x in (*schema.arguments, *schema.returns)]
    return any("Tensor" in kind and "List" in kind for kind in kinds)


def writes_in_place(node: fx.Node) -> bool:
    """Whether an operation works in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def fake_value(node: Any) -> Tensor:
    """The fake tensor of a node's output, with a shape and a layout, but no values."""
    return node.meta["val"]


def new_node(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node at the insertion point of the graph, with the fake tensor of its output."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*fx.map_arg(args, fake_value), **kwargs)
    return node


def replace_node(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    """Replaces all uses of a node by another one, and erases it."""
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def functionalize(module: fx.GraphModule, tensors: list[Tensor]) -> fx.GraphModule:
    """The graph without in-place operations, which formulas of autograd contain."""
    if not any(map(writes_in_place, module.graph.nodes)):
        return module
    module.recompile()
    run: Any = torch.func.functionalize(module, remove="mutations")
    with torch.no_grad():
        result: fx.GraphModule = make_fx(run, tracing_mode="fake")(*tensors)
    simplify(result)
    return result


def pin_strides(module: fx.GraphModule) -> None:
    """Gives views the strides that the trace assumed.

    Fake tensors and torch's kernels give a dimension of size 1 different strides, and torch chooses a
    memory format by strides. The trace may assume channels-last where the run would refuse it.
    """
    for node in module.graph.nodes:
        if node.target not in RESHAPES or 1 not in fake_value(node).shape:
            continue
        source, target = _layout_of(node.args[0]), _layout_of(node)
        if source is None or target is None or not _is_static(source) or not _is_static(target):
            continue
        _, shape, strides, _ = source
        real = torch.empty_strided(shape, strides, device="meta").reshape(target[1])
        if real.stride() != target[2]:
            node.target = aten.as_strided.default
            node.args = (node.args[0], list(target[1]), list(target[2]))


def _is_static(layout: tuple[Any, ...]) -> bool:
    return all(isinstance(n, int) for n in (*layout[1], *layout[2]))


def simplify(module: fx.GraphModule) -> None:
    """Removes unused nodes, repeated computations and views of views; results stay equal bit for bit.

    In a graph with in-place operations only unused nodes are removed, because a repeated computation
    may have another result after a write.
    """
    graph = module.graph
    graph.eliminate_dead_code(lambda node: node.is_impure() or is_random(node))
    if not any(writes_in_place(node) for node in graph.nodes):
        known: dict[Hashable, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or is_random(node) or is_fresh(node):
                continue
            key = node.target, _freeze(node.args), _freeze(node.kwargs)
            same = _viewed_node(node) or known.get(key)
            if same is None:
                known[key] = node
            else:
                replace_node(graph, node, same)
        graph.eliminate_dead_code(lambda node: node.is_impure() or is_random(node))


def _freeze(value: object) -> Hashable:
    if isinstance(value, list | tuple):
        return ("list", *map(_freeze, value))
    if isinstance(value, dict):
        return ("dict", *((key, _freeze(item)) for key, item in value.items()))
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


def _layout_of(node: object) -> tuple[Any, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()


def _viewed_node(node: fx.Node) -> fx.Node | None:
    """The node to which a chain of views returns: its layout equals the last view's."""
    if node.target not in VIEWS:
        return None
    wanted = _layout_of(node)
    if wanted is None or not _is_static(wanted):
        return None
    at: Any = node
    while isinstance(at, fx.Node) and at.target in VIEWS:
        at = at.args[0]
        if _layout_of(at) == wanted:
            return at if isinstance(at, fx.Node) else None
    return None


SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor)
# product with a sum -> product
PRODUCTS = {
    aten.addmm.default: aten.mm.default, aten.addmm_.default: aten.mm.default,
    aten.addmv.default: aten.mv.default, aten.addmv_.default: aten.mv.default,
    aten.baddbmm.default: aten.bmm.default, aten.baddbmm_.default: aten.bmm.default,
}  # fmt: skip


def expand_alpha_beta(module: fx.GraphModule) -> None:
    """Replaces the options alpha and beta by products.

        add(x, y, alpha=c)              =  x + c y
        addmm(x, a, b, beta=c, alpha=d) =  c x + d (a b)        also addmv, baddbmm

    torch's compiler turns a sum with a matrix product into addmm and back, and drops alpha and beta on
    the way: results are wrong without an error (torch 2.11 and 2.13).
    """
    graph = module.graph
    for node in list(graph.nodes):
        if has_factors(node.target, node.kwargs):
            with graph.inserting_before(node):
                result = by_products(partial(new_node, graph), node.target, node.args, node.kwargs)
                replace_node(graph, node, result)


def has_factors(operation: object, kwargs: dict[str, Any] | None) -> bool:
    """Whether an operation is called with the option alpha or beta."""
    return bool(kwargs) and (operation in SUMS or operation in PRODUCTS)


def by_products(call: Callable[..., Any], operation: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation with alpha or beta, by calls call(operation, *args) without them."""

    def scaled(value: Any, factor: Any) -> Any:
        if isinstance(factor, int | float) and factor == 1:
            return value
        is_tensor = isinstance(value, fx.Node | Tensor)
        return call(aten.mul.Tensor, value, factor) if is_tensor else value * factor

    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    if operation in SUMS:
        return call(operation, args[0], scaled(args[1], alpha))
    x, a, b = args
    total = scaled(call(PRODUCTS[operation], a, b), alpha)
    if beta != 0:  # beta = 0 ignores x, also its NaN and infinity
        total = call(aten.add.Tensor, scaled(x, beta), total)
    return call(aten.copy_.default, x, total) if operation._schema.is_mutable else total


def lay_out_concatenations(module: fx.GraphModule) -> None:
    """Replaces a concatenation with empty tensors, or of one tensor, by a copy in cat's layout.

        cat([empty, x]) = x        in the memory layout of cat, for instance row-major

    torch's compiler copies x in the layout of x, so that a view of the result may be impossible.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not aten.cat.default:
            continue
        tensors: Any = node.args[0]
        left = [x for x in tensors if not _is_empty(fake_value(x))]
        if len(left) == len(tensors) > 1 or not left or node.kwargs:
            continue
        with graph.inserting_before(node):
            joint = left[0]
            if len(left) > 1:
                joint = new_node(graph, aten.cat.default, left, *node.args[1:])
            elif fake_value(joint).dtype is not (dtype := fake_value(node).dtype):
                joint = new_node(graph, _to_copy, joint, dtype=dtype)
            layout = _suggest_memory_format(fake_value(node))
            copy = new_node(graph, aten.clone.default, joint, memory_format=layout)
            replace_node(graph, node, copy)


def _is_empty(value: Tensor) -> bool:
    return any(isinstance(n, int) and n == 0 for n in value.shape)


MAX_NODES = 5000  # merging the sums of a larger graph takes too long


def merge_sums(module: fx.GraphModule) -> None:
    """Merges sums of matrix products with a small inner dimension.

        a1^T b1 + a2^T b2       =  [a1; a2]^T [b1; b2]    one product without a sum

    A step with a penalty runs a network several times: on real and on fake points, forward, backward,
    and backward again. Each run adds its gradient of a weight to the gradient so far. On a CPU a sum
    takes as long as reading and writing the weight's gradients, about as long as a product of few rows.
    Without this pass the benchmarks' critic step with R1 on an MLP takes 1.21 times as long.
    """
    graph = module.graph
    if len(graph.nodes) > MAX_NODES:
        return
    # sums that are terms of larger sums; the loop visits larger sums first
    merged: set[fx.Node] = set()
    for root in reversed(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if not root.users or not _is_sum(root) or root in merged:
            continue
        terms = list(_matrix_terms(root, False, merged))
        pairs = [(term, pair) for term in terms if (pair := _matmul_factors(term)) is not None]
        rows, columns = fake_value(root).shape
        inner = sum(fake_value(a).shape[1] for _, (a, _, _) in pairs)
        # concatenating the factors must not cost more than the saved sums
        if len(pairs) < 2 or inner * (rows + columns) > rows * columns * (len(pairs) - 1):
            continue
        known = {node for (node, _), _ in pairs}
        with graph.inserting_before(root):
            left = [_insert_transpose(graph, b) if turned else a for _, (a, b, turned) in pairs]
            right = [_insert_transpose(graph, a) if turned else b for _, (a, b, turned) in pairs]
            factors = _concatenate(graph, left, 1), _concatenate(graph, right, 0)
            total = new_node(graph, aten.mm.default, *factors)
            for term, turned in terms:
                if term not in known:
                    other = _insert_transpose(graph, term) if turned else term
                    total = new_node(graph, aten.add.Tensor, total, other)
        root.replace_all_uses_with(total)
        graph.eliminate_dead_code()


def _matrix_terms(
    node: fx.Node, turned: bool, merged: set[fx.Node]
) -> Iterator[tuple[fx.Node, bool]]:
    """The terms of a sum of matrices, and whether each is transposed; adds nested sums to `merged`."""
    for term in node.args[:2]:
        at, turns = term, turned
        while isinstance(at, fx.Node) and at.target is aten.t.default and len(at.users) == 1:
            at, turns = at.args[0], not turns
        if isinstance(at, fx.Node) and _is_sum(at) and len(at.users) == 1:
            merged.add(at)
            yield from _matrix_terms(at, turns, merged)
        else:
            yield at, turns  # type: ignore[misc]


def _is_sum(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or fake_value(node).dim() != 2:
        return False
    shape = fake_value(node).shape
    return all(isinstance(x, fx.Node) and fake_value(x).shape == shape for x in node.args[:2])


def _matmul_factors(term: tuple[Any, bool]) -> tuple[fx.Node, fx.Node, bool] | None:
    """a, b, and whether the term is (a b)^T instead of a b; None if it is no product."""
    product, turned = term
    if product.target is not aten.mm.default or len(product.users) > 1:
        return None
    return *product.args, turned


def _insert_transpose(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.target is aten.t.default:
        return node.args[0]  # type: ignore[return-value]
    return new_node(graph, aten.t.default, node)


def _concatenate(graph: fx.Graph, parts: list[fx.Node], dim: int) -> fx.Node:
    """Concatenated parts; if all parts are transposes, the transpose of the concatenated originals."""
    if all(part.target is aten.t.default for part in parts):
        originals: Any = [part.args[0] for part in parts]
        return new_node(graph, aten.t.default, _concatenate(graph, originals, 1 - dim))
    return new_node(graph, aten.cat.default, parts, dim)


def specialize_convolutions(graph: fx.Graph) -> None:
    """Removes unused gradients of convolutions, and uses the kernel for gradients of weights.

        convolution(x^T, g^T)^T = d <convolution(x, w), g> / d w        ^T swaps dimensions 0 and 1

    Autograd computes the left side when it differentiates a gradient: a convolution with a kernel as
    large as an image, which takes 1.5 to 3 times as long as the right side.
    """
    for node in list(graph.nodes):
        if node.target is aten.convolution_backward.default:
            _prune_gradients(node)
        elif node.target is aten.convolution.default:
            _use_weight_gradient(graph, node)


def _prune_gradients(node: fx.Node) -> None:
    used = {user.args[1] for user in node.users}
    *rest, mask = node.args
    if len(node.args) == 11 and all(isinstance(i, int) for i in used):
        node.args = (*rest, [bool(on and i in used) for i, on in enumerate(mask)])  # type: ignore[arg-type]


def _use_weight_gradient(graph: fx.Graph, node: fx.Node) -> None:
    x, g, bias, stride, padding, dilation, transposed, _, groups = node.args
    plain = bias is None and not transposed and groups == 1
    if not plain or not all(map(_is_exchanged, (x, g, *node.users))):
        return
    x, g = x.args[0], g.args[0]  # type: ignore[union-attr]
    kernel, images, outputs = fake_value(node).shape, fake_value(x).shape, fake_value(g).shape
    symbols = not all(isinstance(n, int) for n in (*kernel, *images, *outputs))
    # with a kernel g no larger than the result it is an ordinary convolution, which is fast
    if symbols or kernel[2:].numel() >= outputs[2:].numel() or not node.users:
        return
    sizes = list(zip(images[2:], padding, stride, kernel[2:], dilation, strict=True))  # type: ignore[arg-type]
    # with the result as weight, and stride and dilation exchanged, x has to give outputs of g's size
    if [(n + 2 * p - s * (k - 1) - 1) // d + 1 for n, p, s, k, d in sizes] != list(outputs[2:]):
        return
    weight = (kernel[1], kernel[0], *kernel[2:])
    with graph.inserting_before(node):
        shape = new_node(graph, aten.new_empty.default, g, weight)
        # output_padding, which a convolution that is not transposed ignores
        none = [0] * len(sizes)
        same = padding, stride, False, none, 1, [False, True, False]
        both = new_node(graph, aten.convolution_backward.default, g, x, shape, [0], dilation, *same)
        by_weight = new_node(graph, _get, both, 1)
    for user in list(node.users):
        replace_node(graph, user, by_weight)
    graph.erase_node(node)


def _is_exchanged(node: object) -> bool:
    """Whether a node is a transpose that swaps dimensions 0 and 1 of images or kernels."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.permute.default:  # as torch's compiler writes it
        rank, order = fake_value(node).dim(), [*node.args[1]]  # type: ignore[misc]
        return rank > 2 and order == [1, 0, *range(2, rank)]
    if node.target is not aten.transpose.int:
        return False
    rank = fake_value(node).dim()
    return rank > 2 and {n % rank for n in node.args[1:] if isinstance(n, int)} == {0, 1}


# image arguments
_CONVOLUTIONS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
# operations that depend on the strides of their input
_STRIDED_OPS = (
    aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default,
)  # fmt: skip


def channels_last(graph: fx.Graph) -> None:
    """Puts images and weights of convolutions in channels-last layout, on a CPU.

    In another layout, oneDNN reorders images in each convolution and in each of its derivatives.
    torch's compiler changes only the layout of convolutions, so each derivative still copies to the old
    one. Outputs keep their layout: autograd accepts a gradient as .grad only in its parameter's layout.
    """
    nodes = list(graph.nodes)
    # as_strided depends on the layout of its input
    strided = any(node.target in _STRIDED_OPS for node in nodes)
    if strided or not any(map(_is_image_convolution, nodes)):
        return

    def copied_to(layout: torch.memory_format, node: fx.Node, x: Any) -> fx.Node:
        with graph.inserting_before(node):
            return graph.call_function(aten.contiguous.default, (x,), {"memory_format": layout})

    for node in nodes:
        if node.target in RESHAPES:  # a view may be impossible in the new layout
            node.target = aten.reshape.default
        for i, x in enumerate(node.args[: _CONVOLUTIONS.get(node.target, 0)]):
            if fake_value(x).dim() == 4:
                node.update_arg(i, copied_to(torch.channels_last, node, x))
    output = graph.output_node()
    for x in output.all_input_nodes:
        if fake_value(x).is_contiguous():
            output.replace_input_with(x, copied_to(torch.contiguous_format, output, x))


def _is_image_convolution(node: fx.Node) -> bool:
    value = fake_value(node.args[0]) if node.target in _CONVOLUTIONS else None
    return value is not None and value.dim() == 4 and value.dtype == torch.float32
