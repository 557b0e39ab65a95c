"""Products with curvature matrices by compiled graphs; later calls reuse the graphs.

The product with one vector is captured as it runs in eager mode. For several vectors at one point the
graph is split in two (partial evaluation): the first part does not depend on the vector and runs once,

    (v, point) -> (value, M v)    becomes    point -> (value, residuals), (v, point, residuals) -> M v

The residuals correspond to the gradient's graph, which eager mode keeps between products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, fx

from hoglib._core.messages.closures import name_of
from hoglib._core.problem import Policy, Problem
from hoglib._core.runtime.ambient import AMBIENT, inside
from hoglib._core.substrate.autograd import Vector, at_even
from hoglib.capture.api import Compiled
from hoglib.capture.capturing import CacheSlot
from hoglib.capture.passes import VIEWS, functionalize
from hoglib.capture.runners import make_runner
from hoglib.curvature.maps.linear_map import CurvatureKind, LinearMap
from hoglib.ring import ring

Run = Callable[..., Any]


def compiled_linear_map(kind: CurvatureKind, problem: Problem, several: bool) -> LinearMap:
    """The matrix at the leaves of a problem as compiled graphs, for one vector or for `several`."""
    policy = problem.policy
    name = f"{policy.caller} of {name_of(problem.loss)}"
    backend: Any = policy.backend
    if several and not policy.create_graph:
        backend = PartialEval(len(problem.leaves), policy.backend, name)
    body = partial(_product, kind, problem.loss, problem.structure, policy)
    place = CacheSlot.of(problem.loss, name, kind, policy, problem.structure)
    compiled = Compiled(body, backend=backend, name=name, place=place, precheck=body)
    residuals, unused = Residuals(), None

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        nonlocal unused
        try:
            # Residuals are passed by AMBIENT: a graph takes tensors only, and a backend object that
            # holds residuals would be a new cache key at each point.
            graphs = AMBIENT.graphs._replace(residuals=residuals)
            with inside(graphs=graphs), torch.set_grad_enabled(policy.create_graph):
                # view_as: if one tensor is both vector and parameter, capture must see two inputs.
                # at_even: a captured view_as_complex is not checked again for odd offsets.
                fresh = [at_even(v.view_as(v)) for v in vector]
                value, product, unused = compiled(fresh, problem.leaves, problem.args)
        finally:
            if not keep_graph:
                residuals.clear()
        return value, product

    return LinearMap(apply, residuals.bytes, lambda: unused)


def _product(
    kind: CurvatureKind,
    loss: object,
    structure: object,
    policy: Policy,
    vector: Vector,
    leaves: Vector,
    args: tuple[Any, ...],
) -> tuple[Tensor, Vector, tuple[int, ...] | None]:
    """(vector, leaves, args) -> (value, M vector, indices of unused leaves)."""
    around = ring(policy, loss, examine=False)
    with around as blocks:
        problem = Problem(policy, loss, structure, leaves, args).entered(blocks)
        # several=True selects reverse mode, which has smaller graphs.
        point = kind.linearize(problem, True)
        around.note_gradient(point.gradient)
        value, product = point.apply(vector, False)
    if not policy.create_graph:
        value, product = value.detach(), [part.detach() for part in product]
    return value, product, point.unused()


def linearizer(kind: CurvatureKind, captured: bool) -> Callable[[Problem, bool], LinearMap]:
    """`kind.linearize`, or its compiled graphs if the product is captured as a whole."""
    return partial(compiled_linear_map, kind) if captured else kind.linearize


@final
class Residuals:
    """The inputs and outputs of the last run of the graph that runs once at a point."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []  # the point
        self._outputs: list[Tensor] = []  # value and residuals at the point

    def of(self, inputs: list[Tensor], run_once: Run) -> list[Tensor]:
        """run_once(*inputs); the last outputs if the inputs are the last tensors."""
        if len(inputs) != len(self._inputs) or not all(map(is_, inputs, self._inputs)):
            self._inputs, self._outputs = inputs, list(run_once(*inputs))
        return self._outputs

    def clear(self) -> None:
        self._inputs, self._outputs = [], []

    def bytes(self) -> int:
        """The bytes of the outputs' storages, not counting storages of the inputs."""
        inputs = {x.untyped_storage().data_ptr() for x in self._inputs}
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in self._outputs}
        return sum(x.nbytes() for pointer, x in storages.items() if pointer not in inputs)


@final
@dataclass(unsafe_hash=True)
class PartialEval:
    """A backend of `hoglib.compile` that runs the vector-independent part of a graph once."""

    count: int  # the first `count` tensors of a function are the vector
    backend: str  # compiles both parts
    name: str  # of the function, for messages

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Run:
        count = self.count
        # `depends` follows the arguments of nodes, so in-place writes must be removed before.
        module = functionalize(module, inputs)
        given = module.graph.find_nodes(op="placeholder")
        outputs: Any = module.graph.output_node().args[0]
        depends = set(given[:count])
        for node in module.graph.nodes:
            if node.op == "call_function" and not depends.isdisjoint(node.all_input_nodes):
                depends.add(node)
        values = [x for x in outputs if x not in depends]
        products = [x for x in outputs if x in depends]
        residuals = _saved_nodes(module.graph, depends)
        run_once = self._made(_part(module, given[count:], [*values, *residuals]), inputs[count:])
        with torch.no_grad():
            # Example residuals, to compile the second part.
            found = [x.detach() for x in run_once(*inputs[count:])[len(values) :]]
        run_each = self._made(_part(module, [*given, *residuals], products), [*inputs, *found])

        def run(*tensors: Tensor) -> list[Any]:
            found = (AMBIENT.graphs.residuals or Residuals()).of(list(tensors[count:]), run_once)
            once = iter(found[: len(values)])
            each = iter(run_each(*tensors, *found[len(values) :]))
            return [next(each) if x in depends else next(once) for x in outputs]

        return run

    def _made(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Run:
        if not any(node.op == "call_function" for node in graph.graph.nodes):
            return graph.forward
        return make_runner(graph, inputs, self.backend, self.name).run


def _saved_nodes(graph: fx.Graph, depends: set[fx.Node]) -> list[fx.Node]:
    """The residuals: nodes independent of the vector with a dependent user."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        for x in node.all_input_nodes if node in depends else ():
            # Save the base of a view: making the view again costs nothing.
            while x.target in VIEWS and x not in depends:
                x = x.all_input_nodes[0]
            if x.op == "call_function" and x not in depends:
                found[x] = None
    return list(found)


def _part(module: fx.GraphModule, inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
    """The subgraph from `inputs`, which may be inner nodes, to `outputs`."""
    needed = {x for x in outputs if isinstance(x, fx.Node)} - set(inputs)
    for node in reversed(module.graph.nodes):
        if node in needed:
            needed.update(x for x in node.all_input_nodes if x not in inputs)
    part = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        places[node] = part.placeholder(node.name)
        places[node].meta.update(node.meta)
    for node in module.graph.nodes:
        if node in needed:
            places[node] = part.node_copy(node, places.__getitem__)
    part.output([places[x] if isinstance(x, fx.Node) else x for x in outputs])
    return fx.GraphModule(module, part)
