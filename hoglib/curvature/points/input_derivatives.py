"""Second derivatives of functions by their inputs, at many points, by nested derivatives.

A probe is an index i of an element of a point, for d^2 f / dx_i^2; or a tensor v like x, for v^T H v at
each point. `by_reverse` and `by_forward` compute the values and the weighted sum over the probes.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hoglib._core.messages import validation
from hoglib._core.messages.call_errors import translate_batch_errors
from hoglib._core.messages.closures import owner_of
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.modules.swap import call_with
from hoglib._core.numerics.finite_differences import fixed_random_numbers
from hoglib._core.numerics.trust import largest, memoize_on
from hoglib._core.substrate.autograd import (
    fresh_leaves,
    materialize_grads,
    translate_errors,
    vjp,
    warn_if_not_finite,
)
from hoglib._core.substrate.gradient_graph import check_custom_functions, graph_summary
from hoglib._core.torch_api import torch_forward_mode, torch_internals
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.torch_modes import value_checks_on, without_stand_ins
from hoglib._core.torch_api.torch_private import private
from hoglib.errors import ArgumentValueError, NoSecondDerivative

_disable_current_modes = private("torch.utils._python_dispatch._disable_current_modes")

Probe = int | Tensor
Weighted = tuple[Probe, Any]  # (probe, weight), the weight a number or a tensor
Layout = Callable[[bool], Sequence[Weighted]]  # whether x is many points -> the weighted probes
Function = Callable[[Tensor], Tensor]
CALLER = "laplacian"
TOLERANCE = 1e-6  # a gradient by other samples, relative to the gradient by the sample itself


def by_reverse(
    func: Function, x: Tensor, directions: Layout, keep: bool, always: bool
) -> tuple[Tensor, Tensor]:
    """sum_r w_r v_r^T H v_r in reverse over reverse: one run of func, one gradient, and a backward
    pass for each probe.

    keep: The results get a graph, if x or a parameter requires grad.
    always: With keep, the results get a graph in any case.
    """
    # Stand-ins are on only while func runs, and in a backward with Python code: under their mode each
    # torch call takes a microsecond longer.
    with without_stand_ins() as suspended:
        (own,) = fresh_leaves([x], keep)
        with suspended.resumed():
            value = func(own)
        graph = graph_summary(value)
        check_custom_functions(graph, CALLER)
        others = (y is not own for y in graph.leaves.values())
        keep = keep and (always or x.requires_grad or any(others))
        with suspended.resumed() if graph.needs_stand_ins else nullcontext():
            points, outputs, probes = _sizes(x, value, directions)
            if outputs == 1:  # a shorter graph than `_of_all_outputs`
                result = _of_one_output(value.reshape(points), own, probes, keep)
            else:
                y = value.reshape(points, outputs)
                # Without a graph, all outputs together take twice the passes of one output, which pays
                # from four outputs on.
                together = outputs > (1 if keep else 3) and y.dtype == x.dtype
                together = together and not torch_internals.tracing()
                of_all = _of_all_outputs(y, own, probes, keep) if together else None
                if of_all is None:
                    found = [_of_one_output(f, own, probes, keep) for f in y.unbind(1)]
                    of_all = torch.stack(found, 1) if found else torch.zeros_like(y)
                result = of_all
            result = result.reshape(value.shape)
    warn_if_not_finite(CALLER, value, [result], lambda z: func(z).sum(), [x], preserve_random_state)
    with without_stand_ins():
        if not keep:
            return value.detach().clone(), result.detach()
        if not result.requires_grad:  # a constant: add zeros with a graph, for backward of a loss
            result = result + value.masked_fill(torch.ones_like(value, dtype=torch.bool), 0)
        return value, result


def _of_one_output(f: Tensor, own: Tensor, probes: Sequence[Weighted], keep: bool) -> Tensor:
    """The sum over the probes for one output of each point, [N]."""
    gradient = _gradient(f, own, torch.ones_like(f))
    total = torch.zeros_like(f, requires_grad=False)
    ones = torch.ones_like(total, dtype=own.dtype)
    for probe, weight in probes:
        term = _term(gradient, own, probe, ones, keep)
        if term is not None:
            total = total + _weighted(term, weight)
    return total


def _of_all_outputs(
    y: Tensor, own: Tensor, probes: Sequence[Weighted], keep: bool
) -> Tensor | None:
    """The sums for all outputs, in the passes of one output.

        S(u)_n = sum_c u_nc L_nc is computed with cotangents u, and linear in u, so L = dS/du

    None if dS/du is wrong, because torch lacks it or a custom Function detaches it: then sum_c u_nc
    dS/du_nc differs from S.
    """
    # Different cotangents for each output: equal ones cancel for a softmax, whose sum is constant.
    weights = torch.linspace(1, 2, y.shape[1], dtype=y.dtype, device=y.device)
    u = weights.expand_as(y).clone().requires_grad_()
    gradient = _gradient(y, own, u)
    S = size = torch.zeros_like(y[:, 0], requires_grad=False)
    L = torch.zeros_like(y, requires_grad=False)
    ones = torch.ones_like(S)
    try:
        for probe, weight in probes:
            term = _term(gradient, own, probe, ones, keep=True)
            if term is None:
                continue
            term = _weighted(term, weight)
            size = size + term.detach().abs()
            S = S + (term if keep else term.detach())
            if term.requires_grad and not keep:  # differentiate now, to free the graph of this pass
                L = L + torch.autograd.grad(term, u, ones, retain_graph=True)[0]
        if S.requires_grad:
            (L,) = torch.autograd.grad(S, u, ones, create_graph=True)
    except RuntimeError:
        return None
    if len(y):
        gap = ((L * u).detach().sum(1) - S.detach()).abs()
        rounding = torch.finfo(y.dtype).eps ** 0.5 * size.nan_to_num(0, 0, 0).amax()
        if bool((gap > rounding).any()):
            return None
    return L


def _weighted(term: Tensor, weight: Any) -> Tensor:
    return term if not isinstance(weight, Tensor) and weight == 1 else term * weight


def _gradient(y: Tensor, own: Tensor, cotangents: Tensor) -> Tensor:
    """The gradient by the points, with its graph."""
    (gradient,) = vjp([y], [own], [cotangents], CALLER, create_graph=True)
    if gradient is None:
        raise _independent_error()
    return gradient


def _independent_error() -> Exception:
    """The error for a value that does not depend on x."""
    return NoSecondDerivative(
        "func(x, *args): expected a value that depends on x, got one that does not; look for "
        ".detach(), .item(), .data or a torch.no_grad() in func, and for a func that uses other "
        "points than those it is given."
    )


def _term(gradient: Tensor, own: Tensor, probe: Probe, ones: Tensor, keep: bool) -> Tensor | None:
    """The term of a probe, [N]; None if the gradient does not depend on the points."""
    component = _component(gradient, probe, ones.shape[0])
    (product,) = vjp([component], [own], [ones], CALLER, True, keep)
    return None if product is None else _component(product, probe, ones.shape[0])


def _component(vectors: Tensor, probe: Probe, points: int) -> Tensor:
    """The component of each point's vector along a probe, [N]."""
    if isinstance(probe, int):
        flat = vectors.dim() == 2 and vectors.shape[0] == points
        return (vectors if flat else vectors.reshape(points, -1))[:, probe]
    return (vectors * probe).reshape(points, -1).sum(1)


