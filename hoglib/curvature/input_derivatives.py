"""Second derivatives of many values, each by its own point: the routes of `laplacian`.

A probe is the number i of an element of a point, and asks for d^2 f / dx_i^2; or a tensor v like x, and
asks for v^T H v at each point. The routes give values and sums over the probes.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hoglib._core import torch_internals, validation
from hoglib._core.autograd import clone_inference_tensors, grad_enabled, translate_errors
from hoglib._core.finite_differences import fixed_random_numbers
from hoglib._core.gradient_graph import (
    GraphSummary,
    check_custom_functions,
    graph_summary,
    warn_detached,
)
from hoglib._core.swap import call_with, keep_swapped
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NoSecondDerivative
from hoglib.stand_ins.mode import stand_ins_if

Probe = int | Tensor
Function = Callable[[Tensor], Tensor]
WHAT = "laplacian"


def by_reverse(
    func: Function, x: Tensor, signs: Sequence[Tensor] | None, keep: bool, always: bool
) -> tuple[Tensor, Tensor]:
    """Reverse-over-reverse: one run of func, one gradient, and a backward pass for each probe.

    keep: the results can be differentiated, if there is something to differentiate by; always: even
    if there is nothing.
    """
    own = x.view_as(x) if keep and x.requires_grad else x.detach().requires_grad_()
    value = func(own)
    graph = graph_summary(value)
    check_custom_functions(graph, WHAT)
    keep = keep and (
        always or x.requires_grad or any(leaf is not own for leaf in graph.leaves.values())
    )
    points, outputs, probes = _sizes(x, value, signs)
    y = value.reshape(points, outputs)
    # all at once takes twice the passes where none is kept, which pays from four outputs on
    together = outputs > (1 if keep else 3) and y.dtype == x.dtype
    result = _of_all_outputs(y, own, graph, probes, keep) if together else None
    if result is None:
        found = [_of_one_output(f, own, graph, probes, keep) for f in y.unbind(1)]
        result = torch.stack(found, 1) if found else torch.zeros_like(y)
    result = result.reshape(value.shape)
    if not keep:
        return value.detach().clone(), result.detach()
    if not result.requires_grad:  # linear in x: zeros, from which a loss can still go backward
        result = value.masked_fill(torch.ones_like(value, dtype=torch.bool), 0)
    return value, result


def _of_one_output(
    f: Tensor, own: Tensor, graph: GraphSummary, probes: Sequence[Probe], keep: bool
) -> Tensor:
    gradient = _gradient(f, own, graph, torch.ones_like(f))
    total = torch.zeros_like(f, requires_grad=False)
    ones = torch.ones_like(total, dtype=own.dtype)
    for probe in probes:
        term = _term(gradient, own, probe, ones, keep)
        if term is not None:
            total = total + term
    return total


def _of_all_outputs(
    y: Tensor, own: Tensor, graph: GraphSummary, probes: Sequence[Probe], keep: bool
) -> Tensor | None:
    """All outputs in the passes of one.

        S(u)_n = sum_c u_nc L_nc, computed with the cotangents u; linear in them, so L = dS/du

    None where that last derivative is not right, because torch lacks it or somebody's Function cuts
    it: then sum_c u_nc dS/du_nc is not S.
    """
    # different for each output: those of a softmax, whose sum is constant, would cancel
    weights = torch.linspace(1, 2, y.shape[1], dtype=y.dtype, device=y.device)
    u = weights.expand_as(y).clone().requires_grad_()
    gradient = _gradient(y, own, graph, u)
    S = size = torch.zeros_like(y[:, 0], requires_grad=False)
    L = torch.zeros_like(y, requires_grad=False)
    ones = torch.ones_like(S)
    try:
        for probe in probes:
            term = _term(gradient, own, probe, ones, keep=True)
            if term is None:
                continue
            size = size + term.detach().abs()
            S = S + (term if keep else term.detach())
            if term.requires_grad and not keep:  # what a pass holds goes with it
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


def _gradient(y: Tensor, own: Tensor, graph: GraphSummary, cotangents: Tensor) -> Tensor:
    gradient = None
    if y.requires_grad:
        with translate_errors(WHAT), warn_detached(graph, WHAT):
            (gradient,) = torch.autograd.grad(
                y, own, cotangents, create_graph=True, allow_unused=True
            )
    return _dependent(gradient)


def _dependent(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise NoSecondDerivative(
            "func(x, *args): expected a value that depends on x, got one that does not; look for "
            ".detach(), .item(), .data or a torch.no_grad() in func, and for a func that uses other "
            "points than those it is given."
        )
    return gradient


def _term(gradient: Tensor, own: Tensor, probe: Probe, ones: Tensor, keep: bool) -> Tensor | None:
    """[N], or None where the gradient does not depend on the points."""
    along = _along(gradient, probe, len(ones))
    if not along.requires_grad:
        return None
    with translate_errors(WHAT):
        (product,) = torch.autograd.grad(
            along, own, ones, retain_graph=True, create_graph=keep, allow_unused=True
        )
    return None if product is None else _along(product, probe, len(ones))


def _along(vectors: Tensor, probe: Probe, points: int) -> Tensor:
    """The component of each point's vector that a probe asks for: [N]."""
    if isinstance(probe, int):
        flat = vectors.dim() == 2 and len(vectors) == points
        return (vectors if flat else vectors.reshape(points, -1))[:, probe]
    return (vectors * probe).reshape(points, -1).sum(1)


