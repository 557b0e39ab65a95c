"""The Hessian at one point as a linear map, and the routes by which it is applied to a vector."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import torch_internals
from hoglib._core.autograd import (
    NOT_DIFFERENTIABLE,
    Vector,
    gradient_with_graph,
    materialize_grads,
    vjp,
)
from hoglib._core.finite_differences import check_hessian_product, unchecked_functions
from hoglib._core.gradient_graph import check_custom_functions, graph_summary
from hoglib.errors import ArgumentValueError, HoglibError, NoSecondDerivative, UnsupportedError

ScalarFunction = Callable[..., Tensor]


class LinearMap(NamedTuple):
    """A linear map at one point.

    `apply(v, keep)` is the value of the function there and the product of the map with v; without
    `keep` it is the last product, and the graph goes.
    """

    apply: Callable[[Vector, bool], tuple[Tensor, Vector]]
    graph: tuple[Tensor, ...] = ()  # what holds the graph that is kept between products
    # the leaves that the function does not depend on, if known
    unused: tuple[int, ...] | None = None
    compiled: Any = None  # the product as graphs, if it runs so


class Call(NamedTuple):
    """For which public function a route works, and how."""

    what: str
    create_graph: bool = False
    strict: list[str] | None = None  # the leaves' names, if each must have a second derivative


def apply_block(point: LinearMap, vectors: Vector, block: bool) -> tuple[Tensor, Vector]:
    """The product with one vector, or with each column of a block, counted by its last dimension."""
    if not block:
        return point.apply(vectors, False)
    count = vectors[0].shape[-1]
    if any(leaf.requires_grad for leaf in vectors) or torch_internals.transforms_active():
        applied = [
            point.apply([leaf[..., j] for leaf in vectors], j + 1 < count) for j in range(count)
        ]
        products = zip(*(product for _, product in applied), strict=True)
        return applied[0][0], [torch.stack(parts, -1) for parts in products]
    # each column copied together: matrix products with strided vectors take half as long again
    column = [leaf.new_empty(leaf.shape[:-1]) for leaf in vectors]
    found: Vector = []
    for j in range(count):
        for place, leaf in zip(column, vectors, strict=True):
            place.copy_(leaf[..., j])
        value, product = point.apply(column, j + 1 < count)
        found = found or [part.new_empty((count, *part.shape)) for part in product]
        for whole, part in zip(found, product, strict=True):
            whole[j].copy_(part)
    return value, [whole.movedim(0, -1) for whole in found]


def reverse_over_reverse(func: ScalarFunction, leaves: Vector, call: Call) -> LinearMap:
    """H v as the gradient of <grad f, v>; the gradient's graph is kept from one v to the next."""
    value, own, gradient, graph = gradient_with_graph(func, leaves, call.what, call.create_graph)
    unseen = unchecked_functions(value, graph)

    def apply(vector: Vector, keep: bool) -> tuple[Tensor, Vector]:
        product = vjp(gradient, own, vector, call.what, keep, call.create_graph)
        if call.strict is not None:
            _strictly(call, call.strict, product)
        found = materialize_grads(product, own)
        if unseen and not call.create_graph:
            check_hessian_product(call.what, unseen, func, leaves, vector)
            unseen.clear()
        return value, found

    kept = tuple(g for g in gradient if g is not None and g.requires_grad)
    unused = tuple(i for i, g in enumerate(gradient) if g is None)
    return LinearMap(apply, kept, unused)


def _strictly(call: Call, names: list[str], product: list[Tensor | None]) -> None:
    missing = [repr(name) for name, part in zip(names, product, strict=True) if part is None]
    if missing:
        raise NoSecondDerivative(
            f"{call.what}(strict=True): expected a second derivative for every parameter, got none for "
            f"{', '.join(missing)}: the gradient does not depend on it. Leave it out of params, "
            f"or use strict=False, which gives zero there."
        )


def forward_over_reverse(func: ScalarFunction, leaves: Vector, call: Call) -> LinearMap:
    """H v as the derivative of grad f along v in forward mode; nothing is kept between products."""
    cannot_be_strict(call, "forward-over-reverse")

    def watched(*own: Tensor) -> Tensor:
        value = func(*own)
        check_custom_functions(graph_summary(value), call.what)
        return value

    def gradient(*own: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        grads, value = torch.func.grad_and_value(watched, argnums=tuple(range(len(own))))(*own)
        return grads, value

    at = leaves if call.create_graph else [leaf.detach() for leaf in leaves]

    def apply(vector: Vector, keep: bool) -> tuple[Tensor, Vector]:
        try:
            output: Any = torch.func.jvp(gradient, tuple(at), tuple(vector))
        except (RuntimeError, NotImplementedError) as error:
            raise no_forward_mode(call.what, "mode='forward-over-reverse'", error) from error
        (_, value), (product, _) = output
        return value, list(product)

    return LinearMap(apply)


def cannot_be_strict(call: Call, mode: str) -> None:
    if call.strict is not None:
        raise ArgumentValueError(
            f"{call.what}(strict=True): expected mode='reverse-over-reverse', got {mode}, which "
            "cannot tell a missing second derivative from a zero."
        )


def no_forward_mode(what: str, how: str, error: Exception) -> Exception:
    """The error of an operation that torch cannot differentiate in forward mode, explained."""
    words = (
        *NOT_DIFFERENTIABLE,
        "ZeroTensor",
        "jvp",
        "autocast",
        "forward mode AD",
        "functorch transform",
    )
    if isinstance(error, HoglibError) or not any(word in str(error) for word in words):
        return error
    hint = ""
    if "ZeroTensor" in str(error):
        hint = " torch's mse_loss is such an operation: leave stand_ins at True."
    return UnsupportedError(
        f"{what}({how}): expected operations that torch can differentiate in forward mode, got an "
        f"error from one: {str(error).splitlines()[0]}{hint} Outside of torch.func transforms use the "
        "reverse mode."
    )
