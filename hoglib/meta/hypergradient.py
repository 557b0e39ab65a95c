"""Gradients of a validation loss by what an inner training was set up with."""

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
from hoglib.meta.guards import inner_losses_finite
from hoglib.meta.implicit import SOLVERS, Residual, check_used, implicit_gradient, solver_of
from hoglib.meta.inner_loop import (
    MEMORY,
    StepChunk,
    check_truncate,
    gradient,
    is_before_the_last,
    unroll,
)
from hoglib.meta.optimizers import GradientTransformation, has_both, rule_of
from hoglib.stand_ins.mode import stand_ins_if

METHODS = ("unrolled", *SOLVERS)


class Hypergradient(NamedTuple):
    """What `hypergradient` finds."""

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
    r"""The gradient, by hyper, of a loss after a training that hyper sets up.

        gradient = d outer(theta*(hyper), hyper) / d hyper
        theta_0 = params        theta_{i+1} = rule(theta_i, d inner(theta_i, hyper) / d theta)
        theta* = theta_steps

    outer(params, hyper), inner(params, hyper): scalars; inner(params, hyper, batches[i]) where
    there are batches, one a step. hyper: any tree of floating-point tensors: weights of examples,
    strengths of a regulariser, data, learning rates, an initial point. params: where the training
    starts, a tree, or a function of hyper. rule: a `Rule`, or a function of hyper, for instance
    `lambda hyper: hog.meta.sgd(hyper["lr"])`. Gradients flow where hyper is an argument; tensors
    that the functions close over are constants.

    method: "unrolled" differentiates the steps themselves, exactly; memory and truncate as in
    `hoglib.meta.adapt`. "cg" and "neumann" take theta* for a minimum of inner and differentiate
    that, by the implicit function theorem (`implicit_gradient` has the equations), whatever way led
    there: rule, and the point of start, then have no influence; steps=0 takes params as they are.
    iterations, damping, tol: of the linear system; step_size: of the Neumann series. The result's
    `residual` says how well the system was solved, and how far theta* is from a minimum.

    Works under no_grad and in inference mode. Nothing is written to `.grad`.
    Raises RuntimeError for functions that do not depend on hyper as given, ValueError for missing
    rule or steps; FloatingPointError for an inner or outer loss that is not finite, naming the step.
    Sources: Maclaurin, Duvenaud and Adams, 2015; Shaban et al., 2019 (truncate); Lorraine et al.,
    2020.
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
        solver = solver_of(method, iterations, damping, tol, step_size)
    count = _steps(steps, batches, method, rule)
    with grad_enabled(), stand_ins_if(stand_ins):
        given, form = pytree.flatten(clone_inference_tensors(hyper))
        own = [leaf.detach().requires_grad_() for leaf in given]
        loop = _Loop(
            inner,
            clone_inference_tensors(params),
            rule,
            count,
            clone_inference_tensors(batches),
            truncate,
        )
        if solver is None:
            with keep_swapped():
                found, losses = loop.run(pytree.unflatten(own, form), memory)
                value = validation.scalar(
                    "outer(params, hyper)", outer(found, pytree.unflatten(own, form))
                )
                _check_finite(losses, value)
                grads: list[Tensor | None] = [None] * len(own)
                if value.requires_grad:
                    check_uses_given_params(graph_summary(value), given, "hypergradient")
                    grads = list(torch.autograd.grad(value, own, allow_unused=True))
            check_used(grads)
            result = pytree.unflatten(materialize_grads(grads, own), form)
            return Hypergradient(value.detach(), result, _detached(found), None)
        with torch.no_grad():
            found, losses = loop.run(pytree.unflatten(own, form), "store")
        fixed = None if batches is None else batches[-1]
        value, result, residual = implicit_gradient(
            lambda params, hyper: validation.scalar("outer(params, hyper)", outer(params, hyper)),
            lambda params, hyper: loop.value(params, hyper, fixed),
            _detached(found),
            pytree.unflatten(given, form),
            solver,
        )
        _check_finite(losses, value)
        return Hypergradient(value, result, _detached(found), residual)


class _Loop:
    """An inner training as a function of hyper."""

    def __init__(
        self, inner: Any, params: Any, rule: Any, steps: int, batches: Any, truncate: int | None
    ) -> None:
        self.inner, self.params, self.rule = inner, params, rule
        self.steps, self.batches, self.truncate = steps, batches, truncate

    def value(self, params: Any, hyper: Any, batch: Any) -> Tensor:
        more = () if self.batches is None else (batch,)
        return validation.scalar("inner(params, hyper)", self.inner(params, hyper, *more))

    def run(self, hyper: Any, memory: str) -> tuple[Any, list[Tensor]]:
        """The parameters at the end, and the inner loss at each step."""
        start = self.params(hyper) if callable(self.params) else _detached(self.params)
        if not self.steps:
            return start, []
        carry = (start, self._rule(hyper).init(start))
        segment = StepChunk(
            self._segment, lambda i: is_before_the_last(i, self.steps, self.truncate)
        )
        (found, _), losses = unroll(segment, self.steps, carry, (hyper, self.batches), memory)
        return found, losses

    def _segment(self, start: int, end: int, carry: Any, constants: Any) -> tuple[Any, list[Any]]:
        (params, state), (hyper, batches), losses = carry, constants, []
        for i in range(start, end):
            batch = None if batches is None else batches[i]
            grads, (loss, _) = gradient(
                lambda params, batch: (self.value(params, hyper, batch), ()),
                params,
                batch,
                constant=is_before_the_last(i, self.steps, self.truncate),
                alone=end - start == 1,
                check=i == 0,
            )
            params, state = self._rule(hyper).update(params, grads, state)
            losses.append(loss)
        return (params, state), losses

    def _rule(self, hyper: Any) -> GradientTransformation:
        return rule_of(self.rule, hyper, {})


def _steps(steps: int | None, batches: Any, method: str, rule: Any) -> int:
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
    if rule is not None and not has_both(rule):
        validation.function("rule", rule)
    return count


def _check_finite(losses: list[Tensor], value: Tensor) -> None:
    if losses:
        inner_losses_finite(
            torch.stack(losses), "Look for NaN in params, hyper or the data.",
            "The inner training diverges: lower its learning rate.",
        )  # fmt: skip
    validation.finite("outer(params, hyper)", value.detach(), "Look for NaN in its data.")


def _detached(tree: Any) -> Any:
    return pytree.map_tensors(Tensor.detach, tree)
