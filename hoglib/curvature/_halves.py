"""A captured product in two graphs: what does not depend on the vector, and the linear map left.

    (v, point) -> (value, M v)    becomes    point -> (value, kept)    and    (v, point, kept) -> M v

The first runs once for all vectors at a point, as the graph of a gradient is kept in eager mode.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from hoglib.capture import _backends as backends
from hoglib.capture._functional import functional
from hoglib.capture._nodes import VIEWS
from hoglib.capture._simplify import simplify

Run = Callable[..., Any]


class Kept:
    """What the first half of a graph put out, and for which inputs."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._found: list[Tensor] = []

    def of(self, inputs: list[Tensor]) -> list[Tensor] | None:
        """What was kept for these very tensors."""
        same = len(inputs) == len(self._inputs)
        return self._found if same and all(map(_is, inputs, self._inputs)) else None

    def keep(self, inputs: list[Tensor], found: list[Tensor]) -> None:
        self._inputs, self._found = inputs, found

    def forget(self) -> None:
        self._inputs, self._found = [], []

    def bytes(self) -> int:
        """The memory that it holds, beside the inputs."""
        given = {x.untyped_storage().data_ptr() for x in self._inputs}
        sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self._found}
        return sum(size for at, size in sizes.items() if at not in given)


KEEPING: ContextVar[Kept | None] = ContextVar("hoglib_keeping", default=None)


class Halves:
    """A backend of `hoglib.compile` for functions whose first `count` tensors are the vector."""

    dynamic, progress = False, True

    def __init__(self, count: int, backend: str, what: str) -> None:
        self._count, self.backend, self.name = count, backend, what
        self.__qualname__ = f"{backend}, in two halves"

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Run:
        count = self._count
        module = functional(module, inputs)
        simplify(module)
        first, second, of_first = split(module, count)
        once = self._made(first, inputs[count:])
        with torch.no_grad():
            kept = [x.detach() for x in once(*inputs[count:])][sum(of_first) :]
        each = self._made(second, [*inputs, *kept])

        def run(*given: Tensor) -> list[Any]:
            keeping, point = KEEPING.get(), list(given[count:])
            found = None if keeping is None else keeping.of(point)
            if found is None:
                found = list(once(*point))
                if keeping is not None:
                    keeping.keep(point, found)
            values = iter(found)
            constant = [next(values) for is_first in of_first if is_first]
            linear = iter(each(*given, *values))
            constants = iter(constant)
            return [next(constants) if is_first else next(linear) for is_first in of_first]

        return run

    def _made(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Run:
        if not any(node.op == "call_function" for node in graph.graph.nodes):
            run: Run = graph.forward
            return run
        return backends.made(self, graph, inputs)[0].run


def _is(a: Tensor, b: Tensor) -> bool:
    return a is b


def split(module: fx.GraphModule, count: int) -> tuple[fx.GraphModule, fx.GraphModule, list[bool]]:
    """The graph of what does not depend on the first `count` inputs, that of the rest, and which
    outputs are of the first.

    The first takes the other inputs, and puts out its outputs and then what the second needs. The
    second takes all inputs, and that.
    """
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    (outputs,) = nodes[-1].args
    depends = set(inputs[:count])
    for node in nodes:
        if node.op == "call_function" and not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
    of_first = [not (isinstance(x, fx.Node) and x in depends) for x in outputs]
    needed, again = _needed(nodes, depends)

    first = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    for node in nodes[:-1]:
        if node not in depends:
            places[node] = first.node_copy(node, places.__getitem__)
    found = [x for x, is_first in zip(outputs, of_first, strict=True) if is_first]
    first.output([places.get(x) if isinstance(x, fx.Node) else x for x in (*found, *needed)])

    second, places = fx.Graph(), {}
    for node in inputs:
        places[node] = second.node_copy(node)
    for node in needed:
        places[node] = second.placeholder(f"kept_{node.name}")
        places[node].meta.update(node.meta)
    for node in nodes[:-1]:
        if node.op == "call_function" and (node in depends or node in again):
            places[node] = second.node_copy(node, places.__getitem__)
    rest = [x for x, is_first in zip(outputs, of_first, strict=True) if not is_first]
    second.output([places[x] for x in rest])
    halves = []
    for graph in (first, second):
        graph.eliminate_dead_code(lambda node: node.is_impure())
        halves.append(fx.GraphModule(module, graph))
    return halves[0], halves[1], of_first


def _needed(nodes: list[fx.Node], depends: set[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """What the second half takes from the first, and what it makes again: views, which take no time,
    and what works on each element by itself, which is fused with what uses it."""
    again: set[fx.Node] = set()
    while True:
        needed = {
            x: None
            for node in nodes
            if (node in depends and node.op == "call_function") or node in again
            for x in node.all_input_nodes
            if x not in depends and x not in again and x.op != "placeholder"
        }
        cheap = [
            x
            for x in needed
            if x.target in VIEWS
            or not isinstance(x.meta.get("val"), Tensor)  # one of several outputs is taken out
            or (
                torch.Tag.pointwise in getattr(x.target, "tags", ())
                and all(
                    y in needed or y in again or y.op == "placeholder" for y in x.all_input_nodes
                )
            )
        ]
        if not cheap:
            return list(needed), again
        again.update(cheap)
