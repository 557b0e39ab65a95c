"""A curvature matrix at one point as a linear map, the kinds of matrices, and the Hessian."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.modules.state import RandomState
from hoglib._core.numerics import finite_differences
from hoglib._core.problem import Policy, Problem
from hoglib._core.substrate.autograd import (
    Gradient,
    Vector,
    check_uses_given_params,
    fresh_leaves,
    gradient_with_graph,
    materialize_grads,
    no_forward_mode,
    vjp,
)
from hoglib._core.substrate.gradient_graph import check_custom_functions, graph_bytes, graph_summary
from hoglib._core.torch_api import pytree, torch_forward_mode, torch_internals
from hoglib.curvature.maps.rows import Chunk, Rows
from hoglib.errors import ArgumentValueError, NoSecondDerivative, UnsupportedError

DIFFERENCES = "finite-differences"


class LinearMap(NamedTuple):
    """A matrix at one point, defined by its products with vectors.

    ``apply(vector, keep_graph)`` returns the loss at the point and the product. Without
    ``keep_graph`` the graph is freed, and no product can follow.
    """

    apply: Callable[[Vector, bool], tuple[Tensor, Vector]]
    # memory held between products; of a compiled map known after the first product
    held_bytes: Callable[[], int] = lambda: 0
    # indices of the leaves that the loss does not depend on; None: unknown
    unused: Callable[[], tuple[int, ...] | None] = lambda: None
    gradient: Gradient | None = None  # the gradient that products differentiate, if kept
    # the loss, and products with several vectors at once; None: products loop
    several: tuple[Tensor, Rows] | None = None


class CurvatureKind(ABC):
    """A matrix of second derivatives of a loss, before the point is given.

    Hashable; two kinds are equal if their matrices are equal for every loss.
    """

    mode: str  # how products are computed
    metric: Any = None  # M, the matrix on the outputs in J^T M J; None for the Hessian

    @property
    def random(self) -> bool:
        """Whether M draws random numbers for each batch."""
        return self.metric is not None and self.metric.random

    @abstractmethod
    def linearize(self, problem: Problem, several: bool) -> LinearMap:
        """The matrix at the leaves of a problem, for one vector or for `several`."""

    def for_batch(self, number: int) -> "CurvatureKind":
        """The kind for batch `number`; the number seeds its random numbers."""
        return self

    def check_loss(self, loss: object, what: str = "loss") -> Any:
        return validation.function(what, loss)

    def check_policy(self, policy: Policy) -> Policy:
        """Raise if create_graph, compile or remat do not work with this kind or its mode."""
        caller = policy.caller
        if not (policy.create_graph or policy.backend):
            return policy
        if policy.create_graph and self.mode == DIFFERENCES:
            raise ArgumentValueError(
                f"{caller}(mode='{DIFFERENCES}'): expected create_graph=False, got True; differences "
                "have no graph. Use another mode."
            )
        if policy.compiles and self.mode == DIFFERENCES:
            raise ArgumentValueError(
                f"{caller}(mode='{DIFFERENCES}', compile=True): expected a mode that differentiates "
                "twice, got finite differences, whose step is chosen by values. Leave out one of the "
                "two."
            )
        if policy.compiles and self.random:
            raise UnsupportedError(
                f"{caller}(kind='mc', compile=True): expected a Fisher matrix without random draws, "
                "got a sampled one; a graph cannot draw from a torch.Generator. Use kind='exact', of "
                "which it is an estimate, or compile=False."
            )
        if policy.compiles_blocks and self.mode == "forward":
            raise ArgumentValueError(
                f"{caller}(mode='forward', remat=..., compile=...): expected a mode in which each "
                "block's passes are compiled, got dual tensors. Leave out mode or compile."
            )
        return policy


def apply_rows(
    linear_map: LinearMap,
    chunk: Chunk,
    count: int,
    keep: bool,
    chunk_size: int | None = None,
    dim: int = 0,
) -> tuple[Tensor, Vector]:
    """The loss, and the products with `count` vectors, stacked along dimension dim.

    chunk: (start, stop) -> vectors start to stop. keep: keep the graph after the last product.
    """
    if linear_map.several is not None and count > 1:
        value, rows = linear_map.several
        return value, rows.map(chunk, count, chunk_size, dim)
    values, products = [], []
    for j in range(count):
        # Contiguous: matrix products with strided vectors take 1.5 times as long.
        vector = [x[0].contiguous() for x in chunk(j, j + 1)]
        value, product = linear_map.apply(vector, keep or j + 1 < count)
        values.append(value)
        products.append(product)
    return values[0], [torch.stack(parts, dim) for parts in zip(*products, strict=True)]


def apply_block(linear_map: LinearMap, vectors: Vector, block: bool) -> tuple[Tensor, Vector]:
    """The loss, and the product with one vector, or with each column of a block (its last
    dimension)."""
    if not block:
        return linear_map.apply(vectors, False)
    rows, count = [leaf.movedim(-1, 0) for leaf in vectors], vectors[0].shape[-1]
    return apply_rows(linear_map, lambda i, j: [x[i:j] for x in rows], count, False, dim=-1)


def in_double(linearize: Callable[[Problem], LinearMap], problem: Problem) -> LinearMap:
    """A map computed in float64; it returns the loss in the leaves' dtype, the product in float64."""
    caller = f"{problem.policy.caller}(mode='{DIFFERENCES}')"
    validation.refuse_transforms(caller, "use mode='auto' there.")
    dtype = problem.leaves[0].dtype
    point = linearize(problem.in_double())

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        value, product = point.apply(finite_differences.to_double(vector), keep_graph)
        # Operators compare losses of passes in the dtype of the parameters.
        return value.to(dtype), product

    return LinearMap(apply)


