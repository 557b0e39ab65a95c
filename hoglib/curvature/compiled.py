"""A captured product in two graphs: what does not depend on the vector, and the linear map left.

    (v, point) -> (value, M v)    becomes    point -> (value, kept)    and    (v, point, kept) -> M v

The first runs once for all vectors at a point, as the graph of a gradient is kept in eager mode.
"""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, grad_enabled
from hoglib._core.closures import Weak, holder
from hoglib._core.source_location import warn
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_modes import value_checks_off
from hoglib.capture import backend as backends
from hoglib.capture.api import Compiled, named
from hoglib.capture.passes import VIEWS, functional, simplify
from hoglib.curvature.kinds import DIFFERENCES, CurvatureKind
from hoglib.curvature.routes import Call, LinearMap
from hoglib.errors import ArgumentValueError, UnsupportedError
from hoglib.stand_ins.mode import stand_ins_if

Run = Callable[..., Any]


class Residuals:
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


RESIDUALS: ContextVar[Residuals | None] = ContextVar("hoglib_keeping", default=None)


class PartialEval:
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
            keeping, point = RESIDUALS.get(), list(given[count:])
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


# === Products as compiled graphs, found again from call to call.
#
# The product with one vector is captured as it runs in eager mode. Where several vectors are
# multiplied
# at one point it runs in two halves, the first of them once.

MOST = 16  # products of one function; beyond, something is made anew for each
_KNOWN: Any = WeakIdKeyDictionary()  # what a function lives as long as -> its products
_KNOWING = threading.RLock()


def backend_of(what: str, compile: Any, matrix: CurvatureKind) -> str:
    """The backend that `compile` names, or "" for none."""
    if isinstance(compile, str):
        backend = validation.one_of("compile", compile, ["inductor", "eager"])
    else:
        backend = "inductor" if validation.flag("compile", compile) else ""
    if backend and matrix.mode == DIFFERENCES:
        raise ArgumentValueError(
            f"{what}(mode='{DIFFERENCES}', compile=True): expected a mode that differentiates twice, "
            "got differences, which look at values to find their step. Leave one of the two out."
        )
    if backend and matrix.draws:
        raise UnsupportedError(
            f"{what}(kind='mc', compile=True): expected a Fisher matrix without draws, got a sampled "
            "one; draws of a torch.Generator cannot stand in a graph. Use kind='exact', of which it is "
            "an estimate, or compile=False."
        )
    return backend


class Product:
    """(vector, leaves, args) -> (value, M vector), of the matrix M of a function: what is captured."""

    def __init__(
        self, func: Any, matrix: CurvatureKind, call: Call, stand_ins: bool, structure: Any
    ) -> None:
        self.weak = Weak(func)
        self._matrix, self._call, self._stand_ins = matrix, call, stand_ins
        self._params_of = partial(pytree.unflatten, structure=structure)
        self.unused: tuple[int, ...] | None = None  # leaves, as it was found last

    def __call__(self, vector: Vector, leaves: Vector, args: Any) -> tuple[Tensor, Vector]:
        with value_checks_off():
            return self.eagerly(vector, leaves, args)

    def eagerly(self, vector: Vector, leaves: Vector, args: Any) -> tuple[Tensor, Vector]:
        """The same with all that is looked at by value on the way."""
        with grad_enabled(), keep_swapped(), stand_ins_if(self._stand_ins):
            # as for several vectors: in reverse mode, whose graphs are the smaller ones
            point = self._matrix.at(self.weak.fn, self._params_of, args, leaves, self._call, True)
            value, product = point.apply(vector, False)
        self.unused = point.unused
        if self._call.create_graph:
            return value, product
        return value.detach(), [part.detach() for part in product]


_NOW: ContextVar[Callable[[], Any]] = ContextVar("hoglib_product")


class CompiledLinearMap:
    """A compiled product at one point."""

    def __init__(
        self, graphs: Compiled, func: Any, leaves: Vector, args: Any, create_graph: bool
    ) -> None:
        self._graphs, self._func, self._create_graph = graphs, func, create_graph
        self._leaves, self._args = leaves, args
        self.kept = Residuals()

    @property
    def unused(self) -> tuple[int, ...] | None:
        """The leaves that the function does not depend on."""
        product: Any = self._graphs.fn
        found: tuple[int, ...] | None = product.unused
        return found

    def apply(self, vector: Vector, keep: bool) -> tuple[Tensor, Vector]:
        # tensors of its own, or what is given as both vector and parameters would be one input
        given = ([v.view_as(v) for v in vector], self._leaves, self._args)
        product: Any = self._graphs.fn
        tokens = _NOW.set(lambda: product.eagerly(*given)), RESIDUALS.set(self.kept)
        try:
            with torch.set_grad_enabled(self._create_graph):
                value, found = self._graphs(*given)
        finally:
            _NOW.reset(tokens[0])
            RESIDUALS.reset(tokens[1])
            if not keep:
                self.kept.forget()
        if self._create_graph:
            _keep_alive(self._func, (value, *found))
        return value, found


def linearised(
    func: Any, matrix: CurvatureKind, call: Call, stand_ins: bool, backend: str,
    leaves: Vector, structure: Any, args: Any, several: bool,
) -> LinearMap:  # fmt: skip
    """The matrix at a point, as compiled graphs of func; for one vector or for several."""
    graphs = _graphs_of(func, matrix, call, stand_ins, backend, structure, len(leaves), several)
    at = CompiledLinearMap(graphs, func, leaves, args, call.create_graph)
    return LinearMap(at.apply, compiled=at)


def _graphs_of(
    func: Any, matrix: CurvatureKind, call: Call, stand_ins: bool, backend: str, structure: Any,
    count: int, several: bool,
) -> Compiled:  # fmt: skip
    halves = several and not call.create_graph
    strict = None if call.strict is None else tuple(call.strict)
    method = getattr(func, "__func__", None)
    key = (
        method, matrix.key(), call.what, call.create_graph, strict, stand_ins, backend, structure,
        halves,
    )  # fmt: skip
    with _KNOWING:
        of_func = _KNOWN.setdefault(holder(func), {})
        found: Compiled | None = of_func.get(key)
        if found is None:
            name = f"{call.what} of {named(func)}"
            product = Product(func, matrix, call, stand_ins, structure)
            found = Compiled(
                product, dynamic=False, check=True, name=name,
                before=lambda: _NOW.get()(),  # the product as it runs without, guards and all
                backend=PartialEval(count, backend, name) if halves else backend,
            )  # fmt: skip
            if len(of_func) >= MOST:
                of_func.pop(next(iter(of_func)))
                warn(
                    f"{call.what}(compile=True): {MOST} compiled products of a function are kept, and "
                    "the oldest is forgotten. If a likelihood is made anew for each call, make it once."
                )
            of_func[key] = found
    return found


def _keep_alive(func: Any, outputs: tuple[Tensor, ...]) -> None:
    """Backward through a product runs func again."""
    for x in outputs:
        if x.grad_fn is not None:
            metadata: Any = x.grad_fn.metadata
            metadata["hoglib_func"] = func
