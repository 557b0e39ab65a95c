"""Gradients with a graph, under any grad mode, inference mode or transform of the caller.

g = gradient_with_graph(func, leaves, "hvp", create_graph=False)
Hv = materialize_grads(vjp(g.parts, g.leaves, v, "hvp"), g.leaves)
"""

import cmath
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from hoglib._core.messages.call_errors import ErrorTranslation, explain_kind_of_tensor
from hoglib._core.runtime.device_reads import read_late
from hoglib._core.runtime.source_location import raising_modules, user_line, warn_once
from hoglib._core.substrate.gradient_graph import (
    GraphSummary,
    check_custom_functions,
    graph_summary,
    walk,
)
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_internals import (
    apply,
    gradients,
    made_at,
    made_by,
    record_backward_origins,
    transforms_active,
    without_functions_seen,
)
from hoglib._core.torch_api.torch_modes import value_checks_on, without_stand_ins
from hoglib._core.torch_api.torch_private import private
from hoglib.errors import HoglibError, NoSecondDerivative, UnsupportedError

_foreach_norm = private("torch._foreach_norm")

T = TypeVar("T")
Vector = list[Tensor]  # one tensor per parameter
ScalarFunction = Callable[..., Tensor]


class Gradient(NamedTuple):
    """The gradient of a scalar function, with a graph.

    value: The value of the function.
    leaves: The tensors that the function was called with, see `fresh_leaves`.
    parts: The gradient by each leaf; None if the value does not depend on the leaf.
    graph: The graph of the value.
    """

    value: Tensor
    leaves: Vector
    parts: list[Tensor | None]
    graph: GraphSummary

    @property
    def has_no_graph(self) -> bool:
        """Whether the gradient depends on no leaf: the second derivative is zero."""
        return not any(part is not None and part.requires_grad for part in self.parts)


def gradient_with_graph(
    func: ScalarFunction, leaves: Vector, what: str, create_graph: bool
) -> Gradient:
    """The value of func at the leaves, and its gradient with a graph.

    create_graph: Connect the graph to the given leaves; otherwise func gets detached aliases.
    """
    with without_stand_ins():
        p = fresh_leaves(leaves, create_graph)
    value = func(*p)
    # Stand-ins are on for func, and for a backward with Python code: under their mode each torch call,
    # also x.shape, takes a microsecond longer.
    with without_stand_ins() as suspended:
        graph = graph_summary(value)
        if graph.functions:
            check_custom_functions(graph, what)
        if not create_graph:
            check_uses_given_params(graph, leaves, what)
        parts: list[Tensor | None] = [None]
        if value.requires_grad:
            try:
                needed = graph.functions and graph.needs_stand_ins
                with suspended.resumed() if needed else nullcontext():
                    parts = gradients([value], p, create_graph=True)
            except Exception as error:
                translate_errors(what).explain(error)
                raise
    if {*map(type, parts)} <= {NoneType}:  # all None; faster than all() of a generator
        raise NoSecondDerivative(
            "func(params, *args): expected a value that depends on params, got one that does not. "
            "Look for .detach(), .item(), .data or torch.no_grad() in func, and for a func that uses "
            "the model's own parameters instead of the params it is given."
        )
    return Gradient(value, p, parts, graph)


def check_uses_given_params(graph: GraphSummary, leaves: Vector, what: str) -> None:
    """Refuse a value with the original leaves in its graph: func was given `fresh_leaves`."""
    if not graph.leaves.keys().isdisjoint(map(id, leaves)):
        direct = graph.reached(leaves)
        shapes = ", ".join(str(tuple(leaves[i].shape)) for i in direct)
        raise NoSecondDerivative(
            f"{what}: expected a func that uses the params it is given, got one that also uses the "
            f"same tensors (of shape {shapes}) from elsewhere: a part of the derivatives would be "
            "missing. Look for the model's own parameters in func, model.parameters() or a list of "
            "weights; take them from params, or detach() what is meant as a constant."
        )