REVERSE, FORWARD = "reverse-over-reverse", "forward-over-reverse"
HessianMode = Literal["auto", "reverse-over-reverse", "forward-over-reverse", "finite-differences"]
HESSIAN_MODES = get_args(HessianMode)


@final
@dataclass(frozen=True)
class HessianKind(CurvatureKind):
    """The Hessian of a loss. mode: as in `hoglib.hvp`."""

    mode: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in HESSIAN_MODES:
            validation.choice("mode", self.mode, HESSIAN_MODES)

    def linearize(self, problem: Problem, several: bool) -> LinearMap:
        policy = problem.policy
        mode = REVERSE if self.mode == "auto" else self.mode
        if torch_internals.transforms_active() and mode != DIFFERENCES:
            if self.mode == REVERSE:
                raise UnsupportedError(
                    f"{policy.caller}: expected mode='auto' or '{FORWARD}' inside torch.func "
                    f"transforms, got '{REVERSE}', whose vmap is silently wrong through normalisation "
                    "layers."
                )
            mode = FORWARD
        if mode == REVERSE:
            return reverse_over_reverse(problem)
        if policy.strict is not None:
            raise ArgumentValueError(
                f"{policy.caller}(strict=True): expected mode='{REVERSE}', got {mode}, which "
                "cannot tell a missing second derivative from a zero."
            )
        if mode == FORWARD:
            return forward_over_reverse(problem)
        return in_double(differences_of_gradient, problem)


