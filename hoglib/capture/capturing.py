"""Captures a function as a graph, and keeps graphs as long as the object that they belong to."""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core import pytree, torch_internals
from hoglib._core.ambient import AMBIENT, inside
from hoglib._core.autograd import outside_inference_mode
from hoglib._core.closures import ClosureWalker
from hoglib._core.source_location import warn
from hoglib._core.state import preserve_random_state
from hoglib.capture.check import OF_BACKEND, OF_CAPTURE, Comparison, tolerance_of
from hoglib.capture.passes import is_random, pin_strides, simplify
from hoglib.capture.runners import make_runner
from hoglib.capture.signature import CallSignature, Guards, TensorSlot, discard_traced_tensors
from hoglib.capture.trace import InputRef, Traced, trace

CAPTURING = threading.RLock()
MAX_KEPT = 32  # things that are kept for one object


@final
@dataclass(eq=False)
class GraphEntry:
    """One graph of a compiled function: an entry of ``hog.compile(fn).signatures``.

    Attributes:
        arguments: dtypes and shapes of the arguments, in short.
        nodes: The number of operations.
        backend: "inductor", "eager", or the name of the backend function.
        source: "compiled", or "cache" if the compiled code was found there.
        seconds_to_trace: Seconds.
        seconds_to_compile: Seconds.
        draws: Whether the graph draws random numbers.
        code: The graph as Python code.
    Example:
        >>> double = hog.compile(lambda x: x + x, backend="eager")
        >>> double(torch.ones(2))
        tensor([2., 2.])
        >>> double.signatures[0].arguments, double.signatures[0].nodes
        ('float32[2]', 1)
    """

    arguments: str
    nodes: int
    backend: str
    source: str
    seconds_to_trace: float
    seconds_to_compile: float
    draws: bool = field(repr=False)
    code: str = field(repr=False)
    run: Callable[..., Any] = field(repr=False)
    reached: Guards = field(repr=False)
    # Arguments that the function also reaches by another path, and their places among those lifted.
    shared: list[tuple[int, int]] = field(repr=False)
    leaves: list[Any] = field(repr=False)  # of the output; a TensorSlot in the place of a tensor
    structure: Any = field(repr=False)
    differentiable: list[bool] = field(repr=False)  # which tensors of the output require grad
    holds: Callable[[list[Tensor]], bool] = field(repr=False)  # guards on symbolic shapes
    # Of a loss: the gradients that share memory with an input or another one, after the first run.
    aliases: list[int] | None = field(default=None, repr=False)

    @cached_property
    def inputs_named(self) -> list[InputRef]:
        """The inputs that the output names."""
        return [x for x in self.leaves if type(x) is InputRef]

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Runs the graph without recording it; autocast and stand-ins are part of it already.

        Args:
            inputs: The inputs of the graph.
        Returns:
            The tensors among the outputs.
        """
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with torch._C.DisableTorchFunction(), torch_internals.no_autocast():
                return list(self.run(*inputs))
        finally:
            torch._C._set_grad_enabled(grad_mode)

    def resolve(self, fn: Any, form: CallSignature, tensors: list[Tensor]) -> list[Tensor] | None:
        """The tensors that the function reaches now, besides its arguments.

        Args:
            fn: The function.
            form: A call without its tensors.
            tensors: The tensors among its arguments.
        Returns:
            The tensors; None if this is not the graph of such a call.
        """
        lifted = self.reached.resolve((fn, form.constants))
        if lifted is None:
            return None
        if (self.shared or not {*map(id, tensors)}.isdisjoint(map(id, lifted))) and (
            shared_tensors(tensors, lifted) != self.shared
        ):
            return None
        return lifted if self.holds(tensors) else None

    def explain_mismatch(self, fn: Any, form: CallSignature, tensors: list[Tensor]) -> str:
        """Why this is not the graph of a call of the same signature.

        Args:
            fn: The function.
            form: A call without its tensors.
            tensors: The tensors among its arguments.
        Returns:
            What differs, in words.
        """
        root = fn, form.constants
        lifted = self.reached.resolve(root)
        if lifted is None:
            return self.reached.explain(root)
        if shared_tensors(tensors, lifted) != self.shared:
            return "other arguments are also reached by another path"
        return "the assumptions on symbolic sizes do not hold"

    def graph_inputs(self, tensors: list[Tensor], lifted: list[Tensor]) -> list[Tensor]:
        """The inputs of the graph: each tensor once, those that are reached last.

        Args:
            tensors: The tensors among the arguments.
            lifted: The tensors that the function reaches besides.
        Returns:
            The inputs.
        """
        if not self.shared:
            return tensors + lifted
        also_reached = {i for i, _ in self.shared}
        return [x for i, x in enumerate(tensors) if i not in also_reached] + lifted

    def assemble(self, outputs: list[Tensor]) -> Any:
        """The output of the function in its structure.

        Args:
            outputs: The tensors among the outputs.
        Returns:
            The output.
        """
        leaves = [outputs[x.index] if type(x) is TensorSlot else x for x in self.leaves]
        return pytree.unflatten(leaves, self.structure)


class Graphs:
    """The graphs of one function."""

    def __init__(self) -> None:
        self.by_signature: dict[Any, list[GraphEntry]] = {}
        self.full = False
        self.misses = 0  # captures for one signature since a call found its graph

    def all(self) -> list[GraphEntry]:
        return [one for found in list(self.by_signature.values()) for one in found]


class Place(NamedTuple):
    """Where graphs are kept: with which object, and which of its graphs they are."""

    owner: Any
    key: Hashable

    @classmethod
    def of(cls, fn: Any) -> "Place":
        """That of a function; of a method it is its object, since a method is made at each access."""
        return cls(fn.__self__, fn.__func__) if isinstance(fn, MethodType) else cls(fn, None)


_KEPT: Any = WeakIdKeyDictionary()  # owner -> key -> what is kept
_LOCK = threading.Lock()


def kept(place: Place, make: Callable[[], Any], name: str) -> Any:
    """What `make` returns: made once for a place, and kept as long as its owner lives.

    It must not refer to the owner. name: that of the function, in messages.
    """
    with _LOCK:
        try:
            of_owner: dict[Hashable, Any] = _KEPT.setdefault(place.owner, {})
            if place.key in of_owner:
                return of_owner[place.key]
        except TypeError:  # the owner has no weak references, or the key no hash
            return make()
        found = of_owner[place.key] = make()
        full = len(of_owner) > MAX_KEPT
        if full:
            of_owner.pop(next(iter(of_owner)))
    if full:
        warn(
            f"{name}: more than {MAX_KEPT} compiled versions of one function or object were made, and "
            "the oldest was dropped. If a likelihood or a backend is created at each call, create it "
            "once."
        )
    return found


def shared_tensors(tensors: list[Tensor], lifted: list[Tensor]) -> list[tuple[int, int]]:
    """Which arguments the function also reaches by another path: their indices in both lists."""
    places = {id(x): i for i, x in enumerate(tensors)}
    return [(places[id(x)], j) for j, x in enumerate(lifted) if id(x) in places]


class Function(Protocol):
    """What is captured: a `Compiled`."""

    fn: Callable[..., Any]
    backend: Any
    dynamic: bool
    check: bool
    name: str

    def on_tensors(self, form: CallSignature) -> Callable[..., Any]: ...


def capture(
    function: Function, form: CallSignature, tensors: list[Tensor]
) -> tuple[GraphEntry, list[Tensor]]:
    """Traces, simplifies, compiles and checks the graph for a call.

    Returns the graph, and the tensors that the function reaches besides its arguments.
    """
    root = (function.fn, form.constants)
    walk = ClosureWalker(root)
    has_compiled_code = any(map(_is_compiled, walk.objects))
    with (
        outside_inference_mode(),
        torch_internals.without_saved_tensor_hooks(),
        preserve_random_state(),
        torch_internals.eagerly(has_compiled_code),
    ):
        began = perf_counter()
        with discard_traced_tensors(walk):
            traced, shared = _trace(function, form, tensors)
        pin_strides(traced.graph)
        simplify(traced.graph)
        traced.graph.recompile()
        seconds = perf_counter() - began
        own = [i for i in range(len(tensors)) if i not in dict(shared)]
        reached = Guards(root, traced.lifted, traced.modules)
        nodes = sum(node.op == "call_function" for node in traced.graph.graph.nodes)
        code, draws = traced.graph.code, any(map(is_random, traced.graph.graph.nodes))
        inputs = [x.detach() for x in (*(tensors[i] for i in own), *traced.lifted)]
        entry = GraphEntry(
            arguments=form.describe(tensors),
            nodes=nodes,
            backend="eager",
            source="compiled",
            seconds_to_trace=seconds,
            seconds_to_compile=0.0,
            draws=draws,
            code=code,
            run=traced.graph.forward,
            reached=reached,
            shared=shared,
            leaves=traced.leaves,
            structure=traced.structure,
            differentiable=traced.differentiable,
            holds=_shape_guards(traced.graph, own) if function.dynamic else lambda _: True,
        )
        if function.check:  # before compiling, which may take minutes
            with inside(eager=True):  # compiled functions run without their graphs
                comparison = Comparison(
                    function.name, function.on_tensors(form), tensors, entry,
                    tolerance_of(traced.graph),
                    independent=getattr(function.fn, "independent", False),
                )  # fmt: skip
                comparison.check(entry, traced.lifted, OF_CAPTURE)
            reached = reached.refresh(function.name, root, traced.lifted, traced.modules)
        runner, backend = make_runner(
            traced.graph, inputs, function.backend, function.name, function.dynamic
        )
        entry = replace(
            entry, backend=backend, source=runner.source, seconds_to_compile=runner.seconds,
            run=runner.run, reached=reached,
        )  # fmt: skip
        if function.check and backend != "eager":
            comparison.check(entry, traced.lifted, OF_BACKEND, traced.graph)
    return entry, traced.lifted


def runs_elsewhere() -> bool:
    """Whether a call belongs to something that is transformed, traced or compared around it."""
    return (
        AMBIENT.eager
        or torch_internals.transforms_active()
        or torch_internals.forward_mode_active()
        or torch_internals.tracing()
    )


def _is_compiled(value: Any) -> bool:
    """Whether it is a module or a function that torch.compile made, whose code cannot be traced."""
    if isinstance(value, nn.Module):
        return torch_internals.is_compiled(value) or value._compiled_call_impl is not None
    return isinstance(value, FunctionType) and "_torchdynamo_orig_callable" in vars(value)


def _trace(
    function: Function, form: CallSignature, tensors: list[Tensor]
) -> tuple[Traced, list[tuple[int, int]]]:
    """The graph, and which arguments the function also reaches by another path.

    Such an argument and the tensor that is reached are one variable. They are found by a first trace,
    in which they are two.
    """
    run, name = function.on_tensors(form), function.name

    try:
        traced = trace(name, run, tensors, function.dynamic)
        also_reached = {i for i, _ in shared_tensors(tensors, traced.lifted)}
    except Exception:
        # a derivative with respect to one of the two, where the other one was used; or a comparison of
        # the two
        places = ClosureWalker((function.fn, form.constants)).places
        also_reached = {i for i, x in enumerate(tensors) if id(x) in places}
        if not also_reached:
            raise
    if also_reached:
        own = [x for i, x in enumerate(tensors) if i not in also_reached]

        def with_reached(*given: Tensor) -> Any:
            left = iter(given)
            return run(*[x if i in also_reached else next(left) for i, x in enumerate(tensors)])

        traced = trace(name, with_reached, own, function.dynamic)
    return traced, shared_tensors(tensors, traced.lifted)


def _shape_guards(graph: fx.GraphModule, own: list[int]) -> Callable[[list[Tensor]], bool]:
    """Whether the assumptions on symbolic shapes hold for the tensors of a call."""
    placeholders = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")][: len(own)]
    shapes: Any = graph.shape_env

    def hold(tensors: list[Tensor]) -> bool:
        return bool(shapes.evaluate_guards_for_args(placeholders, [tensors[i] for i in own]))

    return hold
