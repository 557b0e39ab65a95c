"""The graphs of a function, which all that compile it share, and what is known of each."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import FunctionType, MethodType
from typing import Any, Protocol, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import outside_inference_mode
from hoglib._core.closures import ClosureWalker
from hoglib._core.state import preserve_random_state, random_state, set_random_state
from hoglib.capture import backend as backends
from hoglib.capture.guards import Guards, nothing_left
from hoglib.capture.passes import simplify
from hoglib.capture.signature import CallSignature
from hoglib.capture.trace import Place, Traced, alike, is_random, trace
from hoglib.errors import NoSecondDerivative, UnsupportedError

CAPTURING = threading.RLock()


@final
@dataclass(frozen=True, eq=False)
class GraphEntry:
    """One graph of a function, and what it cost: an entry of `compile(fn).signatures`."""

    arguments: str  # dtypes and shapes, in short
    nodes: int  # operations
    backend: str
    source: str  # "compiled", or found in "memory" or on "disk"
    seconds_to_trace: float
    seconds_to_compile: float
    draws: bool = field(repr=False)  # random numbers
    code: str = field(repr=False)  # of the graph, to be read
    run: Callable[..., Any] = field(repr=False)
    reached: Guards = field(repr=False)
    shared: list[tuple[int, int]] = field(
        repr=False
    )  # arguments that are also reached, and as which
    leaves: list[Any] = field(repr=False)  # of the output; a Place where a tensor stands
    structure: Any = field(repr=False)
    recorded: list[bool] = field(repr=False)  # which of its tensors have a graph in eager mode
    backward: "Graphs" = field(repr=False)  # of its pullback
    holds: Callable[[list[Tensor]], bool] = field(repr=False)  # what was assumed of symbolic shapes

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """The tensors among the outputs, without a graph of their own.

        What autocast, stand-ins and a default device do is in the graph already.
        """
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with torch._C.DisableTorchFunction(), torch_internals.no_autocast():
                return list(self.run(*inputs))
        finally:
            torch._C._set_grad_enabled(recording)

    def found(self, fn: Any, form: CallSignature, tensors: list[Tensor]) -> list[Tensor] | None:
        """The tensors that the function reaches besides its arguments, as they are now; None where the
        graph is not that of such a call."""
        lifted = self.reached.now((fn, form.others))
        if lifted is None or shared(tensors, lifted) != self.shared or not self.holds(tensors):
            return None
        return lifted

    def inputs(self, tensors: list[Tensor], lifted: list[Tensor]) -> list[Tensor]:
        """What the graph is given: arguments that are not reached otherwise, and what is reached."""
        if not self.shared:
            return tensors + lifted
        also = {i for i, _ in self.shared}
        return [x for i, x in enumerate(tensors) if i not in also] + lifted

    def assembled(self, outputs: list[Tensor]) -> Any:
        """The output in the structure that the function gave it."""
        leaves = [outputs[x.index] if type(x) is Place else x for x in self.leaves]
        return pytree.unflatten(leaves, self.structure)


class Graphs:
    """The graphs of one function."""

    def __init__(self) -> None:
        self.by_signature: dict[Any, list[GraphEntry]] = {}
        self.full = False

    def all(self) -> list[GraphEntry]:
        return [one for found in list(self.by_signature.values()) for one in found]


_OF_FUNCTIONS: WeakKeyDictionary[Any, dict[Any, Graphs]] = WeakKeyDictionary()


def of_function(fn: Any, options: Any) -> Graphs:
    """The graphs of a function, for as long as it lives; of a method, for as long as its object."""
    holder, key = (
        (fn.__self__, (fn.__func__, options)) if isinstance(fn, MethodType) else (fn, options)
    )
    with CAPTURING:
        try:
            return _OF_FUNCTIONS.setdefault(holder, {}).setdefault(key, Graphs())
        except TypeError:  # no weak reference, or no hash
            return Graphs()


def shared(tensors: list[Tensor], lifted: list[Tensor]) -> list[tuple[int, int]]:
    """Which arguments are also reached otherwise, by their places in both lists."""
    places = {id(x): i for i, x in enumerate(tensors)}
    return [(places[id(x)], j) for j, x in enumerate(lifted) if id(x) in places]


# === Whether a graph computes what the function does: at the values of the first call, and at
# others.

# Of the norm of an output. The order of sums is another one in compiled code, and what a kink or a
# cancellation makes of that in float32 is more than rounding; what is traced in is off by far more.
OFF = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-3, torch.complex64: 2e-3}
COARSE = 5e-2  # half precision
# of all outputs: a gradient that cancels out, as of a last bias, is nothing but rounding
ROUNDING = 1e-4


def equal(
    what: str,
    function: Callable[..., Any],
    tensors: list[Tensor],
    lifted: list[Tensor],
    entry: GraphEntry,
    *,
    apart: bool,
) -> None:
    """Raises RuntimeError where the graph's outputs differ from the function's. Random generators are
    left in another state.

    At other values first: what modules keep of the last run is then of the values that were given. At
    those, the tensors are the given ones with their graphs, by which the function may differentiate;
    apart: it differentiates by each argument as if it was computed from none of the others.
    """
    others = _others(tensors)
    own = [x.clone() if x.is_inference() else alike(x) if apart else x for x in tensors]
    for i, _ in entry.shared:  # which are also reached otherwise, as they are
        others[i] = own[i] = tensors[i]
    for which, given in ((" for other values than those it was captured with", others), ("", own)):
        try:
            state = random_state()
            expected = _tensors(function(*given))
        except Exception:
            if which:  # a function need not take any value
                continue
            raise
        set_random_state(state)
        found = entry.execute(entry.inputs([x.detach() for x in given], lifted))
        scale = _size(expected)
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            _compare(what, i, a.detach(), b, scale, which)


def _compare(what: str, i: int, expected: Tensor, found: Tensor, scale: float, which: str) -> None:
    if expected.shape != found.shape or expected.dtype is not found.dtype:
        how = f"{validation.describe(found)} for {validation.describe(expected)}"
    elif expected.is_meta:
        return
    elif not (expected.is_floating_point() or expected.is_complex()):
        if torch.equal(expected, found):
            return
        how = "other integers"
    else:
        finite = expected.isfinite() & found.isfinite()
        alike = torch.equal(expected.isnan(), found.isnan())
        apart = _size([torch.where(finite, expected - found, 0)])
        own = _size([torch.where(finite, expected, 0)])
        if alike and apart <= OFF.get(expected.dtype, COARSE) * max(own, ROUNDING * scale, 1e-30):
            return
        how = f"a distance of {apart:.1e} where the size is {own:.1e}"
    raise NoSecondDerivative(
        f"{what}: expected a graph that computes what the function does, got {how} in output "
        f"{i}{which}. Something is traced in that is not a tensor of the graph (a result of NumPy, a "
        "value kept from an earlier call, random numbers of another library), or the compiler is at "
        "fault: backend='eager' tells. Make it an argument, or pass check=False if you know better."
    )


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.leaves(output) if isinstance(leaf, Tensor)]


def _others(tensors: list[Tensor]) -> list[Tensor]:
    """Other values of about the same size and sign, laid out alike: probabilities stay so."""
    generator = torch.Generator("cpu").manual_seed(0)
    found = []
    for x in tensors:
        if (x.is_floating_point() or x.is_complex()) and x.numel():
            # all of the memory that it spans, of which it may have parts more than once
            span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            plain = x.detach()
            if x.is_neg() or x.is_conj():
                plain = torch.empty_strided(
                    x.shape, x.stride(), dtype=x.dtype, device=x.device
                ).copy_(plain)
            memory = plain.as_strided((span,), (1,))
            factor = 1 - 0.1 * torch.rand(memory.shape, generator=generator, device="cpu")
            changed = (memory * factor.to(device=x.device)).to(x.dtype)
            found.append(changed.as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad))
        else:
            found.append(x)
    return found


def _size(tensors: list[Tensor]) -> float:
    total = 0.0
    for x in tensors:
        if (x.is_floating_point() or x.is_complex()) and not x.is_meta:
            total += float(torch.nan_to_num(x.detach().abs().double()).square().sum())
    return total**0.5


# === A call becomes a graph: traced, made smaller, compiled, and compared with what it stands for.

_HERE = threading.local()


class Function(backends.Options, Protocol):
    """What is captured."""

    fn: Callable[..., Any]
    check: bool

    def of_tensors(self, form: CallSignature) -> Callable[..., Any]: ...


def capture(
    function: Function, form: CallSignature, tensors: list[Tensor]
) -> tuple[GraphEntry, list[Tensor]]:
    """The graph for such a call, and the tensors that the function reaches besides."""
    root = (function.fn, form.others)
    walk = ClosureWalker(root)
    compiled = any(map(_is_compiled, walk.objects))
    with (
        outside_inference_mode(),
        torch_internals.without_saved_tensor_hooks(),
        preserve_random_state(),
        torch_internals.eagerly(compiled),
    ):
        began = perf_counter()
        with nothing_left(walk):
            traced, also = _traced(function, form, tensors)
        simplify(traced.graph)
        seconds = perf_counter() - began
        own = [i for i in range(len(tensors)) if i not in dict(also)]
        reached = Guards(root, traced.lifted, traced.modules)
        nodes = sum(node.op == "call_function" for node in traced.graph.graph.nodes)
        code, draws = traced.graph.code, any(map(is_random, traced.graph.graph.nodes))
        inputs = [x.detach() for x in (*(tensors[i] for i in own), *traced.lifted)]
        made, backend = backends.made(function, traced.graph, inputs)
        entry = GraphEntry(
            arguments=form.described(tensors),
            nodes=nodes,
            backend=backend,
            source=made.source,
            seconds_to_trace=seconds,
            seconds_to_compile=made.seconds,
            draws=draws,
            code=code,
            run=made.run,
            reached=reached,
            shared=also,
            leaves=traced.leaves,
            structure=traced.structure,
            recorded=traced.recorded,
            backward=Graphs(),
            holds=_assumptions(traced.graph, own) if function.dynamic else _always,
        )
        if function.check:
            with _eagerly():
                equal(
                    function.name, function.of_tensors(form), tensors, traced.lifted, entry,
                    apart=getattr(function.fn, "apart", False),
                )  # fmt: skip
            reached = reached.after(function.name, root, traced.lifted, traced.modules)
            entry = replace(entry, reached=reached)
    return entry, traced.lifted


def runs_elsewhere() -> bool:
    """Whether a call is a part of what is differentiated, traced or compared outside of it."""
    return (
        torch.compiler.is_compiling()
        or getattr(_HERE, "eagerly", False)
        or torch_internals.transforms_active()
        or torch_internals.forward_mode_active()
        or torch_internals.tracing()
    )


def _is_compiled(value: Any) -> bool:
    """Whether torch.compile made it, whose code cannot be traced."""
    if isinstance(value, nn.Module):
        return torch_internals.is_compiled(value) or value._compiled_call_impl is not None
    return isinstance(value, FunctionType) and "_torchdynamo_orig_callable" in vars(value)


def _traced(
    function: Function, form: CallSignature, tensors: list[Tensor]
) -> tuple[Traced, list[tuple[int, int]]]:
    """The graph, and which arguments the function also reaches otherwise: one variable then."""
    run, name = function.of_tensors(form), function.name
    try:
        traced = trace(name, run, tensors, function.dynamic)
        also = {i for i, _ in shared(tensors, traced.lifted)}
    except UnsupportedError:
        raise
    except Exception:  # of a derivative by an argument where it is the other that was used
        places = ClosureWalker((function.fn, form.others)).places
        also = {i for i, x in enumerate(tensors) if id(x) in places}
        if not also:
            raise
    if also:
        own = [x for i, x in enumerate(tensors) if i not in also]

        def with_those_reached(*given: Tensor) -> Any:
            left = iter(given)
            return run(*[x if i in also else next(left) for i, x in enumerate(tensors)])

        traced = trace(name, with_those_reached, own, function.dynamic)
    return traced, shared(tensors, traced.lifted)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Inside, what is compiled runs as it would otherwise, in this thread."""
    before = getattr(_HERE, "eagerly", False)
    _HERE.eagerly = True
    try:
        yield
    finally:
        _HERE.eagerly = before


def _assumptions(graph: fx.GraphModule, own: list[int]) -> Callable[[list[Tensor]], bool]:
    """Whether what was assumed of symbolic shapes holds for the tensors of a call."""
    placeholders = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")][: len(own)]
    shapes: Any = graph.shape_env

    def hold(tensors: list[Tensor]) -> bool:
        return bool(shapes.evaluate_guards_for_args(placeholders, [tensors[i] for i in own]))

    return hold


def _always(tensors: list[Tensor]) -> bool:
    return True
