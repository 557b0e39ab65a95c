"""J v: the derivative of a function along a vector, in forward mode or by two backward passes."""

from collections.abc import Callable, Iterable
from functools import partial
from math import isfinite
from typing import Any, Literal, TypeVar, Unpack, final

import torch
from torch import Tensor

from hoglib import errors
from hoglib._core.messages import validation
from hoglib._core.numerics.tolerances import TOLERANCES
from hoglib._core.numerics.trust import memoize_on
from hoglib._core.problem import Options, Policy, Problem
from hoglib._core.runtime.ambient import AMBIENT, inside
from hoglib._core.substrate.autograd import (
    Vector,
    clone_inference_tensors,
    fresh_leaves,
    materialize_grads,
    no_forward_mode,
    vjp,
)
from hoglib._core.substrate.gradient_graph import check_custom_functions, graph_summary, half_dtypes
from hoglib._core.substrate.placement import UNSHARDED, Placement, refuse_sharded
from hoglib._core.torch_api import function_watch, pytree, torch_forward_mode, torch_internals
from hoglib._core.torch_api.torch_modes import ActiveStandIns, value_checks_on, without_stand_ins
from hoglib.capture.within import when_compiled, within_compile
from hoglib.ring import ring, run, warn_if_derivatives_not_finite
from hoglib.stand_ins.mode import run_operator
from hoglib.verification.function_rules import offers_jvp
from hoglib.verification.subject import is_users_own

Tree = Any
T = TypeVar("T")  # a pytree of tensors
FORWARD, REVERSE = "forward", "reverse"
CALLER = "jvp"
OPERATOR = "JacobianOperator"  # a caller without the option mode


def _like_jvp(value: object, *given: Any) -> Any:
    """Example results of `jvp` for torch.compile: the value, and tensors like the value."""
    return value, pytree.map(torch.clone, value)


@when_compiled(
    within_compile(
        _like_jvp, lambda primals, tangents: primals if type(primals) is tuple else (primals,)
    )
)
def jvp(
    func: Callable[..., T],
    primals: Tree,
    tangents: Tree,
    *,
    mode: Literal["auto", "forward", "reverse"] = "auto",
    **options: Unpack[Options],
) -> tuple[T, T]:
    r"""The value of a function and its derivative along a vector.

        y = func(*primals)        t = J v = d/de func(*(primals + e v)) at e = 0,  v = tangents

    One run of func computes y and t. If gradients are enabled, both can be differentiated by primals,
    by tangents, and by the parameters of the modules that func calls. The derivative of t by parameters
    is reverse mode over forward mode: torch's own layer norm, batch norm and others are silently wrong
    there, and ``stand_ins`` replaces them.

    Losses that treat t as a constant, such as MeanFlow's and the losses of continuous consistency
    models, use ``t.detach()``. Values that func computes under ``no_grad`` are constants, as in
    backward.

    The inputs are not changed, nor are buffers: the running statistics of a batch norm in training mode
    stay as they are. It works under no_grad and inference_mode, inside of itself and inside torch.func
    transforms.

    Args:
        func: The function ``func(*primals)``, or an `nn.Module`, that returns a tensor or a pytree of
            tensors.
        primals: Where the derivative is taken: a tuple of the arguments of func, or its one argument.
            Each argument is a pytree of floating-point tensors. Other inputs (classes, masks) are
            constants that func closes over: ``lambda x, t: model(x, t, labels)``.
        tangents: The vector v, with the structure, shapes and dtypes of primals.
        mode: "forward" runs func once with tangents, and needs a forward-mode rule for every operation.
            "reverse" differentiates J^T u by u, and needs a double backward instead. "auto" is
            "forward"; if forward mode fails, func runs again with "reverse" (for a custom Function
            without a jvp, a checkpoint, or while another thread is in forward mode, which torch has
            once per process). Inside torch.func transforms "auto" is "forward".
        **options: How func is evaluated, as :class:`hoglib.Options` describes it. The backward of a
            compiled call is a second graph, which runs func again; `hoglib.compiled_loss` of a loss
            that calls this function compiles both as one graph.
    Returns:
        The pair (y, t), in the order of `torch.func.jvp`; t has the structure of y. An integer tensor
        has a tangent of zeros.
    Raises:
        ArgumentTypeError, ArgumentValueError: for primals, tangents or a value of the wrong kind,
            naming the leaf.
        NoSecondDerivative: if the value does not depend on primals, or in mode "reverse" if a custom
            Function's backward has lost its graph.
        UnsupportedError: if torch has no derivative of an operation.
    References:
        Griewank and Walther, Evaluating Derivatives, 2008, chapter 3.
        Baydin, Pearlmutter, Radul and Siskind, Automatic Differentiation in Machine Learning: a Survey,
        2018.
        Geng, Deng, Bai, Kolter and He, Mean Flows for One-step Generative Modeling, 2025, algorithm 1.
    Example:
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> hog.jvp(lambda x: x[0] ** 2 * x, x, v)
        (tensor([1., 2.]), tensor([3., 4.]))
        >>> u = nn.Bilinear(2, 1, 2)  # a velocity u(z, t), and its derivative along (v, 1)
        >>> z, t = torch.randn(5, 2), torch.rand(5, 1)
        >>> value, dudt = hog.jvp(u, (z, t), (torch.ones_like(z), torch.ones_like(t)))
        >>> dudt.shape, dudt.requires_grad
        (torch.Size([5, 2]), True)
    """
    validation.function("func", func)
    validation.choice("mode", mode, ("auto", FORWARD, REVERSE))
    policy = Policy.of(CALLER, options)
    leaves, structure = _check_primals(primals)
    vector, _ = validation.vectors("tangents", tangents, primals, "primals", blocks=False)
    if policy.compiles:
        # New tensors: a graph would take a tensor given as primal and tangent for one input.
        leaves, vector = clone_inference_tensors((leaves, [v.view_as(v) for v in vector]))
    pushed = partial(_value_and_tangent, torch_internals.uncompiled(func), structure, mode, policy)
    return run(policy, func, pushed, (structure, mode, policy), leaves, vector)


