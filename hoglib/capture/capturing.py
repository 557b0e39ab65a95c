"""Captures a function as a graph, compares the two, and keeps the graph while its owner lives: the
function, or an object that the function belongs to."""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import perf_counter
from types import FunctionType, MethodType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core.messages import validation
from hoglib._core.messages.closures import ClosureWalker
from hoglib._core.modules.state import preserve_random_state, random_state, set_random_state
from hoglib._core.runtime.ambient import AMBIENT, inside
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.autograd import outside_inference_mode
from hoglib._core.torch_api import pytree, torch_internals
from hoglib.capture.passes import is_random, pin_strides, simplify
from hoglib.capture.runners import Runner, make_runner
from hoglib.capture.signature import CallSignature, Guards, TensorSlot, discard_traced_tensors
from hoglib.capture.trace import Output, Traced, as_leaf, trace
from hoglib.errors import NoSecondDerivative

CAPTURING = threading.RLock()  # one capture at a time, in any thread
MAX_KEPT = 32  # slots of one owner


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
    backend: str = field(init=False)
    source: str = field(init=False)
    seconds_to_trace: float
    seconds_to_compile: float = field(init=False)
    draws: bool = field(repr=False)
    code: str = field(repr=False)
    run: Callable[..., Any] = field(init=False, repr=False)  # the graph: inputs -> tensors
    output: Output = field(repr=False)
    reached: Guards = field(repr=False)  # for the tensors that the function reaches
    # (index among the arguments, index among the lifted) of arguments that the function also reaches
    shared: list[tuple[int, int]] = field(repr=False)
    holds: Callable[[list[Tensor]], bool] = field(repr=False)  # guards on symbolic shapes
    # For a loss: indices of gradients that alias an input or another gradient; known after a run.
    aliases: list[int] | None = field(default=None, repr=False)

    def run_by(self, runner: Runner) -> None:
        """Sets the runner of the graph.

        Args:
            runner: The function that runs the graph, its backend, and the time of compilation.
        """
        self.run, self.backend, self.source, self.seconds_to_compile = runner

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Runs the graph without autograd; it contains autocast and stand-ins already.

        Args:
            inputs: The inputs of the graph.
        Returns:
            The tensors among the outputs.
        """
        grad_mode = torch.is_grad_enabled()
        torch_internals.set_grad_enabled(False)
        try:
            with torch_internals.without_functions_seen(), torch_internals.no_autocast():
                return list(self.run(*inputs))
        finally:
            torch_internals.set_grad_enabled(grad_mode)

    def resolve(self, fn: Any, form: CallSignature, tensors: list[Tensor]) -> list[Tensor] | None:
        """The tensors that the function reaches now, besides its arguments.

        Args:
            fn: The function.
            form: A call without its tensors.
            tensors: The tensors among its arguments.
        Returns:
            The tensors; None if the call needs another graph.
        """
        lifted = self.reached.resolve((fn, form.constants))
        if lifted is None:
            return None
        shares = self.shared or not {*map(id, tensors)}.isdisjoint(map(id, lifted))
        if shares and shared_tensors(tensors, lifted) != self.shared:
            return None
        return lifted if self.holds(tensors) else None

    def graph_inputs(self, tensors: list[Tensor], lifted: list[Tensor]) -> list[Tensor]:
        """The inputs of the graph: arguments, then tensors that the function reaches, each once.

        Args:
            tensors: The tensors among the arguments.
            lifted: The tensors that the function reaches besides its arguments.
        Returns:
            The inputs.
        """
        if not self.shared:
            return tensors + lifted
        also_reached = {i for i, _ in self.shared}
        return [x for i, x in enumerate(tensors) if i not in also_reached] + lifted

    def assemble(self, outputs: list[Tensor]) -> Any:
        """The output of the function, in its structure.

        Args:
            outputs: The tensors among the outputs.
        Returns:
            The output.
        """
        leaves = [outputs[x.index] if type(x) is TensorSlot else x for x in self.output.leaves]
        return pytree.unflatten(leaves, self.output.structure)


# A graph, and the tensors that its function reaches besides its arguments.
Captured = tuple[GraphEntry, list[Tensor]]


class Graphs:
    """The graphs of one function.

    Attributes:
        by_signature: Key of a signature -> its graphs, which differ in their guards.
        full: The warning about too many graphs was given.
        misses: Captures for known signatures since a call last found its graph.
    """

    def __init__(self) -> None:
        self.by_signature: dict[Any, list[GraphEntry]] = {}
        self.full = False
        self.misses = 0

    def all(self) -> list[GraphEntry]:
        return [one for found in list(self.by_signature.values()) for one in found]


class CacheSlot(NamedTuple):
    """A place for graphs.

    owner: The object with which they are kept.
    key: Distinguishes the slots of the owner.
    """

    owner: Any
    key: Hashable

    @classmethod
    def of(cls, fn: object, *key: Hashable) -> "CacheSlot":
        """The slot of a function, or of a function that is made from it for each call and depends on
        the key. Python creates a bound method at each access, so a method's owner is its object."""
        if isinstance(fn, MethodType):
            return cls(fn.__self__, (fn.__func__, *key))
        return cls(fn, key)