def reverse_over_reverse(problem: Problem) -> LinearMap:
    """H v = d <grad f, v> / d p. The graph of the gradient is kept between products."""
    policy = problem.policy
    caller, create_graph, strict = policy.caller, policy.create_graph, policy.strict
    gradient = gradient_with_graph(problem, problem.leaves, caller, create_graph)
    value, p, grads, graph = gradient

    def apply(v: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        with graph.backward_modes():
            product = vjp(grads, p, v, caller, keep_graph, create_graph, graph)
            if strict is not None:
                _check_strict(caller, strict, product)
            return value, materialize_grads(product, p)

    def product(v: Vector) -> Vector:
        return apply(v, True)[1]

    def held_bytes() -> int:
        return graph_bytes([g for g in grads if g is not None and g.requires_grad])

    def unused() -> tuple[int, ...]:
        # Mostly (): this test is faster than the comprehension
        some = NoneType in map(type, grads)
        return tuple([i for i, g in enumerate(grads) if g is None]) if some else ()

    several = value, Rows(problem, graph.names, product, held_bytes, product, skips_zeros=True)
    return LinearMap(apply, held_bytes, unused, gradient, several)


def forward_over_reverse(problem: Problem) -> LinearMap:
    """H v = d grad f(p + e v) / d e in forward mode. Nothing is kept between products."""
    policy, leaves = problem.policy, problem.leaves
    at = leaves if policy.create_graph else [leaf.detach() for leaf in leaves]
    in_transforms = torch_internals.transforms_active()
    # Without a graph of the product, keep only the tangents of the gradient.
    tangents_only = not (policy.create_graph or in_transforms or torch_internals.tracing())

    def checked(*p: Tensor) -> Tensor:
        value = problem(*p)
        check_custom_functions(graph_summary(value), policy.caller)
        if tangents_only:  # after the loss ran: the loss may itself differentiate by p
            torch_forward_mode.keep_tangents(p)
        return value

    def in_forward_mode(vector: Vector, with_graph: bool) -> tuple[Tensor, Vector]:
        def value_and_gradient(*p: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            value, pull = torch.func.vjp(checked, *p)[:2]
            one = torch.ones_like(value)
            # Without a graph of the product, backward frees the loss's graph.
            keep = with_graph and not tangents_only
            return value, pull(one, retain_graph=keep, create_graph=with_graph)

        try:
            given = tuple(at), tuple(vector)
            found: Any = torch.func.jvp(value_and_gradient, *given, has_aux=tangents_only)
        finally:
            torch_internals.unwrap_kept(problem.loss)
        if tangents_only:
            value, _, product = found
        else:
            (value, _), (_, product) = found
        return value, list(product)

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        before = RandomState() if tangents_only else None
        try:
            with torch_forward_mode.one_thread_in_forward_mode(policy.caller):
                try:
                    value, product = in_forward_mode(vector, not tangents_only)
                except NotImplementedError:
                    # Some operations, such as silu's backward, have a forward-mode rule only with
                    # create_graph=True: try again.
                    if before is None:
                        raise
                    before.restore()
                    value, product = in_forward_mode(vector, True)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            raise no_forward_mode(f"{policy.caller}(mode='{FORWARD}')", error) from error
        # With create_graph, dependence on outside tensors is legitimate.
        if not (policy.create_graph or in_transforms):
            check_uses_given_params(graph_summary(value), leaves, policy.caller)
        return value, product

    return LinearMap(apply)


def differences_of_gradient(problem: Problem) -> LinearMap:
    """H v = (grad f(p + h v) - grad f(p - h v)) / 2h, extrapolated to h = 0."""

    def loss(*leaves: Tensor) -> Tensor:  # clones of args: a model may change its batch in place
        return problem.with_args(*pytree.map_tensors(torch.clone, problem.args))(*leaves)

    gradient, leaves = finite_differences.gradient_function(loss), problem.leaves

    def apply(vector: Vector, keep_graph: bool) -> tuple[Tensor, Vector]:
        value = loss(*fresh_leaves(leaves, False))
        check_uses_given_params(graph_summary(value), leaves, problem.policy.caller)
        Hv = finite_differences.directional_derivative(gradient, leaves, vector, problem.placement)
        return value.detach(), Hv

    return LinearMap(apply)


def _check_strict(caller: str, names: tuple[str, ...], product: list[Tensor | None]) -> None:
    missing = [repr(name) for name, part in zip(names, product, strict=True) if part is None]
    if missing:
        raise NoSecondDerivative(
            f"{caller}(strict=True): expected a second derivative for every parameter, got none for "
            f"{', '.join(missing)}: the gradient does not depend on it. Leave it out of params, "
            f"or use strict=False, which gives zero there."
        )