def _check_primals(primals: Tree) -> tuple[Vector, Any]:
    """The leaves and the structure of primals; raises for leaves without derivatives."""
    leaves, structure = pytree.flatten(primals)
    if not leaves:
        raise errors.ArgumentValueError(
            "primals: expected at least one tensor, got none; pass the arguments of func that it is "
            "to be differentiated by."
        )
    refuse_sharded(CALLER, leaves, "primals")
    for name, leaf in zip(pytree.paths(primals), leaves, strict=True):
        if not pytree.is_float(leaf):
            raise errors.ArgumentTypeError(
                f"{validation.leaf_name('primals', name)}: expected a floating-point or complex "
                f"tensor, got {validation.describe(leaf)}, which has no derivatives; let func reach it "
                "by itself, `lambda x: model(x, labels)`, or make it one (`torch.tensor(0.5)`)."
            )
    return leaves, structure


def _value_and_tangent(
    func: Any, structure: Any, mode: str, policy: Policy, leaves: Vector, vector: Vector
) -> tuple[Tree, Tree]:
    """The value and the tangent in eager mode, in the structure of the value."""
    inside = torch_internals.transforms_active()
    create_graph = torch.is_grad_enabled() or inside
    # Ask before and after `active`: another thread may enter or leave forward mode in between.
    elsewhere = torch_forward_mode.forward_mode_elsewhere()
    active = torch_internals.forward_mode_active()
    if active and not (inside or elsewhere or torch_forward_mode.forward_mode_elsewhere()):
        raise errors.UnsupportedError(
            f"{CALLER}: expected to run outside of torch.autograd.forward_ad.dual_level, which cannot "
            f"be nested, got a call inside; use hoglib.{CALLER} or torch.func.jvp for the outer one."
        )
    if mode == REVERSE and inside:
        raise errors.UnsupportedError(
            f"{CALLER}: expected mode='auto' or '{FORWARD}' inside torch.func transforms, got "
            f"'{REVERSE}', which they do not see."
        )
    of_value: Any = None

    def function(*own: Tensor) -> Vector:
        """The tensors that func returns."""
        nonlocal of_value
        args = pytree.unflatten(own, structure)
        value = func(*args) if type(args) is tuple else func(args)
        found, of_value = pytree.flatten(value)
        if not found or not all(isinstance(y, Tensor) for y in found):
            other = next((y for y in found if not isinstance(y, Tensor)), value)
            raise errors.ArgumentTypeError(
                "func(*primals): expected a tensor, or a tuple, list or dict of tensors, got "
                f"{validation.describe(other)}"
                + ("" if other is value else " among them")
                + "; return the tensors alone."
            )
        return found

    with ring(policy, func, buffers=True):
        examiner = AMBIENT.examination.examiner
        before = {} if examiner is None else dict(examiner.differentiated)
        leaves, vector = clone_inference_tensors((leaves, vector))
        found: tuple[Vector, Vector] | None = None
        if mode != REVERSE:
            try:
                found = by_forward(function, leaves, vector)
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                reason = no_forward_mode(f"{CALLER}(mode='{FORWARD}')", error)
                if not isinstance(reason, errors.UnsupportedError) or mode == FORWARD or inside:
                    raise reason from error
                # Up to torch 2.13, the hooks of a checkpoint that raised live as long as the error.
                del reason
        if found is None:
            found = by_reverse(function, leaves, vector, create_graph)
        if examiner is not None and not (inside or any(t.requires_grad for t in found[1])):
            examiner.note_once(before)
    if not inside:
        torch_internals.unwrap_kept(func)

        def total(*own: Tensor) -> Tensor:
            floats = filter(pytree.is_float, function(*own))
            return pytree.sum_scalars([y.real.sum() for y in floats])

        problem = Problem(policy, func, structure, leaves, ())
        floats = filter(pytree.is_float, found[1])
        warn_if_derivatives_not_finite(problem, found[0][0], floats, total)
    parts = found if create_graph else ([x.detach() for x in part] for part in found)
    value, tangent = (pytree.unflatten(part, of_value) for part in parts)
    return value, tangent