def by_forward(func: Function, x: Tensor, directions: Layout) -> tuple[Tensor, Tensor]:
    """sum_r w_r v_r^T H v_r in forward over reverse: a run of func for each v.

    No vmap, because not every func supports it. All runs draw equal random numbers, and the generators
    advance as in one run.
    """

    def checked(own: Tensor) -> Tensor:
        value = func(own)
        check_custom_functions(graph_summary(value), CALLER)
        if not value.requires_grad:
            raise _independent_error()
        return value

    with fixed_random_numbers([x]):
        value = func(x)
    points, outputs, probes = _sizes(x, value, directions)
    total = torch.zeros_like(value).reshape(points, outputs)
    for k, (probe, weight) in enumerate(probes):

        def derivatives(own: Tensor, probe: Probe = probe) -> tuple[Tensor, ...]:
            y, pull = torch.func.vjp(checked, own)[:2]
            return tuple(_component(g, probe, points) for g in _of_each_output(pull, y))

        last = k == len(probes) - 1
        # Only the last run advances the generators.
        draws = nullcontext() if last else fixed_random_numbers([x])
        one_thread = torch_forward_mode.one_thread_in_forward_mode(CALLER)
        with draws, translate_errors(CALLER), one_thread:
            output: Any = torch.func.jvp(derivatives, (x,), (probe,))
        total = total + _weighted(torch.stack(output[1], 1), weight)
    return value, total.reshape(value.shape)


