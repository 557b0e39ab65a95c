"""Convolutions of a second derivative as the kernels that are made for them."""

from operator import getitem as _get
from typing import Any

import torch
from torch import fx

from hoglib.capture._nodes import made, replaced, turns, value_of

aten = torch.ops.aten


def tailor(module: fx.GraphModule) -> None:
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