def by_forward(f: Callable[..., Vector], leaves: Vector, vector: Vector) -> tuple[Vector, Vector]:
    """The values and the tangents, from one run in forward mode."""

    def checked(*own: Tensor) -> tuple[Tensor, ...]:
        values = f(*own)
        if not any(map(torch_internals.has_tangent, values)):
            raise _independent_error()
        return tuple(values)

    # NoGradStopsForwardAD goes below the stand-ins: hoglib's functions suspend stand-ins only if they
    # are the innermost mode.
    stand_ins = ActiveStandIns()
    with (
        torch_forward_mode.one_thread_in_forward_mode(CALLER),
        without_stand_ins(),
        torch_forward_mode.NoGradStopsForwardAD(_refuse_checkpoint, run_operator),
        stand_ins.resume(),
        function_watch.watching_functions(_refuse_own_jvp),
    ):
        # Clones: an operation in place changes primals and tangents.
        primals, tangents = ([x.clone() for x in given] for given in (leaves, vector))
        values, found = torch.func.jvp(checked, tuple(primals), tuple(tangents))[:2]
    return list(values), list(found)


def _refuse_checkpoint() -> None:
    """Raise for a checkpoint: in backward it would run again without tangents."""
    raise errors.UnsupportedError(
        f"{CALLER}(mode='{FORWARD}'): expected no torch.utils.checkpoint in func, got one, which would "
        f"run again without tangents in backward; use mode='{REVERSE}' or hoglib.ops.remat."
    )


def _refuse_own_jvp(function: Any, args: tuple[Any, ...]) -> None:
    """Raise for a user's Function with its own jvp under two levels of forward mode: torch returns zero
    for the second derivative."""
    function, args, by = torch_internals.outside_transforms(function, args)
    if function is torch_internals.SAVES_INPUTS:
        _refuse_checkpoint()
    if (
        torch_internals.forward_levels() > 1
        and any(by)
        and is_users_own(function)
        and offers_jvp(function)
    ):
        name = function.__qualname__
        raise errors.UnsupportedError(
            f"{CALLER}(mode='{FORWARD}'): expected Functions without a jvp of their own under two "
            f"levels of forward mode, got {name}: torch takes the second derivative of {name}.jvp for "
            f"zero, without an error. Use mode='{REVERSE}' for the outer one."
        )


