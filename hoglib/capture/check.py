"""Whether a graph computes what its function does: at the values of the first call, and at others.

Compiled code that differs is compared with its operations in float64, at inputs that differ by
rounding:

    c(x_k) = r(x_k) for one of x_0 = x, x_k = x (1 + eps u_k), u_k = +-1
                                                                      r the operations in float64

It adds in another order. Where two roundings of an intermediate value lie on the two sides of a point
without a derivative, such as the zero of a ReLU, the derivatives differ by as much as that of the
function jumps, and neither is wrong. At inputs that are moved by a unit in the last place the value
lies on one side, for some draws of u_k, and right code computes the derivative of this side; wrong
code does not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, fx

from hoglib._core import pytree, validation
from hoglib._core.state import random_state, set_random_state
from hoglib.capture.passes import is_random
from hoglib.capture.trace import as_leaf
from hoglib.errors import NoSecondDerivative

# Relative to the norm of an output, by the least precise dtype inside. Compiled code adds in another
# order, and in float32 a cancellation or a point without a derivative amplifies that beyond rounding; a
# value that was traced in as a constant is off by far more.
TOLERANCES = {
    torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-3, torch.complex64: 2e-3,
}  # fmt: skip
HALF_PRECISION_TOLERANCE = 5e-2
# Relative to the norm of all outputs: a gradient that cancels, such as that of a last bias, consists
# of rounding errors only.
ROUNDING = 1e-4
OF_CAPTURE = (
    "The graph contains a constant that should be an input (a result of NumPy, a value kept from an "
    "earlier call, random numbers of another library). Pass the value as an argument"
)
OF_BACKEND = (
    "The operations of the graph compute it when they run one by one, so what compiled them is wrong. "
    "Pass backend='eager'"
)


DRAWS = 8
_WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip


class Graph(Protocol):
    """What is compared: an entry of the graphs of a function."""

    @property
    def shared(self) -> list[tuple[int, int]]: ...

    def execute(self, inputs: list[Tensor]) -> list[Tensor]: ...

    def graph_inputs(self, tensors: list[Tensor], lifted: list[Tensor]) -> list[Tensor]: ...


@final
class Comparison:
    """Of graphs with their function, whose outputs are computed once.

    It compares at perturbed values first, so that what modules keep of their last run belongs to the
    given values. At the given values, the tensors keep their graphs, because the function may
    differentiate with respect to them; with ``independent``, it differentiates with respect to each
    argument as if none was computed from another. The state of the random generators changes.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], tensors: list[Tensor], graph: Graph,
        tolerance: float, *, independent: bool,
    ) -> None:  # fmt: skip
        self._name, self._tolerance = name, tolerance
        self._cases: list[_Case] = []
        perturbed = _perturbed(tensors)
        given = [
            x.clone() if x.is_inference() else as_leaf(x) if independent else x for x in tensors
        ]
        for i, _ in graph.shared:  # the function also reaches these by another path, so they stay
            perturbed[i] = given[i] = tensors[i]
        for where, values in (
            (" at other values than those of the capture", perturbed),
            ("", given),
        ):
            state = random_state()
            try:
                expected = [x.detach() for x in pytree.tensors(function(*values))]
            except Exception:
                if where:  # a function need not accept every value
                    continue
                raise
            self._cases.append(_Case(where, [x.detach() for x in values], state, expected))

    def check(
        self, graph: Graph, lifted: list[Tensor], cause: str,
        operations: fx.GraphModule | None = None,
    ) -> None:  # fmt: skip
        """Raises NoSecondDerivative, with the cause, if the outputs of a graph are others.

        operations: what was compiled, which was compared with the function before. Other outputs are
        then compared with these operations in float64.
        """
        for case in self._cases:
            set_random_state(case.state)
            inputs = graph.graph_inputs(case.values, lifted)
            found = graph.execute(inputs)
            scale = _norm(case.expected)
            other: dict[int, str] = {}
            moved: set[int] = set()  # those of other numbers of the same kind
            for i, (a, b) in enumerate(zip(case.expected, found, strict=True)):
                if difference := _difference(a, b, scale, self._tolerance):
                    other[i] = difference
                    if pytree.is_float(b) and _is_alike(a, b):
                        moved.add(i)
            if moved and operations is not None:
                moved = self._right_nearby(graph.execute, operations, inputs, moved)
                other = {i: difference for i, difference in other.items() if i not in moved}
            for i, difference in other.items():
                raise NoSecondDerivative(
                    f"{self._name}: expected a graph that computes what the function does, got "
                    f"{difference} in output {i}{case.where}. {cause}, or pass check=False to skip "
                    "this comparison."
                )

    def _right_nearby(
        self, execute: Callable[[list[Tensor]], list[Tensor]], operations: fx.GraphModule,
        inputs: list[Tensor], outputs: set[int],
    ) -> set[int]:  # fmt: skip
        """Those of the outputs that are what the operations give in float64, at these inputs or at
        others that differ by rounding, for which they are not zero."""
        right: set[int] = set()
        if any(map(is_random, operations.graph.nodes)):  # the numbers are others in float64
            return right
        try:
            for seed in range(DRAWS + 1):
                at = _last_places_changed(inputs, seed) if seed else inputs
                with torch.no_grad():
                    reference: list[Tensor] = _InDouble(operations).run(*at)
                found = execute(at)
                for i in outputs - right:
                    a, b = reference[i], found[i].to(reference[i].dtype)
                    different = _difference(a, b, _norm(reference), self._tolerance)
                    if bool(a.count_nonzero()) and different is None:
                        right.add(i)
                if right == outputs:
                    break
        except (RuntimeError, NotImplementedError, TypeError):  # operations without float64
            pass
        return right


