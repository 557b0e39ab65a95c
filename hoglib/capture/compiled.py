"""`hoglib.compile`: a function of pytrees of tensors, second derivatives and all, as one graph."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from hoglib import _arguments as arguments
from hoglib import _functorch, _tree
from hoglib._recording import outside_inference_mode
from hoglib._warning import warn
from hoglib.capture import _check as checking
from hoglib.capture import _inductor as inductor
from hoglib.capture import _signature as signature
from hoglib.capture._derivative import Graph, Pullback
from hoglib.capture._reached import Way, ways_to
from hoglib.capture._simplify import simplify
from hoglib.capture._trace import Place, Traced, trace

BACKENDS = ("inductor", "eager")
MOST = 16  # graphs of one function; beyond, something changes at each call that should be a tensor
_CAPTURING = threading.RLock()
_OF_FUNCTIONS: WeakKeyDictionary[Any, dict[Any, "Graphs"]] = WeakKeyDictionary()


@final
@dataclass(frozen=True, slots=True)
class Captured:
    """One graph of a function, and what it cost: an entry of `compile(fn).signatures`."""

    arguments: str  # dtypes and shapes, in short
    nodes: int  # operations
    backend: str
    source: str  # "compiled", or found in "memory" or on "disk"
    seconds_to_trace: float
    seconds_to_compile: float
    run: Callable[..., Any] = field(repr=False)
    ways: list[Way] = field(repr=False)
    kinds: list[Any] = field(repr=False)
    modules: list[tuple[Way, bool]] = field(repr=False)
    traced: Traced = field(repr=False)
    backward: list["Compiled"] = field(repr=False, default_factory=list)

    def execute(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors among the outputs, without a graph of their own."""
        with torch.no_grad():
            return list(self.run(*tensors))

    def place_of(self, tensor: Tensor) -> int:
        """Which of those that are lifted a tensor of the capture was."""
        return next(i for i, x in enumerate(self.traced.lifted) if x is tensor)

    def pullback(self, compiled: "Compiled") -> "Compiled":
        """Its backward, made when it is first asked for."""
        if not self.backward:
            self.backward.append(
                Compiled(
                    Pullback(compiled, self), backend=compiled.backend, dynamic=compiled.dynamic,
                    check=compiled.check, progress=compiled.progress,
                    name=f"the backward of {compiled.name}",
                )
            )  # fmt: skip
        return self.backward[0]

    def lifted(self, root: Any) -> list[Tensor] | None:
        """The tensors that the function reaches besides its arguments, as they are now; None where
        they, or modes of the modules, are others than those that were captured."""
        for way, training in self.modules:
            module = way.now(root)
            if module is not way.found or module.training is not training:
                return None
        found = [way.now(root) for way in self.ways]
        for tensor, kind in zip(found, self.kinds, strict=True):
            if not isinstance(tensor, Tensor) or signature.of_tensor(tensor) != kind:
                return None
        return found


class Graphs:
    """The graphs of one function, which all that compile it share."""

    def __init__(self) -> None:
        self.by_signature: dict[Any, list[Captured]] = {}
        self.full = False

    def all(self) -> list[Captured]:
        return [one for found in self.by_signature.values() for one in found]


