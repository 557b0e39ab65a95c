"""Gradients of a validation loss with respect to what an inner training was set up with."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import (
    check_uses_given_params,
    clone_inference_tensors,
    grad_enabled,
    materialize_grads,
)
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.swap import keep_swapped
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from hoglib.meta.checks import check_inner_losses
from hoglib.meta.implicit import SOLVERS, Residual, Solver, check_used, implicit_gradient
from hoglib.meta.inner_loop import MEMORY, InnerSteps, check_truncate, is_truncated, unroll
from hoglib.meta.optimizers import GradientTransformation, is_transformation, resolve_rule
from hoglib.stand_ins.mode import stand_ins_if
from hoglib.verification.entry_points import examined_functions

METHODS = ("unrolled", *SOLVERS)


class Hypergradient(NamedTuple):
    """The result of `hypergradient`."""

    value: Tensor  # outer after the inner training
    gradient: Any  # its gradient, in the structure of hyper
    params: Any  # after the inner training
    residual: Residual | None  # of an implicit method


def hypergradient(
    outer: Callable[..., Tensor],
    inner: Callable[..., Tensor],
    params: Any,
    hyper: Any,
    *,
    rule: GradientTransformation | Callable[[Any], GradientTransformation] | None = None,
    steps: int | None = None,
    batches: Sequence[Any] | None = None,
    method: str = "unrolled",
    memory: str = "store",
    truncate: int | None = None,
    iterations: int | None = None,
    damping: float = 0.0,
    tol: float | None = None,
    step_size: float | None = None,
    stand_ins: bool = True,
) -> Hypergradient:
    r"""Differentiate a loss after a training with respect to whatever the training was set up with.

        gradient = d outer(theta*(hyper), hyper) / d hyper
        theta_0 = params        theta_{i+1} = rule(theta_i, d inner(theta_i, hyper) / d theta)
        theta* = theta_steps

    Gradients flow where hyper is an argument; tensors that the functions close over are constants.
    Method "unrolled" differentiates the steps themselves, exactly. "cg" and "neumann" take theta*
    for a minimum of inner, whatever led there, and differentiate it by the implicit function
    theorem:

        d outer / d hyper - (d^2 inner / d hyper d theta) (H + damping I)^-1 d outer / d theta

    with H the Hessian of inner at theta*. The rule and the initial point have no influence then. It
    works under no_grad and in inference mode. Nothing is written to `.grad`.

    Args:
        outer: The loss that is differentiated, ``outer(params, hyper)``, a scalar.
        inner: The loss of the training, ``inner(params, hyper)``, or ``inner(params, hyper,
            batches[i])`` where there are batches.
        params: Where the training starts: a pytree of tensors, or a function of hyper that returns
            one.
        hyper: Any pytree of floating-point tensors: weights of examples, strengths of a
            regulariser, data, learning rates, an initial point.
        rule: The update rule, such as ``hog.meta.sgd(0.1)``, or a function from hyper to one, such
            as ``lambda hyper: hog.meta.sgd(hyper["lr"])``.
        steps: The number of steps. Default: one for each batch, or 1; 0 for an implicit method
            without batches, which takes params for theta*.
        batches: What inner is given in each step. An implicit method uses the last for the minimum.
        method: "unrolled", "cg" (conjugate gradients) or "neumann" (the Neumann series).
        memory: What "unrolled" keeps for backward: "store" the graph of every step, "remat" the
            parameters after every step, "checkpoint" those after every sqrt(steps)-th step.
        truncate: With "unrolled", differentiate through the last so many steps only. Default: all.
        iterations: The iterations of the linear solver. Default: until tol for "cg", 100 for
            "neumann".
        damping: A number that is added to the diagonal of H, 0 or more.
        tol: The relative tolerance of conjugate gradients. Default: that of `hoglib.curvature.cg`.
        step_size: The step size of the Neumann series, below 2 over the largest eigenvalue of H.
        stand_ins: Run inside `hoglib.second_order()`, where torch calls without a right second
            derivative are replaced by their stand-ins.

    Returns:
        A `Hypergradient`: ``value``, ``gradient`` in the structure of hyper, ``params`` (theta*)
        and, of an implicit method, ``residual``.

    Raises:
        NoSecondDerivative: for functions that do not depend on hyper as given.
        ArgumentValueError: for a missing rule or missing steps.
        NonFiniteError: for an inner or outer loss that is not finite, naming the step.
        NotPositiveDefiniteError: for "cg" at a theta* that is not a minimum of inner.

    References:
        Maclaurin, Duvenaud and Adams, Gradient-based Hyperparameter Optimization through Reversible
        Learning, 2015; Shaban et al., Truncated Back-propagation, 2019; Lorraine, Vicol and
        Duvenaud, Optimizing Millions of Hyperparameters by Implicit Differentiation, 2020.

    Example:
        >>> found = hog.meta.hypergradient(
        ...     lambda params, hyper: params["w"].square(),
        ...     lambda params, hyper: (params["w"] - hyper["target"]).square(),
        ...     {"w": torch.tensor(0.0)}, {"target": torch.tensor(1.0)},
        ...     rule=hog.meta.sgd(0.25), steps=1,
        ... )
        >>> found.value, found.gradient
        (tensor(0.2500), {'target': tensor(0.5000)})
    """
    validation.one_of("method", method, METHODS)
    validation.one_of("memory", memory, MEMORY)
    validation.function("outer", outer)
    validation.function("inner", inner)
    check_truncate(truncate)
    if torch_internals.transforms_active():
        raise UnsupportedError(
            "hypergradient: expected to be called outside of torch.func transforms, got called "
            "inside one; write it with `hoglib.meta.adapt`, which runs inside of any."
        )
    validation.parameters(hyper, "hyper")
    solver = None
    if method != "unrolled":
        solver = Solver(method, iterations, damping, tol, step_size)
    count = _check_steps(steps, batches, method, rule)
    with examined_functions("hypergradient"), grad_enabled(), stand_ins_if(stand_ins):
        training = _Training(
            inner,
            clone_inference_tensors(params),
            rule,
            count,
            clone_inference_tensors(batches),
            truncate,
        )
        hyper = clone_inference_tensors(hyper)
        if solver is None:
            return _unrolled(outer, training, hyper, memory)
        return _implicit(outer, training, hyper, solver)


class _Training(NamedTuple):
    """An inner training as a function of hyper."""

    inner: Callable[..., Tensor]
    start: Any  # the initial parameters, or a function of hyper
    rule: Any
    steps: int
    batches: Any
    truncate: int | None

    def run(self, hyper: Any, memory: str) -> tuple[Any, list[Tensor]]:
        """The parameters at the end, and the inner loss of each step."""
        params = self.start(hyper) if callable(self.start) else _detached(self.start)

        def loss(i: int, params: Any, constants: Any) -> tuple[Tensor, Any]:
            hyper, batches = constants
            return self.value(params, hyper, None if batches is None else batches[i]), ()

        inner = InnerSteps(
            loss,
            lambda _, constants: resolve_rule(self.rule, constants[0], {}),
            lambda i: is_truncated(i, self.steps, self.truncate),
        )
        found = unroll(inner, self.steps, params, (hyper, self.batches), memory)
        return found.params, found.losses

    def value(self, params: Any, hyper: Any, batch: Any) -> Tensor:
        """The inner loss."""
        more = () if self.batches is None else (batch,)
        return validation.scalar("inner(params, hyper)", self.inner(params, hyper, *more))


def _unrolled(outer: Any, training: _Training, hyper: Any, memory: str) -> Hypergradient:
    """The gradient through all steps."""
    given, structure = pytree.flatten(hyper)
    own = [leaf.detach().requires_grad_() for leaf in given]
    at = pytree.unflatten(own, structure)
    with keep_swapped():
        params, losses = training.run(at, memory)
        value = validation.scalar("outer(params, hyper)", outer(params, at))
        _check_finite(losses, value)
        grads: list[Tensor | None] = [None] * len(own)
        if value.requires_grad:
            check_uses_given_params(graph_summary(value), given, "hypergradient")
            grads = list(torch.autograd.grad(value, own, allow_unused=True))
    check_used(grads)
    gradient = pytree.unflatten(materialize_grads(grads, own), structure)
    return Hypergradient(value.detach(), gradient, _detached(params), None)


def _implicit(outer: Any, training: _Training, hyper: Any, solver: Solver) -> Hypergradient:
    """The gradient through the minimum that the training ends at."""
    with torch.no_grad():
        params, losses = training.run(pytree.map_tensors(Tensor.detach, hyper), "store")
    batch = None if training.batches is None else training.batches[-1]
    value, gradient, residual = implicit_gradient(
        lambda params, hyper: validation.scalar("outer(params, hyper)", outer(params, hyper)),
        lambda params, hyper: training.value(params, hyper, batch),
        _detached(params),
        hyper,
        solver,
    )
    _check_finite(losses, value)
    return Hypergradient(value, gradient, _detached(params), residual)


def _check_steps(steps: int | None, batches: Any, method: str, rule: Any) -> int:
    if steps is None:
        steps = len(batches) if batches is not None else int(method == "unrolled")
    count = validation.at_least("steps", steps, 1 if method == "unrolled" else 0)
    if batches is not None and len(batches) < max(count, 1):
        raise ArgumentValueError(
            f"batches: expected one for each of {count} steps, got {len(batches)}."
        )
    if count and rule is None:
        raise ArgumentValueError(
            f"rule: expected an update rule for {count} inner steps, got None; for instance "
            "`rule=hoglib.meta.sgd(0.1)`."
        )
    if isinstance(rule, str):
        raise ArgumentTypeError(
            f"rule: expected a rule with its rate, got the name {rule!r}; for instance "
            "`rule=hoglib.meta.sgd(0.1)`."
        )
    if rule is not None and not is_transformation(rule):
        validation.function("rule", rule)
    return count


def _check_finite(losses: list[Tensor], value: Tensor) -> None:
    if losses:
        check_inner_losses(
            torch.stack(losses), "Look for NaN in params, hyper or the data.",
            "The inner training diverges: lower its learning rate.",
        )  # fmt: skip
    validation.finite("outer(params, hyper)", value.detach(), "Look for NaN in its data.")


def _detached(tree: Any) -> Any:
    return pytree.map_tensors(Tensor.detach, tree)