def by_reverse(
    function: Callable[..., Vector], leaves: Vector, vector: Vector, create_graph: bool
) -> tuple[Vector, Vector]:
    """The values and the tangents, by J^T u and its derivative by u: two backward passes, no forward
    mode."""
    with without_stand_ins():
        p = fresh_leaves(leaves, create_graph)
    values = function(*p)
    ys = with_graph(values)
    if not ys:
        raise _independent_error()
    graph = graph_summary(ys)
    check_custom_functions(graph, CALLER)
    by_others = len(graph.leaves) > len(graph.reached(p))
    create_graph = create_graph and (by_others or any(v.requires_grad for v in vector))
    jacobian = TransposedJacobian(values, p, CALLER, create_graph=create_graph)
    if len(jacobian.unused) == len(p):
        raise _independent_error()
    tangents = jacobian.jvp(vector, create_graph, create_graph)
    if not jacobian.agrees(function, vector, tangents):
        raise detached(CALLER)
    if not create_graph:  # drop the graph: it ends at the leaves p made above
        values, tangents = [y.detach() for y in values], [t.detach() for t in tangents]
    return values, tangents


@final
class TransposedJacobian:
    """J^T u with a graph to the cotangents u: the derivative by u, along v, is J v.

    outputs: Outputs with a graph to the leaves p.
    caller: For messages.

    Attributes:
        unused: The indices of the leaves that no output uses.
        parts: J^T u for each used leaf.
    """

    def __init__(
        self, outputs: Vector, p: Vector, caller: str, *, create_graph: bool = False
    ) -> None:
        self._caller, self._outputs = caller, outputs
        ys = with_graph(outputs)
        self._us = [_distinct_cotangent(y).requires_grad_() for y in ys]
        # Without create_graph only the derivative by u is taken: first order in the model's Functions.
        once = AMBIENT.examination._replace(first_order=not create_graph)
        with inside(examination=once):
            by_u = vjp(ys, p, self._us, caller, create_graph=True)
        if any(part is not None and not part.requires_grad for part in by_u):
            raise detached(caller)  # J^T u is linear in u, so it has a graph unless detached
        self.unused = tuple(i for i, part in enumerate(by_u) if part is None)
        self._used = [i for i, part in enumerate(by_u) if part is not None]
        self.parts = [part for part in by_u if part is not None]

    def jvp(self, vector: Vector, keep_graph: bool, create_graph: bool) -> Vector:
        """J v for each output; zeros for outputs that do not depend on the leaves."""
        given = [vector[i] for i in self._used]
        left = iter(vjp(self.parts, self._us, given, self._caller, keep_graph, create_graph))
        found = [next(left) if y.requires_grad else None for y in self._outputs]
        return materialize_grads(found, self._outputs)

    def agrees(self, func: Callable[..., Any], vector: Vector, tangents: Vector) -> bool:
        """Whether <v, J^T u> = <J v, u>. func: the differentiated function; checks are counted for
        it."""
        along = [part for y, part in zip(self._outputs, tangents, strict=True) if y.requires_grad]
        given = [vector[i] for i in self._used]
        return are_adjoint(func, (given, self.parts), (along, self._us), self.parts)


def with_graph(outputs: Vector) -> Vector:
    """The outputs with a graph; outputs without a graph are constants."""
    return [y for y in outputs if y.requires_grad]


def _distinct_cotangent(y: Tensor) -> Tensor:
    """A cotangent with unequal elements: equal elements cancel for a softmax."""
    weights = torch.linspace(1, 2, max(y.numel(), 1), device=y.device)[: y.numel()]
    return weights.to(y.dtype).reshape(y.shape)


# The least rtol: a Function may compute its gradient in float32 for any dtype. A lost part is larger.
SINGLE = 1e-6
UNDERFLOW = 1e-30  # a smaller sum of float32 products may have underflowed


Pair = tuple[Vector, Vector]  # the two sides of an inner product


def are_adjoint(
    func: Any,
    inputs: Pair,
    outputs: Pair,
    graphs: Iterable[Tensor],
    placement: Placement = UNSHARDED,
    mode: str = REVERSE,
) -> bool:
    """Whether <v, J^T w> = <J v, w>; False if J v or J^T w lacks a part.

    The check costs inner products of all leaves, and a synchronization of a device. On a device it
    runs at the first call of a function at these shapes, on a CPU at calls 1, 2, 4, 8, ... On a CPU it
    runs at every call if processes share v, and in forward mode: tangents that disagree with the
    gradient (padding_idx) show for some vectors and batches only.

    inputs, outputs: The pairs (v, J^T w) and (J v, w).
    graphs: Tensors with the graphs of J and J^T; half precision inside widens the tolerance.
    placement: Of v and J^T w; all processes get one answer.
    mode: How J v was computed; calls are counted for each mode.
    """
    if not value_checks_on():
        return True
    sides, (v, Jv) = (inputs, outputs), (inputs[0], outputs[0])
    on_cpu = all(x.device.type == "cpu" for x in Jv)
    if on_cpu and (placement.is_sharded or mode == FORWARD):
        return _are_adjoint(sides, placement, graphs)
    key = ("adjoint", mode, *(x.shape for x in (*v, *Jv)))
    # [number of calls that agreed, or were not checked]
    before = memoize_on(func, key, lambda: [0]) or [0]
    skipped = before[0] & (before[0] + 1) if on_cpu else before[0]
    agreed = bool(skipped) or _are_adjoint(sides, placement, graphs)
    before[0] += agreed
    return agreed