def vjp(
    outputs: Sequence[Tensor | None],
    inputs: Vector,
    cotangents: Sequence[Tensor | None],
    what: str,
    retain_graph: bool = False,
    create_graph: bool = False,
    graph: GraphSummary | None = None,
) -> list[Tensor | None]:
    """The vector-Jacobian product d <outputs, cotangents> / d inputs; None for inputs that the outputs
    do not depend on.

    An output of None or without a graph is a constant; a cotangent of None is zero.
    graph: The graph of the outputs, for errors that name its custom Functions.
    """
    values, weights = [], []
    for y, u in zip(outputs, cotangents, strict=True):
        if y is not None and u is not None and y.requires_grad:
            values.append(y)
            weights.append(at_even(u) if u.shape[-1:] == (2,) else u)
    if not values:
        return [None] * len(inputs)
    keep = retain_graph or create_graph
    try:
        return gradients(values, inputs, weights, retain_graph=keep, create_graph=create_graph)
    except Exception as error:
        translate_errors(what, graph).explain(error)
        raise


def at_even(u: Tensor) -> Tensor:
    """u; a copy if view_as_complex would refuse its odd storage offset."""
    return u.clone() if u.shape[-1:] == (2,) and u.storage_offset() % 2 else u


def fresh_leaves(leaves: Vector, create_graph: bool) -> Vector:
    """New tensors with the values of the leaves, to differentiate by: with create_graph views in the
    graph of the leaves, otherwise detached tensors."""
    fresh: Vector = []
    for x in leaves:
        linked = create_graph and x.requires_grad
        fresh.append(x.view_as(x) if linked else x.detach().requires_grad_())
    return fresh


def materialize_grads(parts: list[Tensor | None], like: Vector) -> Vector:
    """Gradients with zeros instead of None, as dense tensors."""
    found: Vector = []
    for part, x in zip(parts, like, strict=True):
        # `dense`, inlined, because a function call for each part costs time
        whole = part is None or part.layout is torch.strided
        found.append(torch.zeros_like(x) if part is None else part if whole else part.to_dense())
    return found


def dense(part: Tensor) -> Tensor:
    """A gradient as a dense tensor; an embedding's may be sparse."""
    return part if part.layout is torch.strided else part.to_dense()


def with_gradients(
    value: Tensor,
    grads: Sequence[Tensor],
    tensors: Sequence[Tensor],
    no_second_derivative: str = "",
    *,
    with_graph: Callable[[], Sequence[Tensor]] | None = None,
    recompute: Callable[[], Sequence[Tensor]] | None = None,
) -> Tensor:
    """The value with precomputed gradients: backward multiplies `grads` by the incoming gradient.

    with_graph: Computes the gradients with a graph, for a backward with create_graph=True. Default:
        such a backward raises NoSecondDerivative with the text `no_second_derivative`.
    recompute: Computes the gradients again. If given, the first backward scales `grads` in place and
        returns them without a copy: no other reference to their storages may exist.
    """
    options = no_second_derivative, with_graph, recompute, list(grads)
    return apply(_PrecomputedGradients, value, options, *tensors)


class _PrecomputedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, options: Any, *tensors: Tensor) -> Tensor:
        ctx.no_second_derivative, ctx.with_graph, ctx.recompute, ctx.grads = options
        # backward reads saved_tensors, which raises if an optimizer step changed them in between
        ctx.save_for_backward(*tensors)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            if ctx.with_graph is None:
                raise NoSecondDerivative(ctx.no_second_derivative)
            scaled = [grad * part for part in ctx.with_graph()]
        elif ctx.recompute is None or transforms_active():
            scaled = [grad * part for part in ctx.grads or ctx.recompute()]
        else:
            scaled, ctx.grads = ctx.grads or list(ctx.recompute()), None
            # skip a factor of 1, on the CPU only: reading the factor from a device synchronizes
            if not (grad.device.type == "cpu" and grad.item() == 1):
                scaled = [part.mul_(grad) for part in scaled]
        return None, None, *scaled


@final
class grad_enabled:  # noqa: N801 a context manager
    """torch.enable_grad() that also leaves inference mode."""

    def __enter__(self) -> None:
        # entered only if needed: entering a mode takes time
        self._entered: list[Any] = []
        if torch.is_inference_mode_enabled():
            self._entered.append(torch.inference_mode(False))
        if self._entered or not torch.is_grad_enabled():
            self._entered.append(torch.enable_grad())
        for mode in self._entered:
            mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for mode in reversed(self._entered):
            mode.__exit__(*raised)


def outside_inference_mode() -> AbstractContextManager[None]:
    """Replaces an active inference mode by no_grad: new tensors may then require grad."""
    return _no_grad_instead() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _no_grad_instead() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def clone_inference_tensors(tree: T) -> T:
    """The tree with clones of its inference tensors: autograd refuses to save inference tensors."""
    leaves, structure = pytree.flatten(tree)
    found = []
    with without_functions_seen():  # else an active TorchFunctionMode intercepts is_inference
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.is_inference():
                found.append(i)
    if not found:
        return tree
    for i in found:
        leaves[i] = leaves[i].clone()
    return pytree.unflatten(leaves, structure)


