"""In-place operations of a captured graph, which autograd's own formulas contain, and their removal."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hoglib.capture.nodes import shared_arguments

aten: Any = torch.ops.aten


def writes_in_place(node: fx.Node) -> bool:
    """Whether an operation works in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def functionalize(module: fx.GraphModule, tensors: list[Tensor]) -> fx.GraphModule:
    """The graph without in-place operations; the given one may change.

        y.add_(x) = y + x, if nothing reads the memory of y afterwards

    Where something does, the graph is traced again, which takes as long as the first trace.
    """
    if replace_writes(module.graph):
        return module
    module.recompile()
    run: Any = torch.func.functionalize(module, remove="mutations")
    with torch.no_grad():
        found: fx.GraphModule = make_fx(run, tracing_mode="fake")(*tensors)
    return found


def replace_writes(graph: fx.Graph) -> bool:
    """Uses operations that do not write where nothing reads that memory later; whether none is left."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = [node for node in order if writes_in_place(node)]
    kept = [node for node in writes if not _replace(node, order)]
    return not kept


def _replace(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Uses the operation that does not write, if that computes the same."""
    target: Any = node.target
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    other = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
    if other is None or not name.endswith("_") or node.kwargs or _is_read_later(node, order):
        return False
    args = fx.map_arg(node.args, lambda x: x.meta["val"])
    was, found = node.meta["val"], other(*args)
    if (was.dtype, was.shape, was.stride()) != (found.dtype, found.shape, found.stride()):
        return False
    node.target = other
    return True


def _is_read_later(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether the memory that an operation writes to is read afterwards, but through its result."""
    root: Any = node.args[0]
    while source := next((x for x, _ in shared_arguments(root)), None):
        root = source
    if root.op != "call_function":
        return True
    pending, seen = [root], {root, node}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            if order[user] > order[node]:
                return True
            if any(True for _ in shared_arguments(user)):
                seen.add(user)
                pending.append(user)
    return False
