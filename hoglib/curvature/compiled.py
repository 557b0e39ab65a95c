"""Products with a curvature matrix as compiled graphs, which are found again from call to call.

The product with one vector is captured as it runs in eager mode. Where several vectors are multiplied
at one point, the graph is evaluated partially: what does not depend on the vector runs once,

    (v, point) -> (value, M v)    becomes    point -> (value, residuals), (v, point, residuals) -> M v

as the graph of a gradient is kept between products in eager mode.
"""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core.autograd import Vector, grad_enabled
from hoglib._core.references import WeakFunction, lifetime_owner
from hoglib._core.source_location import warn
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_modes import value_checks_off
from hoglib.capture import backend as backends
from hoglib.capture.api import Compiled, function_name
from hoglib.capture.passes import VIEWS, functionalize, simplify
from hoglib.curvature.linear_map import BoundLoss, CurvatureKind, LinearMap, ProductOptions
from hoglib.stand_ins.mode import stand_ins_if

Run = Callable[..., Any]

MOST = 16  # compiled products that are kept for one function
_PRODUCTS: Any = WeakIdKeyDictionary()  # the function, or the owner of a method -> its products
_LOCK = threading.RLock()


def compiled_linear_map(
    kind: CurvatureKind, loss: BoundLoss, leaves: Vector, options: ProductOptions, several: bool
) -> LinearMap:
    """The matrix of a loss at the leaves, as compiled graphs, for one vector or for `several`."""
    partially = several and not options.create_graph
    graphs = _graphs_of(kind, loss, len(leaves), options, partially)
    at = CompiledLinearMap(graphs, loss, leaves, options.create_graph)
    return LinearMap(at.apply, at.residuals.bytes, lambda: at.unused)