_KEPT: Any = WeakIdKeyDictionary()  # owner -> key -> kept object
_LOCK = threading.Lock()


def get_or_make(place: CacheSlot, make: Callable[[], Any], name: str) -> Any:
    """make(), called once for a slot; the result is kept as long as the owner lives.

    The result must not refer to the owner, which would never die.
    name: The function's name, for messages.
    """
    with _LOCK:
        try:
            of_owner: dict[Hashable, Any] = _KEPT.setdefault(place.owner, {})
            if place.key in of_owner:
                return of_owner[place.key]
        except TypeError:  # no weak reference to the owner, or no hash of the key
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
    """(index in tensors, index in lifted) of each argument that the function also reaches otherwise."""
    places = {id(x): i for i, x in enumerate(tensors)}
    return [(places[id(x)], j) for j, x in enumerate(lifted) if id(x) in places]


def capture(function: Any, form: CallSignature, tensors: list[Tensor]) -> Captured:
    """Traces, simplifies, compiles and checks the graph for a call of a `Compiled` function.

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
            traced, shared = _trace_function(function, form, tensors)
        pin_strides(traced.graph)
        simplify(traced.graph)
        traced.graph.recompile()
        seconds = perf_counter() - began
        own = [i for i in range(len(tensors)) if i not in dict(shared)]  # inputs besides the lifted
        nodes = [node for node in traced.graph.graph.nodes if node.op == "call_function"]
        entry = GraphEntry(
            arguments=form.describe(tensors),
            nodes=len(nodes),
            seconds_to_trace=seconds,
            draws=any(map(is_random, nodes)),
            code=traced.graph.code,
            output=traced.output,
            reached=Guards(root, traced.lifted, traced.modules),
            shared=shared,
            holds=_shape_guards(traced.graph, own) if function.dynamic else lambda _: True,
        )
        entry.run_by(Runner(traced.graph.forward))
        if function.check:  # before compiling, which may take minutes
            # compiled functions inside the function run uncompiled
            with inside(graphs=AMBIENT.graphs._replace(eager=True)):
                comparison = Comparison(function, form, tensors, entry, tolerance_of(traced.graph))
                comparison.check(entry, traced.lifted, OF_CAPTURE)
            now = entry.reached.refresh(function.name, root, traced.lifted, traced.modules)
            entry.reached = now
        inputs = [x.detach() for x in entry.graph_inputs(tensors, traced.lifted)]
        options = function.backend, function.name, function.dynamic
        entry.run_by(make_runner(traced.graph, inputs, *options))
        if function.check and entry.backend != "eager":
            comparison.check(entry, traced.lifted, OF_BACKEND, traced.graph)
    return entry, traced.lifted


def in_other_tracer() -> bool:
    """Whether the call is inside a transform, a trace or a comparison, which needs the function
    itself."""
    return (
        AMBIENT.graphs.eager
        or torch_internals.transforms_active()
        or torch_internals.forward_mode_active()
        or torch_internals.tracing()
    )


def _is_compiled(value: object) -> bool:
    """Whether torch.compile made a module or function; its code cannot be traced."""
    if isinstance(value, nn.Module):
        return torch_internals.is_compiled(value) or value._compiled_call_impl is not None
    return isinstance(value, FunctionType) and "_torchdynamo_orig_callable" in vars(value)


def _trace_function(
    function: Any, form: CallSignature, tensors: list[Tensor]
) -> tuple[Traced, list[tuple[int, int]]]:
    """The graph, and `shared_tensors`.

    An argument that the function also reaches is one variable of the graph. A first trace finds these
    arguments; in this trace the argument and the reached tensor are two variables.
    """
    run, name = function.on_tensors(form), function.name

    try:
        traced = trace(name, run, tensors, function.dynamic)
        also_reached = {i for i, _ in shared_tensors(tensors, traced.lifted)}
    except Exception:
        # the function compared an argument with the reached tensor, or differentiated by one of the two
        # and used the other
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
    """A check that the assumptions on symbolic shapes hold for the tensors of a call."""
    placeholders = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")][: len(own)]
    shapes: Any = graph.shape_env

    def hold(tensors: list[Tensor]) -> bool:
        return bool(shapes.evaluate_guards_for_args(placeholders, [tensors[i] for i in own]))

    return hold


# The check of a graph: its outputs are compared with the function's, at the values of the first call
# and at others.
#
# If compiled code differs, it is compared with its operations in float64, at inputs that differ by
# rounding:
#
#     c(x_k) = r(x_k) for one of x_0 = x, x_k = x (1 - 2 eps u_k), u_k in [0, 1)
#                                                                       r the operations in float64
#
# Compiled code adds in another order. If two roundings of an intermediate value lie on the two sides of
# a point without a derivative, such as the zero of a ReLU, two derivatives differ by the function's
# jump, and neither is wrong. If the inputs move in the last place, the value lies on one side for some
# u_k; right code then computes the derivative of this side, wrong code does not.

# Tolerances relative to the norm of an output, for the least precise dtype inside. In float32 a
# cancellation or a point without a derivative amplifies another order of sums beyond rounding; a value
# that the trace made a constant is off by far more.
TOLERANCES = {
    torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-3, torch.complex64: 2e-3,
}  # fmt: skip
HALF_PRECISION_TOLERANCE = 5e-2
# Relative to the norm of all outputs: a gradient that cancels, such as a last bias's, consists of
# rounding errors only.
ROUNDING = 1e-4
OF_CAPTURE = (
    "The graph contains a constant that should be an input (a result of NumPy, a value kept from an "
    "earlier call, random numbers of another library). Pass the value as an argument"
)
OF_BACKEND = (
    "The operations of the graph compute it when they run one by one, so what compiled them is wrong. "
    "Pass backend='eager'"
)


DRAWS = 8  # moved inputs x_k
_WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip


@final
class Comparison:
    """Compares graphs with their function, which runs once for each set of values.

    The perturbed values come first, so that modules keep their last run at the given values. The given
    tensors keep their graphs, because the function may differentiate by them; but a function that is
    ``independent`` differentiates by each argument as if none was computed from another. The comparison
    changes the state of the random generators.
    """

    def __init__(
        self,
        function: Any,
        form: CallSignature,
        tensors: list[Tensor],
        graph: GraphEntry,
        tolerance: float,
    ) -> None:
        self._name, self._tolerance = function.name, tolerance
        independent = getattr(function.fn, "independent", False)
        self._cases: list[_Case] = []
        # of about equal size and sign, so that probabilities remain probabilities
        perturbed = _perturb(tensors, 0, lambda _: 0.1)
        own = [x.clone() if x.is_inference() else as_leaf(x) if independent else x for x in tensors]
        # the function reads these tensors themselves, so do not change them
        for i, _ in graph.shared:
            perturbed[i] = own[i] = tensors[i]
        runs = {" at other values than those of the capture": perturbed, "": own}
        for where, values in runs.items():
            state = random_state()
            try:
                result = function.on_tensors(form)(*values)
                expected = [x.detach() for x in pytree.tensors(result)]
            except Exception:
                if where:  # a function need not accept every value
                    continue
                raise
            self._cases.append(_Case(where, [x.detach() for x in values], state, expected))

    def check(
        self,
        graph: GraphEntry,
        lifted: list[Tensor],
        cause: str,
        operations: fx.GraphModule | None = None,
    ) -> None:
        """Raises NoSecondDerivative, with the cause, if a graph's outputs differ from the function's.

        operations: The graph that was compiled, after its own check. Outputs that differ are then
        compared with these operations in float64.
        """
        for case in self._cases:
            set_random_state(case.state)
            inputs = graph.graph_inputs(case.values, lifted)
            found = graph.execute(inputs)
            scale = _norm_of(case.expected)
            pairs = enumerate(zip(case.expected, found, strict=True))
            other = {i: _difference(a, b, scale, self._tolerance) for i, (a, b) in pairs}
            wrong = {i for i, difference in other.items() if difference}
            if wrong and operations is not None:  # floats of equal shape may be right nearby
                moved = {i for i in wrong if _is_alike(case.expected[i], found[i])}
                moved = {i for i in moved if pytree.is_float(found[i])}
                wrong -= self._right_nearby(graph.execute, operations, inputs, moved)
            if wrong:
                i = min(wrong)
                raise NoSecondDerivative(
                    f"{self._name}: expected a graph that computes what the function does, got "
                    f"{other[i]} in output {i}{case.where}. {cause}, or pass check=False to skip "
                    "this comparison."
                )

    def _right_nearby(
        self,
        execute: Callable[[list[Tensor]], list[Tensor]],
        operations: fx.GraphModule,
        inputs: list[Tensor],
        outputs: set[int],
    ) -> set[int]:
        """The outputs that agree with the operations in float64, at these inputs or at inputs that
        differ by rounding, if they are not zero there."""
        right: set[int] = set()
        random = any(map(is_random, operations.graph.nodes))  # float64 draws other numbers
        if random or not outputs:
            return right
        try:
            for seed in range(DRAWS + 1):
                at = _perturb(inputs, seed, _two_last_places) if seed else inputs
                with torch.no_grad():
                    reference: list[Tensor] = _InDouble(operations).run(*at)
                found = execute(at)
                for i in outputs - right:
                    a, b = reference[i], found[i].to(reference[i].dtype)
                    different = _difference(a, b, _norm_of(reference), self._tolerance)
                    if bool(a.count_nonzero()) and different is None:
                        right.add(i)
                if right == outputs:
                    break
        except (RuntimeError, NotImplementedError, TypeError):  # operations without float64
            pass
        return right


class _Case(NamedTuple):
    """A set of values, and the function's outputs.

    where: The values in words, for messages.
    values: The arguments.
    state: The state of the random generators before the run.
    expected: The outputs.
    """

    where: str
    values: list[Tensor]
    state: Any
    expected: list[Tensor]


def tolerance_of(graph: fx.GraphModule) -> float:
    """The tolerance for the least precise floating-point dtype that a graph computes in.

    A model in float64 may compute a loss, a norm or an angle in float32.
    """
    values = [node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function"]
    dtypes = {x.dtype for x in pytree.tensors(values) if pytree.is_float(x)}
    found = [TOLERANCES.get(x, HALF_PRECISION_TOLERANCE) for x in dtypes]
    return max(found, default=TOLERANCES[torch.float64])


def _is_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype


def _difference(expected: Tensor, found: Tensor, scale: float, tolerance: float) -> str | None:
    if not _is_alike(expected, found):
        return f"{validation.describe(found)} instead of {validation.describe(expected)}"
    if expected.is_meta:
        return None
    if not pytree.is_float(expected):
        return None if torch.equal(expected, found) else "other integers"
    finite = expected.isfinite() & found.isfinite()
    same_nans = torch.equal(expected.isnan(), found.isnan())
    distance = _norm_of([torch.where(finite, expected - found, 0)])
    norm = _norm_of([torch.where(finite, expected, 0)])
    if same_nans and distance <= tolerance * max(norm, ROUNDING * scale, 1e-30):
        return None
    return f"a difference of norm {distance:.1e} where the norm is {norm:.1e}"


def _perturb(
    tensors: list[Tensor], seed: int, width: Callable[[torch.dtype], float]
) -> list[Tensor]:
    """The tensors, floating-point ones times random factors in [1 - width, 1], with equal strides."""
    generator = torch.Generator("cpu").manual_seed(seed)
    found = []
    for x in tensors:
        if pytree.is_float(x) and x.numel():
            # all memory that x spans: an expanded x shows parts of its memory more than once
            span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            plain = x.detach()
            if x.is_neg() or x.is_conj():
                plain = x.new_empty_strided(x.shape, x.stride()).copy_(plain)
            memory = plain.as_strided((span,), (1,))
            drawn = torch.rand(span, generator=generator, dtype=torch.float64, device="cpu")
            factor = 1 - width(x.dtype) * drawn
            exact = torch.promote_types(x.dtype.to_real(), torch.float32)
            changed = (memory * factor.to(x.device, exact)).to(x.dtype)
            x = changed.as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad)
        found.append(x)
    return found


def _two_last_places(dtype: torch.dtype) -> float:
    return 2 * torch.finfo(dtype).eps


def _norm_of(tensors: list[Tensor]) -> float:
    total = 0.0
    for x in tensors:
        if pytree.is_float(x) and not x.is_meta:
            total += float(torch.nan_to_num(x.detach().abs().double()).square().sum())
    return total**0.5


@final
class _InDouble(fx.Interpreter):
    """Runs a graph with float64 instead of less precise dtypes."""

    def run_node(self, n: fx.Node) -> Any:
        return fx.node.map_aggregate(super().run_node(n), _to_float64)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.node.map_aggregate((args, kwargs), _to_float64)
        return super().call_function(target, args, kwargs)


def _to_float64(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    return value.to(_WIDER[value.dtype]) if getattr(value, "dtype", None) in _WIDER else value