def _of_each_output(pull: Callable[[Tensor], Any], y: Tensor) -> list[Tensor]:
    """For each output of a point, the gradients by all points. pull: u -> J^T u."""
    outputs = prod(y.shape[1:])
    chosen = torch.eye(outputs, dtype=y.dtype, device=y.device)
    return [pull(row.expand(y.numel() // outputs, outputs).reshape(y.shape))[0] for row in chosen]


def _sizes(x: Tensor, value: Tensor, directions: Layout) -> tuple[int, int, Sequence[Weighted]]:
    """The number of points, the number of outputs of a point, and the weighted probes."""
    points = value.shape[0] if value.dim() else 1
    outputs = prod(value.shape[1:])
    return points, outputs, directions(value.dim() > 0) if x.numel() and value.numel() else ()


def point_gradients(values: Function, x: Tensor, keep: bool) -> Tensor:
    """The gradient of each output by its point, [N, ...outputs, ...x], by one more run of func."""
    with fixed_random_numbers([x]):
        if torch_internals.transforms_active():
            y, pull = torch.func.vjp(values, x)[:2]
        else:
            (own,) = fresh_leaves([x], keep)
            y = values(own)

            def pull(u: Tensor) -> Any:
                return materialize_grads(vjp([y], [own], [u], CALLER, True, keep), [own])

        rows = _of_each_output(pull, y)
    return torch.stack(rows, 1).reshape(*y.shape, *x.shape[1:]) if y.dim() else rows[0]


def point_values(func: Callable[..., Tensor], args: tuple[Any, ...]) -> Function:
    """x -> func(x, *args), checked: a value for each point, which depends on no other point, or the
    scalar value of one point."""
    refuse_mixing = _MixingCheck(func)
    # A module is called with copies of its buffers: its forward may change them.
    call = partial(call_with, func, {}) if isinstance(func, nn.Module) else func

    def values(points: Tensor) -> Tensor:
        with translate_batch_errors((points,), func, "inputs"), _BatchNormWatcher() as norms:
            value = call(points, *args)
        with torch_internals.without_functions_seen():  # else modes intercept x.shape
            batched = check_value(value, points).dim() > 0
        if batched and norms.in_training:
            raise ArgumentValueError(
                "func(x, *args): expected each point's value to depend on that point alone, got "
                "a batch norm in training mode, whose mean and variance come from all points. "
                "Call `.eval()` on the model, or use LayerNorm or GroupNorm in its place."
            )
        if batched:
            refuse_mixing(value, points)
        return value

    return values


class _MixingCheck:
    """Raises if the value of a point depends on other points.

    The check runs once for each function (`owner_of`), its modules and the shape of a point.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self._owner = owner_of(func)  # results are memoized on it
        reached = func, *torch_internals.closed_over(func)
        held = [x for x in reached if isinstance(x, nn.Module)]
        # part of the key of the memo: the modules in func, and whether they are in train mode
        self._modules = tuple((id(module), module.training) for module in held)

    def __call__(self, value: Tensor, points: Tensor) -> None:
        with torch_internals.without_functions_seen():
            count, point = value.shape[0], points.shape[1:]
        if count < 2 or not value_checks_on() or torch_internals.transforms_active():
            return

        def mixes() -> bool | None:
            # Modes off: Taylor mode would record this backward as a backward in func.
            with _disable_current_modes(), suppress(RuntimeError):
                # Test the second half: in a causal layer the first point depends on no other point.
                last = torch.arange(count, device=points.device) >= count // 2
                half = value[last].flatten()
                u = torch.linspace(1, 2, len(half), dtype=half.dtype, device=half.device)
                return depends_on_others(half @ u, [points], [last], CALLER)
            return None

        if memoize_on(self._owner, (point, self._modules), mixes):
            raise ArgumentValueError(
                "func(x, *args): expected each point's value to depend on that point alone, got one "
                "that depends on others, as through attention, a mean, a convolution or a Fourier "
                "transform along the points. Points that act on each other are one: put them into one "
                "entry of the first dimension of x, or take derivatives of them all along a direction "
                "with `hoglib.directional` or `hoglib.jet`."
            )


def depends_on_others(
    score: Tensor, leaves: Sequence[Tensor], own: Sequence[Tensor], caller: str
) -> bool | None:
    """Whether a score of some samples has a gradient by other samples' points; None without any
    gradient.

    own: For each leaf a mask of the rows of the scored samples.
    """
    if not score.requires_grad or not any(leaf.requires_grad for leaf in leaves):
        return None
    by_own = by_others = 0.0
    grads = vjp([score], [*leaves], [torch.ones_like(score)], caller, retain_graph=True)
    for grad, rows in zip(grads, own, strict=True):
        if grad is not None:
            by_own = max(by_own, largest(grad[rows]))
            by_others = max(by_others, largest(grad[~rows]))
    return None if not by_own and not by_others else by_others > TOLERANCE * by_own


@final
class _BatchNormWatcher(TorchFunctionMode):
    """Notes whether a batch norm normalised by statistics of the batch."""

    in_training = False

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm or func is torch.batch_norm:
            self.in_training |= bool(args[5] if len(args) > 5 else kwargs.get("training", False))
        return func(*args, **kwargs)


def check_value(value: Any, x: Tensor) -> Tensor:
    """The value; raises unless it is a scalar, or has a row for each point."""
    validation.tensor("func(x, *args)", value)
    if not value.is_floating_point():
        validation.real("func(x, *args)", value)
    if value.dim() and (x.dim() == 0 or value.shape[0] != x.shape[0]):
        raise ArgumentValueError(
            f"func(x, *args): expected one value for each point, [{len(x) if x.dim() else 'N'}, ...], "
            f"or a scalar for one point, got {validation.describe(value)} for x of shape "
            f"{tuple(x.shape)}; the points are the first dimension of x, `x[:, None]` for numbers"
            f"{validation.OF_ONE.format('point') if x.dim() == 1 else ''}."
        )
    return value
