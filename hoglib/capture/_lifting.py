"""Tensors that a traced function reaches otherwise than by its arguments become inputs of its graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from hoglib import _arguments as arguments
from hoglib._graph import nodes


def lift(what: str, graph: fx.GraphModule, recorded: list[Tensor]) -> list[Tensor]:
    """Makes inputs, behind those that are there, of the tensors that a graph holds, and of those that
    its outputs have a derivative by though their values are not in it."""
    lifted: dict[int, Tensor] = {}
    inputs: dict[int, fx.Node] = {}
    before = list(graph.graph.nodes)
    last = [node for node in before if node.op == "placeholder"]

    def add(value: Tensor, meta: dict[str, Any]) -> None:
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            raise arguments.NotSupported(
                f"{what}: expected dense tensors of torch's own class, got one that reaches "
                f"{arguments.describe(value)} of class {type(value).__name__} and layout "
                f"{value.layout}; convert it, or do not compile."
            )
        lifted[id(value)] = value
        with _after(graph.graph, last[-1] if last else None):
            inputs[id(value)] = graph.graph.placeholder(f"lifted_{len(lifted)}")
        inputs[id(value)].meta.update(meta)
        last.append(inputs[id(value)])

    for node in before:
        if node.op != "get_attr":
            continue
        value = _attribute(graph, str(node.target))
        if not isinstance(value, Tensor):
            raise arguments.NotSupported(
                f"{what}: expected a graph of tensors, got one that holds a {type(value).__name__}; "
                "make it before the call, and pass what it gives as an argument."
            )
        if id(value) not in lifted:
            add(value, node.meta)
        node.replace_all_uses_with(inputs[id(value)])
        graph.graph.erase_node(node)
    for node in nodes(recorded, since=[x for x in lifted.values() if not x.is_leaf]):
        leaf = getattr(node, "variable", None)
        if leaf is not None and _has_values(leaf) and id(leaf) not in lifted:
            add(leaf, {})
    for name in [name for name in vars(graph) if "_constant" in name]:
        delattr(graph, name)
    for stores in (graph._buffers, graph._parameters):  # which would keep what they hold alive
        stores.clear()
    return list(lifted.values())


def _has_values(leaf: Tensor) -> bool:
    return type(leaf) in (Tensor, nn.Parameter)


@contextmanager
def _after(graph: fx.Graph, node: fx.Node | None) -> Iterator[None]:
    with graph.inserting_before() if node is None else graph.inserting_after(node):
        yield


def _attribute(graph: fx.GraphModule, path: str) -> Any:
    value: Any = graph
    for name in path.split("."):
        value = getattr(value, name)
    return value


def check_apart(what: str, lifted: list[Tensor]) -> None:
    """No tensor that is reached was computed from another one: their gradients would count twice."""
    ours = {id(x) for x in lifted}
    ends = {x.grad_fn for x in lifted if x.grad_fn is not None}
    for x in lifted:
        if x.grad_fn is None:
            continue
        for node in nodes([x]):
            met = {parent for parent, _ in node.next_functions}
            if id(getattr(node, "variable", None)) in ours or met & ends:
                raise arguments.NotSupported(
                    f"{what}: expected to reach tensors that were computed from no other one that it "
                    f"reaches, got {arguments.describe(x)} that was ({x.grad_fn}); its gradient would "
                    "count twice. Pass it as an argument."
                )