def without_graph(function: Callable[[], Tensor]) -> Tensor:
    """The value of a function, without its graph.

    The function runs under no_grad. If it needs a graph itself, it runs again under enable_grad.
    """
    with torch.no_grad():
        try:
            return function()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
    with torch.enable_grad():
        return function().detach()


# Parts of torch's error messages about operations without a derivative.
NOT_DIFFERENTIABLE = (
    "not implemented", "forward AD", "does not currently support double backward",
    "don't support automatic differentiation", "saved tensor hooks", "incompatible with .grad()",
    "setup_context", "doesn't have storage", "not differentiable with respect to argument",
    "for sparse tensors", "Sparse division", "expected sparse coordinate tensor layout",
)  # fmt: skip


def no_forward_mode(
    what: str,
    error: Exception,
    instead: str = "Outside of torch.func transforms use the reverse mode.",
) -> Exception:
    """The exception to raise for an error in forward mode: UnsupportedError if torch lacks a
    derivative, else the error itself."""
    words = (
        *NOT_DIFFERENTIABLE,
        "ZeroTensor",
        "jvp",
        "autocast",
        "forward mode AD",
        "functorch transform",
        "to not have been used in the graph",  # autograd.grad inside the function
        "set a forward gradient",  # a rule returned a tangent of wrong size or layout
        "flat_bdims",  # a Function without a jvp, under vmap
        "view size is not compatible",  # a rule calls view() on a non-contiguous tangent
        "do not have strides",  # sparse layouts inside torch.func
    )
    if isinstance(error, HoglibError) or not any(word in str(error) for word in words):
        return error
    hint = ""
    if "ZeroTensor" in str(error):
        hint = " torch's mse_loss is such an operation: leave stand_ins at True."
    return UnsupportedError(
        f"{what}: expected operations that torch can differentiate in forward mode, got an error from "
        f"one: {str(error).splitlines()[0]}{hint} {instead}"
    )


