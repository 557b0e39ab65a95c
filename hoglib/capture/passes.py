"""Nodes of a graph: what is known of one, and how to make and replace them."""

from collections.abc import Hashable
from operator import getitem as _get
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hoglib.capture.trace import is_random

aten: Any = torch.ops.aten

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


# === The same graph without operations in place: what can be reordered, shared and taken apart.


def writes(node: fx.Node) -> bool:
    """Whether an operation works in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def functional(module: fx.GraphModule, tensors: list[Tensor]) -> fx.GraphModule:
    """The graph, traced once more where it writes: autograd's own formulas do, to what they made."""
    if not any(map(writes, module.graph.nodes)):
        return module
    run: Any = torch.func.functionalize(module, remove="mutations")
    with torch.no_grad():
        found: fx.GraphModule = make_fx(run, tracing_mode="fake")(*tensors)
    return found


# === The same graph with fewer nodes: nothing unused, nothing computed twice, no views of views.


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


# === The same graph with factors as products of their own, where torch's compiler loses them.
#
#     add(x, y, alpha=c)              =  x + c y
#     addmm(x, a, b, beta=c, alpha=d) =  c x + d (a b)        and as such addmv, baddbmm
#
# The compiler makes addmm of a sum with a matrix product whatever alpha is, and a sum of addmm
# whatever
# alpha and beta are (torch 2.11 and 2.13; the results are wrong, and nothing says so).

SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor)
PRODUCTS = {
    aten.addmm.default: aten.mm.default, aten.addmm_.default: aten.mm.default,
    aten.addmv.default: aten.mv.default, aten.addmv_.default: aten.mv.default,
    aten.baddbmm.default: aten.bmm.default, aten.baddbmm_.default: aten.bmm.default,
}  # fmt: skip


def expand_alpha_beta(module: fx.GraphModule) -> None:
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


# === Convolutions of a second derivative as the kernels that are made for them.


def specialize_convolutions(module: fx.GraphModule) -> None:
    """Gradients of convolutions that nothing uses are not computed, and those by a weight are taken by
    the kernel for that.

        convolution(x^T, g^T)^T = d <convolution(x, w), g> / d w        ^T exchanges dimensions 0 and 1

    Autograd computes the left side where it differentiates a gradient: a convolution whose kernel is as
    large as an image, which takes one and a half to three times as long.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is aten.convolution_backward.default:
            _prune(node)
        elif node.target is aten.convolution.default:
            _by_weight(graph, node)


def _prune(node: fx.Node) -> None:
    used = {user.args[1] for user in node.users}
    *rest, mask = node.args
    if len(node.args) == 11 and all(isinstance(i, int) for i in used):
        node.args = (*rest, [bool(on and i in used) for i, on in enumerate(mask)])  # type: ignore[arg-type]


def _by_weight(graph: fx.Graph, node: fx.Node) -> None:
    x, g, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    if (
        bias is not None
        or transposed
        or groups != 1
        or not all(map(_exchanged, (x, g, *node.users)))
    ):
        return
    x, g = x.args[0], g.args[0]  # type: ignore[union-attr]
    found, images, outputs = value_of(node).shape, value_of(x).shape, value_of(g).shape
    symbols = not all(isinstance(n, int) for n in (*found, *images, *outputs))
    if symbols or found[2:].numel() >= outputs[2:].numel() or not node.users:
        return
    sizes = zip(images[2:], padding, stride, found[2:], dilation, strict=True)  # type: ignore[arg-type]
    if [(n + 2 * p - s * (k - 1) - 1) // d + 1 for n, p, s, k, d in sizes] != list(outputs[2:]):
        return
    weight = (found[1], found[0], *found[2:])
    with graph.inserting_before(node):
        shape = made(graph, aten.new_empty.default, (g, weight))
        gradients: tuple[Any, ...] = (
            g, x, shape, [0], dilation, padding, stride, False, output_padding, 1, [False, True, False],
        )  # fmt: skip
        both = graph.call_function(aten.convolution_backward.default, gradients)
        values = [value_of(y) if isinstance(y, fx.Node) else y for y in gradients]
        both.meta["val"] = aten.convolution_backward.default(*values)
        by_weight = graph.call_function(_get, (both, 1))
        by_weight.meta["val"] = both.meta["val"][1]
    for user in list(node.users):
        replaced(graph, user, by_weight)
    graph.erase_node(node)


def _exchanged(node: Any) -> bool:
    return isinstance(node, fx.Node) and turns(node) == {0, 1} and value_of(node).dim() > 2


# === The same graph with images whose channels lie together, as convolutions of processors want
# them.
#
# oneDNN reorders images whose channels lie apart in every convolution, and in each of its
# derivatives.
# The graph is traced once more with convolutions that are given images and weights channels last;
# what
# follows them stays so. torch's compiler does that to convolutions alone, and leaves each of their
# derivatives a second copy in the old order.
_CONVOLUTIONS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_BY_STRIDE = (
    aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default,
)  # fmt: skip


def channels_last(module: fx.GraphModule, tensors: list[Tensor]) -> fx.GraphModule:
    """The graph with images channels last; itself where it has none, or is not of a processor's."""
    nodes = list(module.graph.nodes)
    if not any(_of_images(node) for node in nodes) or any(n.target in _BY_STRIDE for n in nodes):
        return module
    if any(x.device.type != "cpu" for x in tensors):
        return module
    again = _ChannelsLast(module)
    return make_fx(lambda *given: again.run(*given), tracing_mode="fake")(*tensors)


def _of_images(node: fx.Node) -> bool:
    value = node.args[0].meta.get("val") if node.target in _CONVOLUTIONS else None  # type: ignore[union-attr]
    return isinstance(value, Tensor) and value.dim() == 4 and value.dtype == torch.float32


class _ChannelsLast(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _CONVOLUTIONS:
            count = _CONVOLUTIONS[target]
            args = (*map(_last, args[:count]), *args[count:])
        if target in _VIEWS:  # of memory that has another order now
            target = aten.reshape.default
        return super().call_function(target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """In the layout that there was: .grad takes over what lies in memory as its parameter."""
        (found,) = args
        (nodes,) = next(iter(reversed(self.module.graph.nodes))).args  # type: ignore[union-attr, arg-type]
        return [_as(x, node) for x, node in zip(found, nodes, strict=True)]


def _last(x: Any) -> Any:
    four = isinstance(x, Tensor) and x.dim() == 4
    return x.contiguous(memory_format=torch.channels_last) if four else x


def _as(x: Any, node: Any) -> Any:
    was = node.meta["val"] if isinstance(node, fx.Node) else None
    return x.contiguous() if isinstance(was, Tensor) and was.is_contiguous() else x
