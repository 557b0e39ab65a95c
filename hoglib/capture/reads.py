"""Values of integer and boolean tensors that a function reads while it is traced: guards of its graph.

`attention_mask.all()`, `int(lengths.max())` or `x[mask]` have no result on tensors without values. If
the value depends on integer and boolean inputs only, it is computed from the operations that were
recorded so far, and the trace goes on with it. Each call computes it again, by a graph of these
operations; if it differs, the function is captured for the new value.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from hoglib._core import torch_internals
from hoglib._core.source_location import is_user_file
from hoglib.capture.nodes import is_random, needed_nodes
from hoglib.capture.passes import VIEWS, simplify
from hoglib.errors import UnsupportedError

aten: Any = torch.ops.aten

_NEW_CONSTANTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
_MAX_SHOWN = 8  # items of a value in a message


class Read(NamedTuple):
    """A value that the function read."""

    how: str  # "Tensor.item in file:line"
    value: Tensor


class Recorder:
    """Computes the values that are read during one trace, and records them."""

    def __init__(self, what: str, given: Sequence[Tensor]) -> None:
        self._what, self._how = what, ""
        self.reads: list[Read] = []
        self.outputs: list[Tensor] = []  # traced; to be further outputs of the graph
        self._given = [x.detach() for x in given]

    @contextmanager
    def named(self, how: str) -> Iterator[None]:
        """What reads inside, in messages; the outermost name is used."""
        before, self._how = self._how, self._how or how
        try:
            yield
        finally:
            self._how = before

    def read(self, tensor: Tensor, any_dtype: bool = False) -> Tensor:
        """The value of a tensor. Raises UnsupportedError if it depends on random numbers, or on
        floating-point inputs and not ``any_dtype``."""
        copy = aten.clone.default(tensor)  # the tensor may be written to later
        node, root = self._node(copy)
        nodes = needed_nodes(node.graph.nodes, [node])
        if any(map(is_random, nodes)):
            raise self._error()
        inputs = self._inputs(node.graph, root)
        constant = inputs.keys().isdisjoint(nodes)
        if not constant and not any_dtype:
            depends_on = inputs.keys() & needed_nodes(node.graph.nodes, [node], through_info=False)
            if _is_inexact(tensor) or any(_is_inexact(inputs[x]) for x in depends_on):
                raise self._error()
        value = _evaluate(nodes, inputs, root)[node]
        if not constant:
            self.reads.append(Read(f"{self._how}{user_line()}", value))
            self.outputs.append(copy)
        return value

    def same(self, a: Tensor, b: Tensor) -> bool:
        """Whether two tensors were computed by the same operations from the same tensors."""
        (first, root), (second, _) = map(self._node, (aten.clone.default(a), aten.clone.default(b)))
        nodes = list(first.graph.nodes)
        graph = subgraph(nodes, [first, second], root)
        simplify(graph)
        *_, output = graph.graph.nodes
        found: Any = output.args[0]
        return found[0] is found[1]

    def is_given(self, tensor: Tensor) -> bool:
        """Whether it consists of the items of an argument, or of a tensor that exists before."""
        node, _ = self._node(aten.clone.default(tensor))
        nodes = needed_nodes(node.graph.nodes, [node])
        copies = {*VIEWS, *_NEW_CONSTANTS, aten.clone.default}
        return all(x.op != "call_function" or x.target in copies for x in nodes)

    def _node(self, tensor: Tensor) -> tuple[fx.Node, Any]:
        """The node of a traced tensor, and what holds the constants of its graph."""
        mode = get_proxy_mode()
        if mode is None or not isinstance(tensor, FakeTensor):
            raise self._error()
        tracer: Any = mode.tracer
        slot: Any = get_proxy_slot(tensor, tracer)
        return slot.proxy.node, tracer.root

    def _error(self) -> Exception:
        return value_read_error(self._what, self._how, user_line())

    def _inputs(self, graph: fx.Graph, root: Any) -> dict[fx.Node, Tensor]:
        """The values of arguments, and of tensors that exist before the function runs."""
        given = iter(self._given)
        found = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                found[node] = next(given)
            elif node.op == "get_attr" and not all(x.target in _NEW_CONSTANTS for x in node.users):
                found[node] = getattr(root, str(node.target))
        return found


class ReadGuards:
    """The values that a function read at the capture, and a graph that computes them again."""

    def __init__(self, graph: fx.GraphModule, reads: list[Read]) -> None:
        self.reads = reads
        self._graph = graph

    def change(self, inputs: list[Tensor]) -> str | None:
        """In words, the first value that differs from that of the capture."""
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch_internals.no_autocast():
            found = self._graph(*inputs)
        for read, now in zip(self.reads, found, strict=True):
            if not torch.equal(read.value, now):
                was = _describe(read.value)
                return f"{read.how} reads {_describe(now)} instead of {was}"
        return None


def split_reads(module: fx.GraphModule, reads: list[Read]) -> ReadGuards | None:
    """Takes the last outputs of a graph, the values that are read, to a graph of their own."""
    if not reads:
        return None
    *nodes, output = module.graph.nodes
    results: Any = output.args[0]
    results, wanted = results[: -len(reads)], results[-len(reads) :]
    output.args = (results,)
    guards = subgraph(nodes, wanted, module)
    simplify(guards)
    *_, output = guards.graph.nodes
    computed: Any = output.args[0]
    distinct = dict(zip(reversed(computed), reversed(reads), strict=True))
    output.args = (list(distinct),)
    guards.recompile()
    return ReadGuards(guards, list(distinct.values()))


def subgraph(nodes: list[fx.Node], wanted: list[fx.Node], root: Any) -> fx.GraphModule:
    """The graph of what some nodes are computed from, with all inputs; a tensor is one constant."""
    graph, places = fx.Graph(), {}
    constants: dict[int, fx.Node] = {}
    needed = set(needed_nodes(nodes, wanted))
    for node in nodes:
        if node.op == "get_attr" and node in needed:
            value = getattr(root, str(node.target))
            if id(value) not in constants:
                constants[id(value)] = graph.node_copy(node)
            places[node] = constants[id(value)]
        elif node.op == "placeholder" or node in needed:
            places[node] = graph.node_copy(node, places.__getitem__)
    graph.output([places[x] for x in wanted])
    return fx.GraphModule(root, graph)


def _describe(value: Tensor) -> str:
    if value.numel() > _MAX_SHOWN:
        return f"{value.numel():,} numbers"
    return str(value.tolist())


@contextmanager
def outside_trace() -> Iterator[None]:
    """Inside, operations compute with values, and are not recorded."""
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch_internals.no_autocast(),
    ):
        yield


def _is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _evaluate(nodes: list[fx.Node], inputs: dict[fx.Node, Tensor], root: Any) -> dict[fx.Node, Any]:
    """The values of nodes, outside of the trace."""
    found: dict[fx.Node, Any] = {}
    with outside_trace():
        for node in nodes:
            if node in inputs:
                found[node] = inputs[node]
            elif node.op == "get_attr":
                found[node] = getattr(root, str(node.target))
            else:
                run: Any = node.target
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), found.__getitem__)
                found[node] = run(*args, **kwargs)
    return found


def value_read_error(what: str, how: str, where: str) -> Exception:
    return UnsupportedError(
        f"{what}: expected a function whose graph is the same for all values of its tensors, got one "
        f"that reads them ({how}{where}): the value that if, float(), .item() or NumPy reads would "
        "become a constant. Use torch.where, keep numbers as tensors, or move this part out of the "
        "function."
    )


def user_line(trace: TracebackType | None = None) -> str:
    """The innermost file and line of the user's, of the current stack or of a traceback."""
    if trace is None:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if is_user_file(frame.f_code.co_filename):
                return f" in {frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return ""
    found = ""
    at: TracebackType | None = trace
    while at is not None:
        if is_user_file(at.tb_frame.f_code.co_filename):
            found = f" in {at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
        at = at.tb_next
    return found