class Compiled:
    """A function that runs as a graph; made by `compile`."""

    def __init__(
        self, fn: Callable[..., Any], *, backend: Any, dynamic: bool, check: bool, name: str | None = None,
        progress: bool = True,
    ) -> None:  # fmt: skip
        self.fn = arguments.function("fn", fn)
        if not callable(backend):
            arguments.one_of("backend", backend, BACKENDS)
        self.backend = backend
        self.dynamic = arguments.flag("dynamic", dynamic)
        self.check = arguments.flag("check", check)
        self.progress = arguments.flag("progress", progress)
        self.name = name or named(fn)
        self._graphs = _graphs_of(fn, (backend, dynamic))
        self.__doc__ = fn.__doc__

    @property
    def signatures(self) -> list[Captured]:
        """What was captured so far, in the order of capture: one graph for each signature."""
        return self._graphs.all()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            _functorch.transforms_active()
            or _functorch.forward_mode_active()
            or _functorch.tracing()
        ):
            return self.fn(*args, **kwargs)  # a part of what is differentiated or captured outside
        leaves, structure = _tree.flatten((args, kwargs))
        found = self.captured(leaves, structure)
        if found is None:
            return self.fn(*args, **kwargs)
        entry, lifted = found
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + lifted
        if torch.is_grad_enabled() and any(entry.traced.recorded):
            outputs = list(Graph.apply(self, entry, leaves, structure, lifted, *tensors))
        else:
            outputs = entry.execute(tensors)
        return assembled(entry, outputs)

    def captured(self, leaves: list[Any], structure: Any) -> tuple[Captured, list[Tensor]] | None:
        """The graph for such a call, and what it is given besides the arguments; None where there are
        too many graphs already."""
        key = signature.of_call(self.name, leaves, structure, self.dynamic)
        for entry in self._graphs.by_signature.get(key, ()):
            lifted = entry.lifted(self.fn)
            if lifted is not None and (not self.dynamic or _holds(entry, leaves)):
                return entry, lifted
        with _CAPTURING:
            if len(self.signatures) >= MOST:
                self._say_full(leaves)
                return None
            entry = self._capture(leaves, structure)
            self._graphs.by_signature.setdefault(key, []).append(entry)
        lifted = entry.lifted(self.fn)
        assert lifted is not None
        return entry, lifted

    def prepared(self, *args: Any) -> Callable[[list[Tensor]], list[Tensor]]:
        """The graph for such a call, as a function of the tensors among its arguments, in their order.

        For calls with the same signature while parameters, buffers and modes stay: nothing is looked up.
        """
        leaves, structure = _tree.flatten((args, {}))
        found = self.captured(leaves, structure)
        if found is None:
            run = self.of_tensors(leaves, structure)
            return lambda tensors: [x for x in _tree.leaves(run(*tensors)) if isinstance(x, Tensor)]
        entry, lifted = found
        return lambda tensors: entry.execute(tensors + lifted)

    def of_tensors(self, leaves: list[Any], structure: Any) -> Callable[..., Any]:
        """The function of the tensors among such arguments."""

        def run(*tensors: Tensor) -> Any:
            left = iter(tensors)
            filled = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = _tree.unflatten(filled, structure)
            return self.fn(*args, **kwargs)

        return run

    def _capture(self, leaves: list[Any], structure: Any) -> Captured:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        run = self.of_tensors(leaves, structure)
        with outside_inference_mode():
            began = perf_counter()
            traced = trace(self.name, run, tensors, self.dynamic)
            simplify(traced.graph)
            seconds = perf_counter() - began
            ways = ways_to(self.fn, [*traced.lifted, *traced.modules])
            inputs = [x.detach() for x in (*tensors, *traced.lifted)]
            made, backend = self._made(traced.graph, inputs)
            entry = Captured(
                arguments=signature.described(leaves),
                nodes=len(traced.graph.graph.nodes),
                backend=backend,
                source=made.source,
                seconds_to_trace=seconds,
                seconds_to_compile=made.seconds,
                run=made.run,
                ways=ways[: len(traced.lifted)],
                kinds=[signature.of_tensor(x) for x in traced.lifted],
                modules=[(way, way.found.training) for way in ways[len(traced.lifted) :]],
                traced=traced,
            )
            if self.check:
                checking.equal(self.name, run, tensors, traced.lifted, entry.execute)
        return entry

    def _made(self, graph: fx.GraphModule, inputs: list[Tensor]) -> tuple[inductor.Made, str]:
        say = inductor.to_stderr if self.progress else _silent
        if callable(self.backend):
            began = perf_counter()
            run = self.backend(graph, inputs)
            return inductor.Made(run, perf_counter() - began, "compiled"), named(self.backend)
        if self.backend == "eager":
            return inductor.Made(_in_order(graph), 0.0, "compiled"), "eager"
        try:
            made = inductor.make(
                graph, inputs, self.dynamic, lambda text: say(f"{text} of {self.name} ...")
            )
        except inductor.NoCompiler as error:
            warn(
                f"{self.name} is not compiled, and runs its {len(graph.graph.nodes):,} operations one by one: "
                f"{error}. Pass backend='eager' to say so yourself."
            )
            return inductor.Made(_in_order(graph), 0.0, "compiled"), "eager"
        if made.source == "compiled":
            say(
                f"compiled {self.name} in {made.seconds:.1f} s, and kept it in {inductor.cache_dir()}"
            )
        return made, "inductor"

    def _say_full(self, leaves: list[Any]) -> None:
        if self._graphs.full:
            return
        self._graphs.full = True
        warn(
            f"{self.name} has {MOST} graphs and captures no more: calls with other arguments, as now "
            f"({signature.described(leaves)}), run as they would without compiling. Pass as tensors what "
            "changes from call to call, give batches of one size, or use dynamic=True."
        )

    def __repr__(self) -> str:
        return (
            f"hoglib.compile({self.name}, backend={self.backend!r}), {len(self.signatures)} graphs"
        )


