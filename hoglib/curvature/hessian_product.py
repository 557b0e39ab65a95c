"""H v: the Hessian at one point, and the modes by which it is applied to a vector."""

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core import finite_differences, torch_forward_mode, torch_internals, validation
from hoglib._core.autograd import (
    Vector,
    check_uses_given_params,
    fresh_leaves,
    gradient_with_graph,
    materialize_grads,
    vjp,
)
from hoglib._core.gradient_graph import check_custom_functions, graph_bytes, graph_summary
from hoglib._core.state import RandomState
from hoglib.curvature.linear_map import (
    DIFFERENCES,
    BoundLoss,
    CurvatureKind,
    LinearMap,
    ProductOptions,
    no_forward_mode,
)
from hoglib.errors import ArgumentValueError, NoSecondDerivative, UnsupportedError
from hoglib.verification.entry_points import note_lost_graph

REVERSE, FORWARD = "reverse-over-reverse", "forward-over-reverse"


@final
@dataclass(frozen=True)
class HessianKind(CurvatureKind):
    """The Hessian of a loss."""

    mode: str = "auto"

    def __post_init__(self) -> None:
        validation.one_of("mode", self.mode, ("auto", REVERSE, FORWARD, DIFFERENCES))

    def linearize(
        self, loss: BoundLoss, leaves: Vector, options: ProductOptions, several: bool
    ) -> LinearMap:
        mode = REVERSE if self.mode == "auto" else self.mode
        if torch_internals.transforms_active() and mode != DIFFERENCES:
            _refuse_in_transforms(self.mode, options)
            mode = FORWARD
        if mode == REVERSE:
            return reverse_over_reverse(loss, leaves, options)
        _refuse_strict(mode, options)
        linearize = forward_over_reverse if mode == FORWARD else differences_of_gradient
        return linearize(loss, leaves, options)


def reverse_over_reverse(loss: Any, leaves: Vector, options: ProductOptions) -> LinearMap:
    """H v = d <grad f, v> / d p; the graph of the gradient is kept from one v to the next."""
    caller, create_graph = options.caller, options.create_graph
    found = gradient_with_graph(loss, leaves, caller, create_graph)
    note_lost_graph(found)
    value, own, gradient, graph = found

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        with graph.backward_modes():
            product = vjp(gradient, own, vector, caller, keep_graph, create_graph, graph)
            if options.strict is not None:
                _check_strict(caller, options.strict, product)
            return value, materialize_grads(product, own)

    def held_bytes() -> int:
        return graph_bytes([g for g in gradient if g is not None and g.requires_grad])

    def unused() -> tuple[int, ...]:
        return tuple(i for i, g in enumerate(gradient) if g is None)

    def is_zero() -> bool:
        return not any(g is not None and g.requires_grad for g in gradient)

    return LinearMap(apply, held_bytes, unused, is_zero)


def forward_over_reverse(loss: Any, leaves: Vector, options: ProductOptions) -> LinearMap:
    """H v = d grad f(p + e v) / d e in forward mode; nothing is kept between products."""
    at = leaves if options.create_graph else [leaf.detach() for leaf in leaves]
    inside = torch_internals.transforms_active()
    # Where the product has no graph, its gradient is not kept beside it.
    alone = not (options.create_graph or inside or torch_internals.tracing())

    def checked(*own: Tensor) -> Tensor:
        if alone:
            torch_forward_mode.keep_tangents(own)
        value: Tensor = loss(*own)
        check_custom_functions(graph_summary(value), options.caller)
        return value

    def value_and_gradient(with_graph: bool, *own: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        value_and_vjp: Any = torch.func.vjp(checked, *own)
        value, pull = value_and_vjp
        one = torch.ones_like(value)
        # Without a graph of the product, the one beneath is freed while the gradient is computed.
        return value, pull(one, retain_graph=with_graph and not alone, create_graph=with_graph)

    def in_forward_mode(with_graph: bool, vector: Vector) -> tuple[Tensor, Vector]:
        function = partial(value_and_gradient, with_graph)
        found: Any = torch.func.jvp(function, tuple(at), tuple(vector), has_aux=alone)
        if alone:
            value, _, product = found
        else:
            (value, _), (_, product) = found
        return value, list(product)

    with_graph = partial(in_forward_mode, True)

    def without_graph_first(vector: Vector) -> tuple[Tensor, Vector]:
        # The graph of the gradient is not needed, but torch has forward mode of some operations, such
        # as the backward of silu, only where there is one.
        before = RandomState()
        try:
            return in_forward_mode(False, vector)
        except NotImplementedError:
            before.restore()
            return with_graph(vector)

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        try:
            with torch_forward_mode.one_thread_in_forward_mode(options.caller):
                value, product = (without_graph_first if alone else with_graph)(vector)
        except (RuntimeError, NotImplementedError) as error:
            raise no_forward_mode(options.caller, FORWARD, error) from error
        if not (options.create_graph or inside):  # a graph is then of tensors from elsewhere
            check_uses_given_params(graph_summary(value), leaves, options.caller)
        return value, product

    return LinearMap(apply)


def differences_of_gradient(loss: BoundLoss, leaves: Vector, options: ProductOptions) -> LinearMap:
    """H v by central differences of the gradient."""
    gradient = finite_differences.gradient_function(loss)

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        value = loss(*fresh_leaves(leaves, False))
        check_uses_given_params(graph_summary(value), leaves, options.caller)
        product = finite_differences.directional_derivative(gradient, leaves, vector, loss.sharding)
        return value.detach(), product

    return LinearMap(apply)


def _check_strict(caller: str, names: tuple[str, ...], product: list[Tensor | None]) -> None:
    missing = [repr(name) for name, part in zip(names, product, strict=True) if part is None]
    if missing:
        raise NoSecondDerivative(
            f"{caller}(strict=True): expected a second derivative for every parameter, got none for "
            f"{', '.join(missing)}: the gradient does not depend on it. Leave it out of params, "
            f"or use strict=False, which gives zero there."
        )


def _refuse_strict(mode: str, options: ProductOptions) -> None:
    if options.strict is not None:
        raise ArgumentValueError(
            f"{options.caller}(strict=True): expected mode='{REVERSE}', got {mode}, which "
            "cannot tell a missing second derivative from a zero."
        )


def _refuse_in_transforms(mode: str, options: ProductOptions) -> None:
    if mode == REVERSE:
        raise UnsupportedError(
            f"{options.caller}: expected mode='auto' or '{FORWARD}' inside torch.func transforms, "
            f"got '{REVERSE}', whose vmap is silently wrong through normalisation layers."
        )
