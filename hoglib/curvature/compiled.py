"""Derivatives as compiled graphs, which are found again from call to call.

The product of a curvature matrix with one vector is captured as it runs in eager mode. Where several
vectors are multiplied at one point, the graph is evaluated partially: what does not depend on the
vector runs once,

    (v, point) -> (value, M v)    becomes    point -> (value, residuals), (v, point, residuals) -> M v

as the graph of a gradient is kept between products in eager mode.
"""

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, fx

from hoglib._core import validation
from hoglib._core.autograd import Vector, grad_enabled
from hoglib._core.swap import keep_swapped
from hoglib.capture import backend as backends
from hoglib.capture.api import Compiled, function_name
from hoglib.capture.capturing import Place
from hoglib.capture.passes import VIEWS, simplify
from hoglib.capture.writes import functionalize
from hoglib.curvature.linear_map import BoundLoss, CurvatureKind, LinearMap, ProductOptions
from hoglib.stand_ins.mode import stand_ins_if

Run = Callable[..., Any]
Product = tuple[Tensor, Vector, tuple[int, ...] | None]  # loss, M v, leaves the loss has no use for


def compiled_linear_map(
    kind: CurvatureKind, loss: BoundLoss, leaves: Vector, options: ProductOptions, several: bool
) -> LinearMap:
    """The matrix of a loss at the leaves, as compiled graphs, for one vector or for `several`."""
    name = f"{options.caller} of {function_name(loss.func)}"
    owner, key = Place.of(loss.func)
    backend: Any = options.backend
    if several and not options.create_graph:
        backend = PartialEval(len(leaves), options.backend, name)
    product_of = partial(_product, kind, loss.func, loss.structure, options)
    compiled = Compiled(
        product_of, backend=backend, name=name,
        place=Place(owner, (key, kind, options, loss.structure)), before=product_of,
    )  # fmt: skip
    residuals, unused = Residuals(), None

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        nonlocal unused
        token = _RESIDUALS.set(residuals)
        try:
            with torch.set_grad_enabled(options.create_graph):
                # new tensors: one that is both vector and parameter would be one input of the graph
                fresh = [v.view_as(v) for v in vector]
                value, product, unused = compiled(fresh, leaves, loss.args)
        finally:
            _RESIDUALS.reset(token)
            if not keep_graph:
                residuals.clear()
        return value, product

    return LinearMap(apply, residuals.bytes, lambda: unused)


def call_or_graph(
    caller: str, compile: Any, func: Any, run: Run, key: Hashable, *inputs: Any
) -> Any:
    """run(*inputs), a function of tensors that derives from func, or where compile= says so its graph,
    which is kept with func.

    key: the options of run.
    """
    backend = validation.backend("compile", compile)
    if not backend:
        return run(*inputs)
    owner, own_key = Place.of(func)
    compiled = Compiled(
        run, backend=backend, name=f"{caller} of {function_name(func)}",
        place=Place(owner, (own_key, caller, key)), before=run,
    )  # fmt: skip
    return compiled(*inputs)


def _product(
    kind: CurvatureKind, func: Any, structure: Any, options: ProductOptions,
    vector: Vector, leaves: Vector, args: Any,
) -> Product:  # fmt: skip
    """(vector, leaves, args) -> (value, M vector), of the matrix M of a loss."""
    with grad_enabled(), keep_swapped(), stand_ins_if(options.stand_ins):
        loss = BoundLoss(func, structure, args)
        # as for several vectors: in reverse mode, whose graphs are the smaller ones
        point = kind.linearize(loss, leaves, options, True)
        value, product = point.apply(vector, False)
    if not options.create_graph:
        value, product = value.detach(), [part.detach() for part in product]
    return value, product, point.unused()


