"""J^T M J v: generalised Gauss-Newton and Fisher matrices at one point.

J is the Jacobian of a model's outputs by its parameters. M is a symmetric matrix on the outputs: the
Hessian of the criterion, or the Fisher matrix of the distribution that the outputs parametrise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointError

from hoglib import errors
from hoglib._core.messages import validation
from hoglib._core.numerics import finite_differences
from hoglib._core.numerics.finite_differences import directional_derivative
from hoglib._core.numerics.trust import memoize_on
from hoglib._core.problem import Policy, Problem
from hoglib._core.runtime.ambient import AMBIENT, inside
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.autograd import (
    Vector,
    check_uses_given_params,
    fresh_leaves,
    materialize_grads,
    no_forward_mode,
    vjp,
    without_graph,
)
from hoglib._core.substrate.gradient_graph import check_custom_functions, graph_bytes, graph_summary
from hoglib._core.torch_api import pytree, torch_forward_mode, torch_internals
from hoglib._core.torch_api.torch_modes import value_checks_on
from hoglib.curvature.maps.jacobian_product import (
    FORWARD,
    TransposedJacobian,
    are_adjoint,
    detached,
    with_graph,
)
from hoglib.curvature.maps.likelihood import Counting
from hoglib.curvature.maps.linear_map import (
    DIFFERENCES,
    CurvatureKind,
    LinearMap,
    forward_over_reverse,
    in_double,
    reverse_over_reverse,
)
from hoglib.curvature.maps.rows import Rows

APART = (
    "For a model that returns its loss write `hoglib.functional_loss(model, criterion, forward=lambda "
    "model, batch: model(...).logits)`, or for a language model `hoglib.language_model_loss(model)`."
)
GaussNewtonMode = Literal["auto", "forward", "reverse", "finite-differences"]
MetricMap = Callable[[Vector, bool], Vector]  # (u, keep_graph) -> M u


class OutputMetric(ABC):
    """The matrix M on the outputs, before its point is given; equality and hash as for
    `CurvatureKind`."""

    seed: int | None = None  # with a seed, every product draws equal random numbers

    @property
    def random(self) -> bool:
        """Whether M draws random numbers for each batch."""
        return False

    @property
    def counting(self) -> Counting:
        """The denominator of the mean in M."""
        return "criterion"

    @abstractmethod
    def at(self, composite: "CompositeLoss", outputs: Vector) -> MetricMap:
        """(u, keep_graph) -> M u at these outputs."""

    def for_batch(self, number: int) -> "OutputMetric":
        """The metric for batch `number`; the number seeds its random numbers."""
        return self


def _refuse_linear(hessian: LinearMap, policy: Policy) -> None:
    """Raise for a criterion linear in the outputs: its Hessian is zero."""
    if hessian.gradient is not None and hessian.gradient.has_no_graph:
        raise errors.ArgumentValueError(
            f"{policy.caller}: expected a criterion that is not linear in the model's outputs, got "
            f"one whose gradient does not depend on them, so that the matrix is zero. {APART}"
        )


def _warn_if_zero(hessian: LinearMap, outputs: Vector, composite: "CompositeLoss") -> None:
    """Warn once of a criterion that is linear in the outputs although autograd records a graph."""
    caller = composite.policy.caller

    def is_zero(hessian: LinearMap) -> bool:
        # no vector of ones, which the Hessian of cross_entropy takes to zero
        numbers = [torch.arange(1.0, 1 + y.numel(), device=y.device) for y in outputs]
        u = [x.sin_().to(y).view_as(y) for x, y in zip(numbers, outputs, strict=True)]
        return not any(bool(part.any()) for part in hessian.apply(u, True)[1])

    def look() -> bool:
        if is_zero(hessian):
            # a classifier that fits all examples: the Hessian is zero here, and not at small ones
            small = composite.criterion_at([y.detach() / (1 + y.detach().norm()) for y in outputs])
            if is_zero(reverse_over_reverse(small)):
                warn(
                    f"{caller}: the Hessian of the criterion by the outputs is zero, and so is the "
                    "matrix: the criterion is linear in them (nll_loss, L1, hinge). For a model that "
                    "ends in log_softmax take cross_entropy of the logits, or `hoglib.FisherOperator`."
                )
        return True

    if value_checks_on():
        memoize_on(composite.loss, ("zero", caller), look)


@final
@dataclass(frozen=True)
class CriterionHessian(OutputMetric):
    """M = d^2 criterion / d outputs^2."""

    def at(self, composite: "CompositeLoss", outputs: Vector) -> MetricMap:
        policy, inside = composite.policy, torch_internals.transforms_active()
        closed_form = getattr(composite.loss, "gauss_newton", None)
        if closed_form is not None:  # a loss with a closed form, such as `language_model_loss`
            product = closed_form(composite.with_values(outputs), composite.batch)
            if not (policy.create_graph or inside):
                product = torch.no_grad()(product)
            return lambda u, keep_graph: product(u)
        if composite.mode == DIFFERENCES:
            if not inside:
                # Suppressed: this mode also takes criteria without a second derivative in autograd.
                with suppress(errors.NoSecondDerivative):
                    _refuse_linear(reverse_over_reverse(composite.criterion_at(outputs)), policy)
            gradient = finite_differences.gradient_function(composite.criterion)
            return lambda u, keep_graph: directional_derivative(gradient, outputs, u)
        # autograd.grad ignores torch.func's levels.
        linearize = forward_over_reverse if inside else reverse_over_reverse
        hessian = linearize(composite.criterion_at(outputs))
        _refuse_linear(hessian, policy)
        if not inside:
            _warn_if_zero(hessian, outputs, composite)
        return lambda u, keep_graph: hessian.apply(u, keep_graph)[1]


@final
@dataclass(frozen=True)
class GaussNewtonKind(CurvatureKind):
    """J^T M J, with the metric M on the outputs. mode: how J v is computed."""

    mode: str = "auto"
    metric: OutputMetric = CriterionHessian()

    def __post_init__(self) -> None:
        validation.choice("mode", self.mode, get_args(GaussNewtonMode))

    def for_batch(self, number: int) -> "GaussNewtonKind":
        metric = self.metric.for_batch(number)
        return self if metric is self.metric else replace(self, metric=metric)

    def linearize(self, problem: Problem, several: bool) -> LinearMap:
        if self.mode == DIFFERENCES:
            return in_double(lambda wide: differences_of_outputs(wide, self.metric), problem)
        composite = CompositeLoss(problem, self.metric, self.mode)
        if torch_internals.transforms_active():
            return by_torch_func(composite)
        # Compiled remat blocks have no forward mode; several vectors share the graph of reverse mode.
        several = several or problem.policy.compiles_blocks
        if self.mode == "reverse" or (self.mode == "auto" and several):
            return double_reverse(composite)
        forward = forward_then_reverse(composite)
        if self.mode == "forward":
            return forward

        def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
            try:
                return forward.apply(vector, keep_graph)
            except errors.UnsupportedError:  # an operation has no forward mode
                return double_reverse(composite).apply(vector, keep_graph)

        return LinearMap(apply)

    def check_loss(self, loss: object, what: str = "loss") -> Any:
        for part in ("outputs", "criterion"):
            if not callable(getattr(loss, part, None)):
                raise errors.ArgumentTypeError(
                    "loss: expected one from `hoglib.functional_loss(model, criterion)`, or an object "
                    "with .outputs(params, batch) and .criterion(outputs, batch), because the model's "
                    f"outputs are needed by themselves; got {validation.describe(loss)}."
                )
        if not getattr(loss, "separates_outputs", True):
            raise errors.ArgumentValueError(
                "loss: expected outputs and criterion apart, got a model that computes its own loss. "
                + APART
            )
        return loss


class CompositeLoss:
    """A loss as criterion(outputs(leaves)) at one batch, with the metric M on the outputs.

    problem: The loss at the batch, with policy and leaves.
    mode: How J v is computed.
    """

    def __init__(self, problem: Problem, metric: OutputMetric, mode: str) -> None:
        self.problem, self.mode, self.metric = problem, mode, metric
        self.loss, self.policy, self.leaves = problem.loss, problem.policy, problem.leaves
        (self.batch,) = problem.args
        self._last: Any = None  # the outputs of the last run, in the model's structure

    def outputs(self, leaves: Vector) -> Vector:
        """The floating-point tensors among the outputs; all other outputs are constants."""
        batch = self.batch
        # Clones: the model runs several times, and may change its batch in place.
        if self.mode == DIFFERENCES:
            batch = pytree.map_tensors(torch.clone, batch)
        # Without create_graph, J^T M J v differentiates the model's Functions only once.
        once = AMBIENT.examination._replace(first_order=not self.policy.create_graph)
        with inside(examination=once):
            self._last = self.loss.outputs(self.problem.params(leaves), batch)
        found = filter(pytree.is_float, pytree.leaves(self._last))
        return [validation.real("loss.outputs(params, batch)", y) for y in found]

    def detached_outputs(self, leaves: Vector) -> Vector:
        """`outputs` without a graph."""
        found: Vector = []

        def run() -> Tensor:
            found[:] = self.outputs(leaves)
            check_depends(found)
            return found[0]

        without_graph(run)
        return [y.detach() for y in found]

    def with_values(self, values: Any) -> Any:
        """The last outputs in their structure, with these values as the floating-point tensors."""
        return pytree.filled(self._last, values)

    def criterion(self, *values: Tensor) -> Tensor:
        """The criterion at the last outputs, with these values as the floating-point tensors."""
        # clone: a criterion may work in place, which autograd refuses for leaves.
        value = self.loss.criterion(self.with_values([y.clone() for y in values]), self.batch)
        return validation.scalar("criterion(outputs, targets)", value)

    def criterion_at(self, outputs: Vector) -> Problem:
        """The criterion as a problem, with the outputs as its leaves."""
        structure = pytree.flatten(outputs)[1]
        return Problem(self.policy, lambda values: self.criterion(*values), structure, outputs, ())

    def with_value(self, run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """run() and the loss: (outputs, ..., loss). The loss is the mean over the processes that share
        the parameters."""
        found: tuple[Any, ...] = ()

        def value() -> Tensor:
            nonlocal found
            found = run()
            if self.policy.create_graph:
                return self.criterion(*found[0])
            return without_graph(lambda: self.criterion(*found[0]))

        of_all = self.problem.placement.mean_of(value)  # calls value(), which sets found
        return (*found, of_all)

    def checked_outputs(self, p: Vector, twice: bool = True) -> tuple[Any, ...]:
        """(outputs, loss) at p, from `fresh_leaves`."""
        return self.with_value(lambda: (self.checked(self.outputs(p), twice),))

    def checked(self, outputs: Vector, twice: bool = True) -> Vector:
        """The outputs; raises if their graph has no second derivative, or contains the original
        parameters.

        twice: The outputs are differentiated twice.
        """
        ys = with_graph(outputs)
        check_depends(ys)
        graph = graph_summary(ys)
        if twice:
            check_custom_functions(graph, self.policy.caller)
        if not self.policy.create_graph:
            # If the model also read its own parameters, a part of the product would be missing.
            check_uses_given_params(graph, self.leaves, self.policy.caller)
        return outputs


def double_reverse(composite: CompositeLoss) -> LinearMap:
    """J v = d <J^T u, v> / d u, without forward mode. The graphs are kept between products."""
    caller, create_graph = composite.policy.caller, composite.policy.create_graph
    loss, placement = composite.problem.loss, composite.problem.placement
    p = fresh_leaves(composite.leaves, create_graph)
    outputs, value = composite.checked_outputs(p)
    jacobian = TransposedJacobian(outputs, p, caller, create_graph=create_graph)
    metric = composite.metric.at(composite, outputs)

    def products(vector: Vector, keep_graph: bool) -> tuple[Vector, Vector, Vector]:
        tangents = jacobian.jvp(vector, keep_graph, create_graph)
        weighted = metric(tangents, keep_graph)
        product = transposed_product(outputs, p, weighted, composite.policy, keep_graph)
        return tangents, weighted, product

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        tangents, weighted, product = products(vector, keep_graph)
        # J v comes from the graph of J^T u, and J^T u from the model's graph: the comparison shows if
        # one of the two graphs lost a part.
        sides = (vector, product), (tangents, weighted)
        if not are_adjoint(loss, *sides, jacobian.parts, placement):
            raise detached(caller)
        return value, product

    held_bytes = partial(graph_bytes, jacobian.parts)
    rows = Rows(
        composite.problem,
        composite.metric,
        lambda v: products(v, True)[2],
        held_bytes,
        lambda v: apply(v, True)[1],
    )
    return LinearMap(apply, held_bytes, lambda: jacobian.unused, several=(value, rows))


def forward_then_reverse(composite: CompositeLoss) -> LinearMap:
    """J^T (M (J v)): one run in forward mode gives the outputs and J v. Nothing is kept between
    products."""
    caller, create_graph = composite.policy.caller, composite.policy.create_graph
    loss, placement = composite.problem.loss, composite.problem.placement

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        p = fresh_leaves(composite.leaves, create_graph)

        def run() -> Any:
            with torch_forward_mode.one_thread_in_forward_mode(caller), forward_ad.dual_level():
                duals = [forward_ad.make_dual(x, v) for x, v in zip(p, vector, strict=True)]
                pairs = [forward_ad.unpack_dual(y) for y in composite.outputs(duals)]
                outputs = [y for y, _ in pairs]
                tangents = [torch.zeros_like(y) if t is None else t for y, t in pairs]
            return composite.checked(outputs), tangents

        try:
            outputs, tangents, value = composite.with_value(run)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            raise no_forward_mode(f"{caller}(mode='forward')", error) from error
        if not create_graph:
            tangents = [t.detach() for t in tangents]
        weighted = composite.metric.at(composite, outputs)(tangents, False)
        try:
            product = transposed_product(outputs, p, weighted, composite.policy, False)
        except CheckpointError as error:  # the recomputation has no tangents
            raise errors.UnsupportedError(
                f"{caller}(mode='forward'): expected no checkpoint in the model, got one; use "
                "mode='reverse'."
            ) from error
        sides = (vector, product), (tangents, weighted)
        if not are_adjoint(loss, *sides, with_graph(outputs), placement, FORWARD):
            raise errors.UnsupportedError(
                f"{caller}(mode='forward'): expected tangents and gradients that agree, <w, J v> = "
                "<J^T w, v>, got others: scripted code loses tangents, a Function has a wrong jvp, or "
                "torch's gradient is by convention not the derivative (padding_idx). Use "
                "mode='reverse'."
            )
        return value, product

    return LinearMap(apply)


def by_torch_func(composite: CompositeLoss) -> LinearMap:
    """J^T M J v by torch.func, inside its transforms."""

    def f(*p: Tensor) -> tuple[Tensor, ...]:
        return tuple(composite.outputs(list(p)))

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        outputs, transpose = torch.func.vjp(f, *composite.leaves)[:2]
        with torch_forward_mode.one_thread_in_forward_mode(composite.policy.caller):
            tangents = torch.func.jvp(f, tuple(composite.leaves), tuple(vector))[1]
        weighted = composite.metric.at(composite, list(outputs))(list(tangents), False)
        return composite.criterion(*outputs), list(transpose(tuple(weighted)))

    return LinearMap(apply)


def differences_of_outputs(problem: Problem, metric: OutputMetric) -> LinearMap:
    """J v by central differences of the outputs, J^T by ordinary backward."""
    composite, leaves = CompositeLoss(problem, metric, DIFFERENCES), problem.leaves

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        f = composite.detached_outputs
        tangents = directional_derivative(f, leaves, vector, problem.placement)
        p = fresh_leaves(leaves, False)
        outputs, value = composite.checked_outputs(p)
        weighted = composite.metric.at(composite, [y.detach() for y in outputs])(tangents, False)
        return value, transposed_product(outputs, p, weighted, composite.policy, False)

    return LinearMap(apply)


def transposed_product(outputs: Vector, p: Vector, u: Vector, policy: Policy, keep: bool) -> Vector:
    """J^T u, with zeros for unused leaves. Outputs without a graph are constants."""
    parts = vjp(outputs, p, u, policy.caller, keep, policy.create_graph)
    return materialize_grads(parts, p)


def check_depends(ys: Vector) -> None:
    """Raise if no output depends on the leaves. ys: the outputs with a graph."""
    if not ys:
        raise errors.NoSecondDerivative(
            "loss.outputs(params, batch): expected outputs that depend on params, got none that do; "
            "look for .detach(), .item(), .data or a torch.no_grad() in the model, for a loss that "
            "uses the model's own parameters instead of the params it is given, and for outputs in an "
            "object of your own class (give a tensor, a tuple or a dict, for instance by forward=)."
        )
