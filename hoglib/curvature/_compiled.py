"""Products as compiled graphs, found again from call to call.

The product with one vector is captured as it runs in eager mode. Where several vectors are multiplied
at one point it runs in two halves, the first of them once.
"""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._guarding import unguarded
from hoglib._leaves import Vector
from hoglib._recording import recording
from hoglib._substitution import lingering
from hoglib._warning import warn
from hoglib.capture._weak import Weak, holder
from hoglib.capture.compiled import Compiled, named
from hoglib.curvature._halves import KEEPING, Halves, Kept
from hoglib.curvature._matrices import DIFFERENCES, Matrix
from hoglib.curvature._routes import Call, Linearised
from hoglib.stand_ins import stand_ins_if

MOST = 16  # products of one function; beyond, something is made anew for each
_KNOWN: Any = WeakIdKeyDictionary()  # what a function lives as long as -> its products
_KNOWING = threading.RLock()


def backend_of(what: str, compile: Any, matrix: Matrix) -> str:
    """The backend that `compile` names, or "" for none."""
    if isinstance(compile, str):
        backend = arguments.one_of("compile", compile, ["inductor", "eager"])
    else:
        backend = "inductor" if arguments.flag("compile", compile) else ""
    if backend and matrix.mode == DIFFERENCES:
        raise arguments.WrongValue(
            f"{what}(mode='{DIFFERENCES}', compile=True): expected a mode that differentiates twice, "
            "got differences, which look at values to find their step. Leave one of the two out."
        )
    if backend and matrix.draws:
        raise arguments.NotSupported(
            f"{what}(kind='mc', compile=True): expected a Fisher matrix without draws, got a sampled "
            "one; draws of a torch.Generator cannot stand in a graph. Use kind='exact', of which it is "
            "an estimate, or compile=False."
        )
    return backend


class Product:
    """(vector, leaves, args) -> (value, M vector), of the matrix M of a function: what is captured."""

    def __init__(
        self, func: Any, matrix: Matrix, call: Call, stand_ins: bool, structure: Any
    ) -> None:
        self.weak = Weak(func)
        self._matrix, self._call, self._stand_ins = matrix, call, stand_ins
        self._params_of = partial(_tree.unflatten, structure=structure)
        self.unused: tuple[int, ...] | None = None  # leaves, as it was found last

    def __call__(self, vector: Vector, leaves: Vector, args: Any) -> tuple[Tensor, Vector]:
        with unguarded():
            return self.eagerly(vector, leaves, args)

    def eagerly(self, vector: Vector, leaves: Vector, args: Any) -> tuple[Tensor, Vector]:
        """The same with all that is looked at by value on the way."""
        with recording(), lingering(), stand_ins_if(self._stand_ins):
            # as for several vectors: in reverse mode, whose graphs are the smaller ones
            point = self._matrix.at(self.weak.fn, self._params_of, args, leaves, self._call, True)
            value, product = point.apply(vector, False)
        self.unused = point.unused
        if self._call.create_graph:
            return value, product
        return value.detach(), [part.detach() for part in product]


_NOW: ContextVar[Callable[[], Any]] = ContextVar("hoglib_product")


class At:
    """A compiled product at one point."""

    def __init__(
        self, graphs: Compiled, func: Any, leaves: Vector, args: Any, create_graph: bool
    ) -> None:
        self._graphs, self._func, self._create_graph = graphs, func, create_graph
        self._leaves, self._args = leaves, args
        self.kept = Kept()

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
        tokens = _NOW.set(lambda: product.eagerly(*given)), KEEPING.set(self.kept)
        try:
            with torch.set_grad_enabled(self._create_graph):
                value, found = self._graphs(*given)
        finally:
            _NOW.reset(tokens[0])
            KEEPING.reset(tokens[1])
            if not keep:
                self.kept.forget()
        if self._create_graph:
            _keep_alive(self._func, (value, *found))
        return value, found


def linearised(
    func: Any, matrix: Matrix, call: Call, stand_ins: bool, backend: str,
    leaves: Vector, structure: Any, args: Any, several: bool,
) -> Linearised:  # fmt: skip
    """The matrix at a point, as compiled graphs of func; for one vector or for several."""
    graphs = _graphs_of(func, matrix, call, stand_ins, backend, structure, len(leaves), several)
    at = At(graphs, func, leaves, args, call.create_graph)
    return Linearised(at.apply, compiled=at)


def _graphs_of(
    func: Any, matrix: Matrix, call: Call, stand_ins: bool, backend: str, structure: Any,
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
                backend=Halves(count, backend, name) if halves else backend,
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
