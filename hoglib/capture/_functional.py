"""The same graph without operations in place: what can be reordered, shared and taken apart."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx


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