def by_forward(func: Function, x: Tensor, signs: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Forward-over-reverse: a run of func for each probe, without vmap, which not every func stands.

    All runs see the same random numbers, and those move on as by one run.
    """

    def watched(own: Tensor) -> Tensor:
        value = func(own)
        check_custom_functions(graph_summary(value), WHAT)
        if not value.requires_grad:
            _dependent(None)
        return value

    with fixed_random_numbers([x]):
        value = func(x)
    points, outputs, probes = _sizes(x, value, signs)
    total = torch.zeros_like(value).reshape(points, outputs)
    for k, probe in enumerate(probes):

        def derivatives(own: Tensor, probe: Probe = probe) -> tuple[Tensor, ...]:
            pulling: Any = torch.func.vjp(watched, own)
            y, pull = pulling
            chosen = torch.eye(outputs, dtype=y.dtype, device=y.device)
            gradients = (pull(row.expand(points, outputs).reshape(y.shape))[0] for row in chosen)
            return tuple(_along(gradient, probe, points) for gradient in gradients)

        last = k == len(probes) - 1
        with nullcontext() if last else fixed_random_numbers([x]), translate_errors(WHAT):
            output: Any = torch.func.jvp(derivatives, (x,), (_tangent(x, probe, points),))
        total = total + torch.stack(output[1], 1)
    return value, total.reshape(value.shape)


def _tangent(x: Tensor, probe: Probe, points: int) -> Tensor:
    if isinstance(probe, Tensor):
        return probe
    one = torch.zeros(x.numel() // points, dtype=x.dtype, device=x.device)
    one[probe] = 1
    return one.expand(points, -1).reshape(x.shape)


def _sizes(
    x: Tensor, value: Tensor, signs: Sequence[Tensor] | None
) -> tuple[int, int, Sequence[Probe]]:
    """Points, outputs of each, and the probes: signs, or the elements of a point."""
    points = value.shape[0] if value.dim() else 1
    outputs = prod(value.shape[1:])
    if not (x.numel() and value.numel()):
        return points, outputs, ()
    return points, outputs, range(x.numel() // points) if signs is None else signs


# === The Laplacian of a network in its inputs: what PINNs and score matching differentiate.


def laplacian(
    func: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    num_projections: int | None = None,
    generator: torch.Generator | None = None,
    create_graph: bool | None = None,
    stand_ins: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""The value of a function at many points, and its Laplacian by their coordinates.

        f_n = func(x, *args)_n        L_n = sum_i d^2 f_n / d x_{n,i}^2
        with num_projections = k:     L_n ~ 1/k sum_v v^T (d^2 f_n / d x_n^2) v,  v_i = -1 or 1

    Shapes: x [N, ...], N points that func treats each by itself; f and L [N] or [N, ...outputs]. If
    func gives a scalar, x is one point of any shape. func may be an `nn.Module`; per-point data
    (a time, a class) go into args.

        u, lap = hoglib.laplacian(net, x)                  # x [N, 2], net(x) [N, 1]
        loss = (lap + source).square().mean()              # Poisson's equation
        loss.backward()

    Exact: a gradient with its graph, and a backward pass for each of the D elements of a point;
    several outputs take the passes of one. The estimate takes k passes; its mean is L, its variance
    2/k sum_{i != j} H_ij^2, and for a diagonal H it is exact.
    create_graph: whether f and L can be differentiated again, by parameters, x or args. By default
    they can where gradients are enabled and something needs one; then all D passes stay in memory
    until backward. Inside torch.func transforms they always can, and the route is forward-over-reverse,
    with a run of func for each element. stand_ins: as in `hvp`.

    The inputs are not changed, and it works under no_grad and inference_mode. A network of ReLUs has
    Laplacian zero: take tanh, SiLU or sine.
    Raises TypeError and ValueError for an x, a value or an option of the wrong kind, and where
    train-mode batch norm makes points depend on each other; RuntimeError where the value does not
    depend on x; NotImplementedError where torch has no derivative.
    Source: Raissi, Perdikaris and Karniadakis, 2019; the estimate: Hutchinson, 1989, and Song et al.,
    Sliced Score Matching, 2019.
    """
    validation.function("func", func)
    _points(x)
    if create_graph is not None:
        validation.flag("create_graph", create_graph)
    keep = torch.is_grad_enabled() if create_graph is None else create_graph
    signs = None if num_projections is None else _signs(x, num_projections, generator)
    with grad_enabled(), keep_swapped(), stand_ins_if(stand_ins):
        x, inputs = clone_inference_tensors((x, args))
        # a module's own parameters, but copies of the buffers, which its forward may change
        call = partial(call_with, func, {}) if isinstance(func, nn.Module) else func

        def values(points: Tensor) -> Tensor:
            with _BatchNorms() as norms:
                value = _value(call(points, *inputs), points)
            if value.dim() and norms.in_training:
                raise ArgumentValueError(
                    "func(x, *args): expected each point's value to depend on that point alone, got "
                    "a batch norm in training mode, whose mean and variance come from all points. "
                    "Call `.eval()` on the model, or use LayerNorm or GroupNorm in its place."
                )
            return value

        if torch_internals.transforms_active():
            value, total = by_forward(values, x, signs)
        else:
            value, total = by_reverse(values, x, signs, keep, always=create_graph is True)
    return value, total if num_projections is None else total / num_projections


class _BatchNorms(TorchFunctionMode):
    """Sees whether a batch norm took its statistics from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.in_training = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm or func is torch.batch_norm:
            self.in_training |= bool(args[5] if len(args) > 5 else kwargs.get("training", False))
        return func(*args, **kwargs)


def _points(x: Any) -> None:
    validation.differentiable("x", x)
    if x.is_complex():
        raise ArgumentTypeError(
            f"x: expected real coordinates, got {validation.describe(x)}, whose Laplacian is not one "
            "thing; pass its real view, `torch.view_as_real(x)`, and rebuild it in func."
        )


def _signs(x: Tensor, number: Any, generator: Any) -> list[Tensor]:
    """Rademacher vectors: -1 or 1 at each element of each point."""
    validation.at_least("num_projections", number, 1)
    if validation.generator(generator) is not None and generator.device.type != x.device.type:
        raise ArgumentValueError(
            f"generator: expected one on {x.device.type}, as x, got one on {generator.device.type}; "
            f"make it with `torch.Generator({x.device.type!r})`."
        )
    shape = (number, *x.shape)
    signs = torch.randint(0, 2, shape, generator=generator, device=x.device)
    return list((2 * signs - 1).to(x.dtype))


def _value(value: Any, x: Tensor) -> Tensor:
    validation.tensor("func(x, *args)", value)
    if not value.is_floating_point():
        raise ArgumentTypeError(
            f"func(x, *args): expected a real floating-point tensor, got {validation.describe(value)}."
        )
    if value.dim() and (x.dim() == 0 or value.shape[0] != x.shape[0]):
        raise ArgumentValueError(
            f"func(x, *args): expected one value for each point, [{len(x) if x.dim() else 'N'}, ...], "
            f"or a scalar for one point, got {validation.describe(value)} for x of shape "
            f"{tuple(x.shape)}; the points are the first dimension of x, `x[:, None]` for numbers."
        )
    return value