class _Case(NamedTuple):
    """The outputs of a function at some values."""

    where: str  # in words
    values: list[Tensor]
    state: Any  # of the random generators
    expected: list[Tensor]


def tolerance_of(graph: fx.GraphModule) -> float:
    """Of the least precise floating-point numbers that a graph computes.

    A model in float64 may compute a loss, a norm or an angle in float32.
    """
    values = [node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function"]
    dtypes = {x.dtype for x in pytree.tensors(values) if pytree.is_float(x)}
    return max(
        (TOLERANCES.get(x, HALF_PRECISION_TOLERANCE) for x in dtypes),
        default=TOLERANCES[torch.float64],
    )


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
    distance = _norm([torch.where(finite, expected - found, 0)])
    norm = _norm([torch.where(finite, expected, 0)])
    if same_nans and distance <= tolerance * max(norm, ROUNDING * scale, 1e-30):
        return None
    return f"a difference of norm {distance:.1e} where the norm is {norm:.1e}"


def _perturbed(tensors: list[Tensor]) -> list[Tensor]:
    """Values of about the same size and sign, in the same layout, so that probabilities stay so."""
    generator = torch.Generator("cpu").manual_seed(0)
    found = []
    for x in tensors:
        if pytree.is_float(x) and x.numel():
            # All memory that x spans, of which it may show parts more than once.
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


def _norm(tensors: list[Tensor]) -> float:
    total = 0.0
    for x in tensors:
        if pytree.is_float(x) and not x.is_meta:
            total += float(torch.nan_to_num(x.detach().abs().double()).square().sum())
    return total**0.5


@final
class _InDouble(fx.Interpreter):
    """Runs a graph with float64 in the place of each less precise dtype."""

    def run_node(self, n: fx.Node) -> Any:
        return fx.node.map_aggregate(super().run_node(n), _widened)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.node.map_aggregate((args, kwargs), _widened)
        return super().call_function(target, args, kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    return value.to(_WIDER[value.dtype]) if getattr(value, "dtype", None) in _WIDER else value


def _last_places_changed(inputs: list[Tensor], seed: int) -> list[Tensor]:
    """Inputs whose floating-point numbers are moved by a unit in the last place, up or down."""
    generator = torch.Generator("cpu").manual_seed(seed)
    found = []
    for x in inputs:
        if pytree.is_float(x):
            up = torch.randint(2, x.shape, generator=generator, device="cpu").to(x.device)
            factor = 1 + torch.finfo(x.dtype).eps * (2 * up - 1).double()
            x = torch.empty_like(x).copy_((x * factor).to(x.dtype))  # in the same layout
        found.append(x)
    return found