def _inner(a: Tensor, b: Tensor) -> float:
    return torch.vdot(a.detach().reshape(-1), b.detach().reshape(-1)).real.item()


def _are_adjoint(sides: tuple[Pair, Pair], placement: Placement, graphs: Iterable[Tensor]) -> bool:
    dtypes = {x.dtype for side in sides for part in side for x in part}
    rtol = max(SINGLE, *(TOLERANCES[dtype].rtol for dtype in dtypes))
    if len(dtypes) == 1 and not placement.is_sharded:
        # A cheaper, stricter test, which most calls pass: |lhs| + |rhs| is at most the size below.
        lhs, rhs = (sum(_inner(a, b) for a, b in zip(*side, strict=True)) for side in sides)
        if abs(lhs) + abs(rhs) > UNDERFLOW and abs(lhs - rhs) <= rtol * (abs(lhs) + abs(rhs)):
            return True
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    # A second time in float64, if the sums disagree or may have underflowed.
    for wide in (False, True):
        # for each side: <a, b>, the sum of |a b|, |a|^2, |b|^2
        sums = torch.zeros(2, 4, dtype=torch.float64, device="cpu")
        for row, side in enumerate(sides):
            for i, (a, b) in enumerate(zip(*side, strict=True)):
                a, b = a.detach().conj(), b.detach()
                if wide:
                    a, b = (x.to(torch.promote_types(x.dtype, torch.float64)) for x in (a, b))
                squares = [(x.conj() * x).real.sum() for x in (a, b)]
                found = [(a * b).real.sum(), (a * b).abs().sum(), *squares]
                share = placement.weight if row else placement.copy_share(i)
                sums[row] += share * sums.new_tensor([float(x) for x in found])
        sums = placement.sum(sums)
        lhs, rhs = sums[:, 0].tolist()
        size = float(sums[:, 1].sum())
        lengths = (sums[:, 2] * sums[:, 3]).sqrt().tolist()
        if not isfinite(lhs + rhs):
            return True  # NaN and infinity are reported elsewhere
        # Subnormal numbers have few digits, or none.
        least = 1e3 * torch.finfo(torch.float32).tiny * float(sums[:, 2:].sqrt().sum())
        agreed = abs(lhs - rhs) <= rtol * size + 100 * eps * max(lengths) + least
        if agreed and (wide or size > UNDERFLOW):
            return True
    # The graph may compute in half precision inside: allow for its rounding.
    half = half_dtypes(graphs)
    return abs(lhs - rhs) <= max((TOLERANCES[dtype].rtol for dtype in half), default=0.0) * size


def detached(caller: str) -> Exception:
    """The error for a backward that has lost its graph."""
    where = f"{caller}(mode='reverse')"
    instead = "mode='forward', where there is one, does not need that graph, if they have a jvp"
    if caller == OPERATOR:
        where, instead = f"{caller} @ v", "J.T @ u does not need that graph"
    return errors.NoSecondDerivative(
        f"{where}: expected a backward that can be differentiated, got one whose "
        "gradient has lost its graph: it runs under no_grad, detaches, or leaves torch. "
        f"`hoglib.verify` of the custom Functions in the model names the line; {instead}."
    )


def _independent_error() -> Exception:
    """The error for a value that does not depend on primals."""
    return errors.NoSecondDerivative(
        "func(*primals): expected a value that depends on primals, got one that does not. Look for "
        ".detach(), .item(), .data or torch.no_grad() in func, and for a func that uses other tensors "
        "than those it is given, such as the model's own parameters."
    )