@final
class Residuals:
    """The outputs of the graph that runs once, and the inputs for which it ran."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def of(self, inputs: list[Tensor], run_once: Run) -> list[Tensor]:
        """The outputs for these same tensors."""
        if len(inputs) != len(self._inputs) or not all(map(is_, inputs, self._inputs)):
            self._inputs, self._outputs = inputs, list(run_once(*inputs))
        return self._outputs

    def clear(self) -> None:
        self._inputs, self._outputs = [], []

    def bytes(self) -> int:
        """The memory that the outputs hold, without that of the inputs."""
        inputs = {x.untyped_storage().data_ptr() for x in self._inputs}
        sizes = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self._outputs
        }
        return sum(size for pointer, size in sizes.items() if pointer not in inputs)


# Those of the point of a call. Ambient state, because a graph is called with tensors only, and a
# backend that belonged to one point would be compiled anew at each point.
_RESIDUALS: ContextVar[Residuals] = ContextVar("hoglib_residuals")


@final
@dataclass(unsafe_hash=True)
class PartialEval:
    """A backend of `hoglib.compile` for functions whose first `count` tensors are the vector."""

    count: int
    backend: str
    name: str
    dynamic: bool = False

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Run:
        count = self.count
        module = functionalize(module, inputs)
        simplify(module)
        constant, linear, is_constant = partial_eval(module, count)
        run_once = self._made(constant, inputs[count:])
        with torch.no_grad():
            outputs = run_once(*inputs[count:])
            residuals = [x.detach() for x in outputs][sum(is_constant) :]
        run_each = self._made(linear, [*inputs, *residuals])

        def run(*tensors: Tensor) -> list[Any]:
            found = _RESIDUALS.get(Residuals()).of(list(tensors[count:]), run_once)
            split_at = sum(is_constant)
            constants = iter(found[:split_at])
            products = iter(run_each(*tensors, *found[split_at:]))
            return [next(constants) if of_first else next(products) for of_first in is_constant]

        return run

    def _made(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Run:
        if not any(node.op == "call_function" for node in graph.graph.nodes):
            run: Run = graph.forward
            return run
        return backends.make_runner(self, graph, inputs)[0].run


def partial_eval(
    module: fx.GraphModule, count: int
) -> tuple[fx.GraphModule, fx.GraphModule, list[bool]]:
    """The graph of what does not depend on the first `count` inputs, the graph of the rest, and which
    outputs belong to the first.

    The first graph takes the other inputs, and returns its outputs and then the residuals that the
    second one needs. The second takes all inputs and the residuals.
    """
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    (outputs,) = nodes[-1].args
    depends = set(inputs[:count])
    for node in nodes:
        if node.op == "call_function" and not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
    is_constant = [not (isinstance(x, fx.Node) and x in depends) for x in outputs]
    residuals, recomputed = _residuals(nodes, depends)

    first = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    for node in nodes[:-1]:
        if node not in depends:
            places[node] = first.node_copy(node, places.__getitem__)
    constants = [x for x, constant in zip(outputs, is_constant, strict=True) if constant]
    first.output([places.get(x) if isinstance(x, fx.Node) else x for x in (*constants, *residuals)])

    second, places = fx.Graph(), {}
    for node in inputs:
        places[node] = second.node_copy(node)
    for node in residuals:
        places[node] = second.placeholder(f"kept_{node.name}")
        places[node].meta.update(node.meta)
    for node in nodes[:-1]:
        if node.op == "call_function" and (node in depends or node in recomputed):
            places[node] = second.node_copy(node, places.__getitem__)
    products = [x for x, constant in zip(outputs, is_constant, strict=True) if not constant]
    second.output([places[x] for x in products])
    modules = []
    for graph in (first, second):
        graph.eliminate_dead_code(lambda node: node.is_impure())
        modules.append(fx.GraphModule(module, graph))
    return modules[0], modules[1], is_constant


def _residuals(nodes: list[fx.Node], depends: set[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """The nodes that the second graph takes from the first, and those that it computes again.

    Views take no time, and elementwise operations are fused with what uses them.
    """
    recomputed: set[fx.Node] = set()
    while True:
        needed = {
            x: None
            for node in nodes
            if (node in depends and node.op == "call_function") or node in recomputed
            for x in node.all_input_nodes
            if x not in depends and x not in recomputed and x.op != "placeholder"
        }
        cheap = [
            x
            for x in needed
            if x.target in VIEWS
            or not isinstance(x.meta.get("val"), Tensor)  # one of several outputs is selected
            or (
                torch.Tag.pointwise in getattr(x.target, "tags", ())
                and all(
                    y in needed or y in recomputed or y.op == "placeholder"
                    for y in x.all_input_nodes
                )
            )
        ]
        if not cheap:
            return list(needed), recomputed
        recomputed.update(cheap)