@final
class CompiledLinearMap:
    """A compiled product at one point."""

    def __init__(
        self, graphs: Compiled, loss: BoundLoss, leaves: Vector, create_graph: bool
    ) -> None:
        self._graphs, self._loss, self._create_graph = graphs, loss, create_graph
        self._leaves = leaves
        self.residuals = Residuals()

    @property
    def unused(self) -> tuple[int, ...] | None:
        """The leaves that the loss does not depend on."""
        product: Any = self._graphs.fn
        found: tuple[int, ...] | None = product.unused
        return found

    def apply(self, vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        # new tensors: a tensor that is both vector and parameter would be one input of the graph
        inputs = ([v.view_as(v) for v in vector], self._leaves, self._loss.args)
        product: Any = self._graphs.fn
        token = _CALL.set(_Call(lambda: product.eagerly(*inputs), self.residuals))
        try:
            with torch.set_grad_enabled(self._create_graph):
                value, found = self._graphs(*inputs)
        finally:
            _CALL.reset(token)
            if not keep_graph:
                self.residuals.clear()
        if self._create_graph:
            _keep_alive(self._loss.func, (value, *found))
        return value, found


class _Call(NamedTuple):
    """What belongs to one call of a compiled product, in addition to its arguments."""

    eagerly: Callable[[], Any]  # the same product in eager mode, with all its checks of values
    residuals: "Residuals"


# Graphs are called with tensors only, through `Compiled`; the rest of a call goes through here.
_CALL: ContextVar[_Call | None] = ContextVar("hoglib_compiled_product", default=None)


def _run_eagerly() -> None:
    call = _CALL.get()
    if call is not None:
        call.eagerly()


def _graphs_of(
    kind: CurvatureKind, loss: BoundLoss, count: int, options: ProductOptions, partially: bool
) -> Compiled:
    """The graphs of such a product of a function, which are made once."""
    func, caller = loss.func, options.caller
    method = getattr(func, "__func__", None)
    key = (method, kind, options, loss.structure, partially)
    with _LOCK:
        products = _PRODUCTS.setdefault(lifetime_owner(func), {})
        found: Compiled | None = products.get(key)
        if found is None:
            name = f"{caller} of {function_name(func)}"
            backend: Any = options.backend
            if partially:
                backend = PartialEval(count, options.backend, name)
            found = Compiled(
                Product(kind, loss, options), dynamic=False, check=True, name=name,
                before=_run_eagerly, backend=backend,
            )  # fmt: skip
            if len(products) >= MOST:
                products.pop(next(iter(products)))
                warn(
                    f"{caller}(compile=True): {MOST} compiled products of a function are kept, and the "
                    "oldest was dropped. If a likelihood is created at each call, create it once."
                )
            products[key] = found
    return found


@final
class Product:
    """(vector, leaves, args) -> (value, M vector), of the matrix M of a loss: what is captured."""

    def __init__(self, kind: CurvatureKind, loss: BoundLoss, options: ProductOptions) -> None:
        self.weak = WeakFunction(loss.func)
        self._kind, self._structure, self._options = kind, loss.structure, options
        self.unused: tuple[int, ...] | None = None  # leaves, in the last run

    def __call__(self, vector: Vector, leaves: Vector, args: Any) -> tuple[Tensor, Vector]:
        with value_checks_off():
            return self.eagerly(vector, leaves, args)

    def eagerly(self, vector: Vector, leaves: Vector, args: Any) -> tuple[Tensor, Vector]:
        """The product in eager mode, with the checks that look at values."""
        with grad_enabled(), keep_swapped(), stand_ins_if(self._options.stand_ins):
            loss = BoundLoss(self.weak.fn, self._structure, args)
            # as for several vectors: in reverse mode, whose graphs are the smaller ones
            point = self._kind.linearize(loss, leaves, self._options, True)
            value, product = point.apply(vector, False)
        self.unused = point.unused()
        if self._options.create_graph:
            return value, product
        return value.detach(), [part.detach() for part in product]


def _keep_alive(func: Any, outputs: tuple[Tensor, ...]) -> None:
    """Hold func by the graph of the outputs: backward through a product runs func again."""
    for x in outputs:
        if x.grad_fn is not None:
            metadata: Any = x.grad_fn.metadata
            metadata["hoglib_func"] = func


@final
class Residuals:
    """The outputs of the graph that runs once, and the inputs for which it ran."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def of(self, inputs: list[Tensor]) -> list[Tensor] | None:
        """The outputs for these same tensors, where they are kept."""
        same = len(inputs) == len(self._inputs)
        return self._outputs if same and all(map(_is, inputs, self._inputs)) else None

    def keep(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self._inputs, self._outputs = inputs, outputs

    def clear(self) -> None:
        self._inputs, self._outputs = [], []

    def bytes(self) -> int:
        """The memory that the outputs hold, without that of the inputs."""
        inputs = {x.untyped_storage().data_ptr() for x in self._inputs}
        sizes = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self._outputs
        }
        return sum(size for pointer, size in sizes.items() if pointer not in inputs)


def _is(a: Tensor, b: Tensor) -> bool:
    return a is b


@final
class PartialEval:
    """A backend of `hoglib.compile` for functions whose first `count` tensors are the vector."""

    dynamic = False

    def __init__(self, count: int, backend: str, name: str) -> None:
        self._count, self.backend, self.name = count, backend, name
        self.__qualname__ = f"{backend}, partially evaluated"

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Run:
        count = self._count
        module = functionalize(module, inputs)
        simplify(module)
        constant, linear, is_constant = partial_eval(module, count)
        run_once = self._made(constant, inputs[count:])
        with torch.no_grad():
            outputs = run_once(*inputs[count:])
            residuals = [x.detach() for x in outputs][sum(is_constant) :]
        run_each = self._made(linear, [*inputs, *residuals])

        def run(*tensors: Tensor) -> list[Any]:
            call, point = _CALL.get(), list(tensors[count:])
            kept = None if call is None else call.residuals
            found = None if kept is None else kept.of(point)
            if found is None:
                found = list(run_once(*point))
                if kept is not None:
                    kept.keep(point, found)
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