class translate_hook_errors(ErrorTranslation):  # noqa: N801 a context manager
    """Raise UnsupportedError if hooks of a module with a method `disable_hooks` fail.

    For Opacus' GradSampleModule: its hooks count forward passes on the module's own parameters, which
    hoglib swaps, and expect one backward for each forward.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def explain(self, error: Exception) -> None:
        if isinstance(error, HoglibError):
            return
        owner = next(iter(raising_modules(error)), None)
        if not hasattr(owner, "disable_hooks"):
            return
        name = type(owner).__name__
        raise UnsupportedError(
            f"{self._what}: expected a model without hooks of one forward and backward pass, got a "
            f"{name} with hooks that failed: {type(error).__name__}: {str(error).splitlines()[0]}. "
            f"Call `disable_hooks()` of the {name} before, and `enable_hooks()` after."
        ) from error


@final
class translate_errors(translate_hook_errors):  # noqa: N801 a context manager
    """Explains torch's errors in a derivative.

    UnsupportedError: an operation has no derivative, or hooks fail (`translate_hook_errors`).
    NoSecondDerivative: a saved tensor was changed in place; names the graph's custom Functions.
    """

    def __init__(self, what: str, graph: GraphSummary | None = None) -> None:
        super().__init__(what)
        self._graph = graph

    def explain(self, error: Exception) -> None:
        super().explain(error)
        explain_kind_of_tensor(self._what, error)
        if not isinstance(error, RuntimeError) or isinstance(error, HoglibError):
            return
        if "modified by an inplace operation" in str(error):
            raise NoSecondDerivative(
                f"{self._what}: expected tensors that keep the values which derivatives need, got "
                f"torch's error: {str(error).split(' Hint:')[0]} {self._advice_in_place()}"
            ) from error
        if not any(word in str(error) for word in NOT_DIFFERENTIABLE):
            return
        sparse = " Of an embedding, sparse=False is one." if "sparse" in str(error) else ""
        raise UnsupportedError(
            f"{self._what}: expected operations that torch can differentiate twice, got one that it "
            f"cannot: {str(error).splitlines()[0]}. Write it by other operations.{sparse} `hoglib env` "
            "lists those that have a stand-in, which is used with stand_ins=True."
        ) from error

    def _advice_in_place(self) -> str:
        found = [] if self._graph is None else self._graph.user_functions
        names = sorted({entry.function.__qualname__ for entry in found if entry.function})
        advice = "Look for in-place operations (`x += y`, `x[i] = y`, `x.add_(y)`) in func"
        if not names:
            return f"{advice}."
        return (
            f"{advice} and in the backward of {', '.join(names)}: one that changes its intermediates "
            f"cannot be differentiated. `hoglib.verify({names[0]}, inputs)` checks it."
        )


def is_not_finite(caller: str, value: Tensor, parts: Vector) -> bool:
    """Whether second derivatives (`parts`) are infinite or NaN, and the value is finite.

    On a device the numbers are read late, without synchronization: the answer may be about an earlier
    call with equal shapes.
    """
    if transforms_active() or not value_checks_on() or not parts or parts[0].is_meta:
        return False
    with without_functions_seen():
        if value.is_cpu:
            total = 0.0
            for x in parts:  # a sum takes half the time of a norm
                total += (x.detach() if x.requires_grad else x).sum().item()
            # the sum of finite numbers may overflow, so look again before answering True
            return not (cmath.isfinite(total) or _finite(parts)) and _finite([value])
        parts = [x.detach() for x in parts]
        # one kernel launch for all parts
        norms = _foreach_norm([x for x in parts if x.numel()] or [value.detach()], math.inf)
        of_value = value.detach().sum() if value.dim() else value.detach()
        numbers = torch.stack([of_value, *(x.to(value.device) for x in norms)])
        found = read_late((caller, *(x.shape for x in parts)), numbers)
        # None: no numbers have arrived from the device; do not warn
        finite, *of_parts = [True] if found is None else found.isfinite().tolist()
        return finite and not all(of_parts)


def warn_if_not_finite(
    caller: str,
    value: Tensor,
    parts: Vector,
    func: ScalarFunction,
    leaves: Vector,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """`warn_of_not_finite` if `is_not_finite`."""
    if is_not_finite(caller, value, parts):
        warn_of_not_finite(caller, func, leaves, around)


def warn_of_not_finite(
    caller: str,
    func: ScalarFunction,
    leaves: Vector,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    by: Vector | None = None,
) -> None:
    """Warn of infinite or NaN second derivatives, and name the operation that caused them.

    Evaluates func once more to find the operation.
    around: The context of this evaluation.
    by: More leaves that the user's own backward differentiates by. The cause may then lie outside
        func, so there is no warning if func has no such operation.
    """
    with around(), suppress(RuntimeError, HoglibError):
        where = _first_not_finite(func, leaves, by or [])
        if not where and by is not None:
            return
        # on a device the numbers may come from an earlier call
        here = "" if leaves[0].device.type == "cpu" else " in this call"
        where = where or f"an operation whose backward shows none{here}"
        warn_once(
            f"{caller}: expected points where func has a derivative of order 2, got some where it is "
            f"infinite or NaN, first behind {where}. sqrt(x), x**1.5 and 1/x have none at 0: add a "
            "small constant inside, or move the points. Where the derivative exists, as of prod with "
            "tiny factors, try `hvp(mode='forward-over-reverse')`."
        )


def _first_not_finite(func: ScalarFunction, leaves: Vector, by: Vector) -> str:
    """The name of the first operation with an infinite or NaN first or second derivative; "" for none.

    by: More leaves to take the second derivative by.
    """
    found: list[Any] = []
    with record_backward_origins():
        p = fresh_leaves(leaves, False)
        value = func(*p)
        note_not_finite([value], found)
        grads = gradients([value], p, create_graph=True)
        if not found:
            note_not_finite(grads, found)
            outputs = [g for g in grads if g is not None]
            vjp(outputs, [*p, *by], [*map(torch.randn_like, outputs)], "", retain_graph=True)
    if not found:
        return ""
    # a node of the second derivative was made by the backward of a node of func: name the latter
    node = found[0]
    while made_by(node) is not None:
        node = made_by(node)
    line = user_line(made_at(node))
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    return f"{name} at {line}" if line else name


def note_not_finite(outputs: Sequence[Tensor | None], found: list[Any]) -> None:
    """Hook the graph of outputs: append to `found` the first node with a backward that maps finite
    gradients to infinity or NaN."""

    def note(node: object, by: Any, given: Any) -> None:
        if not found and _finite(given) and not _finite(by):
            found.append(node)

    for node, parents in walk(outputs):
        if parents:
            node.register_hook(partial(note, node))


def _finite(tensors: Sequence[Any]) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors if isinstance(x, Tensor))