def compile(
    fn: Callable[..., Any],
    *,
    backend: Any = "inductor",
    dynamic: bool = False,
    check: bool = True,
    progress: bool = True,
    name: str | None = None,
) -> Compiled:
    r"""A function whose derivatives of any order, taken inside it, run as one compiled graph.

        fast = hog.compile(lambda params, v, batch: hog.hvp(loss, params, v, batch))
        value, product = fast(params, v, batch)

    fn: any function of pytrees of tensors (numbers and strings in them are constants), with pytrees of
    tensors out: torch.func transforms, `autograd.grad(create_graph=True)`, hoglib's own functions and
    custom Functions in it are traced through. `torch.compile` takes neither double backward nor a Function
    with a jvp; here the derivatives are operations of the graph by the time that it is compiled.

    It is captured at the first call with a signature: the structure of the arguments, shapes, strides,
    dtypes, devices and requires_grad of their tensors, grad mode, autocast, and what modules that ran are
    in train mode. Parameters, buffers and other tensors that fn reaches are inputs, which each call finds
    where they are then. Python numbers that it reads are constants. `fast.signatures` lists what was
    captured: nodes, seconds to trace and to compile, and where the code came from. Graphs are shared by
    all that compile the same function, at most 16; compiled code by all equal graphs, and with later
    processes (in HOGLIB_CACHE_DIR, by default hoglib in the user's cache directory).

    The outputs are differentiable where those of fn are, to any order: a backward is captured when it is
    first asked for. Inside of transforms, and where something else traces, fn itself runs.

    backend: "inductor", torch's compiler; "eager", the same operations one by one, to the bit, with none
    of the time that autograd and Python take around them and no time to compile; or a function (graph
    module, inputs) -> function. Without a C++ compiler it is "eager", with a warning.
    dynamic: shapes are symbols, for sizes that change from call to call.
    check: the first run of each graph is compared with fn, also at other values.
    name: what the function is called in messages.
    progress: what is compiled, and how long it took, is said on stderr.

    Raises NotImplementedError where fn reads values of tensors (if, .item(), NumPy), changes an argument,
    parameter or buffer in place, or draws from a Generator of its own, naming the line; RuntimeError
    where the graph's results are not those of fn. Nothing is kept of a capture that raises.
    """
    return Compiled(fn, backend=backend, dynamic=dynamic, check=check, progress=progress, name=name)


def operations(fn: Callable[..., Any], *args: Any) -> int:
    """How many operations the graph of a function has."""
    leaves, structure = _tree.flatten((args, {}))
    counted = Compiled(fn, backend="eager", dynamic=False, check=False)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    traced = trace(counted.name, counted.of_tensors(leaves, structure), tensors, False)
    simplify(traced.graph)
    return sum(node.op == "call_function" for node in traced.graph.graph.nodes)


def assembled(entry: Captured, outputs: list[Tensor]) -> Any:
    """The output in the structure that the function gave it."""
    leaves = [outputs[x.index] if isinstance(x, Place) else x for x in entry.traced.leaves]
    return _tree.unflatten(leaves, entry.traced.structure)


def _holds(entry: Captured, leaves: list[Any]) -> bool:
    """Whether what was assumed of symbolic shapes is so."""
    shapes = entry.traced.shape_env
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    placeholders = [n.meta["val"] for n in entry.traced.graph.graph.nodes if n.op == "placeholder"]
    return bool(shapes.evaluate_guards_for_args(placeholders[: len(tensors)], tensors))


def _graphs_of(fn: Any, options: Any) -> Graphs:
    with _CAPTURING:
        try:
            return _OF_FUNCTIONS.setdefault(fn, {}).setdefault(options, Graphs())
        except TypeError:  # no weak reference, or no hash
            return Graphs()


def _in_order(graph: fx.GraphModule) -> Callable[..., Any]:
    run: Callable[..., Any] = graph.forward
    return run


def named(fn: Any) -> str:
    """What to call a function in a message."""
    if isinstance(fn, nn.Module):
        return type(fn).__name__
    return str(getattr(fn, "__qualname__", None) or repr(fn)).rpartition("<locals>.")[2]


def _silent(text: str) -> None: ...
