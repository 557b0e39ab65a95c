"""The derivatives that `audit` checks, each as a function of leaves and directions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, fresh_leaves
from hoglib._core.finite_differences import gradient_function
from hoglib.errors import ArgumentTypeError, ArgumentValueError

Scalar = Callable[..., Tensor]  # a scalar function of leaves
# What a route computes, as part of a sentence.
TEXTS = {
    "first": "the gradient", "hessian": "H v", "curvature": "w^T H v",
    "third": "the third derivative",
}  # fmt: skip


class Route(NamedTuple):
    """One way to a derivative of a scalar function f of leaves, along directions v and w.

    quantity: "first" for the gradient, "hessian" for H v, "curvature" for w^T H v, "third" for the
    derivative of w^T H v. product(f, leaves, v, w) computes it.
    """

    key: str
    title: str
    quantity: str
    product: Callable[[Scalar, Vector, Vector, Vector], Vector]

    @property
    def row(self) -> str:
        """The name of its row in a report."""
        order = self.quantity if self.quantity in ("first", "third") else "second"
        return f"{order} derivative: {self.title}"

    @property
    def text(self) -> str:
        """What it computes, as part of a sentence."""
        what = TEXTS[self.quantity]
        return what if self.quantity == "first" else f"{what} by {self.title}"


def requested_routes(names: object) -> list[Route]:
    """The routes with these keys or titles; for None the one that hvp(mode="auto") takes."""
    if names is None:
        return [AUTO]
    given = [names] if isinstance(names, str) else names
    known = {name: route for route in ROUTES for name in (route.title, route.key)}
    known |= {"auto": AUTO, "rrr": THIRD}
    if not isinstance(given, list | tuple | set | frozenset) or not given:
        raise ArgumentTypeError(
            f"routes: expected some of {', '.join(route.key for route in ROUTES)}, got "
            f"{validation.describe(names)}."
        )
    for name in given:
        if not isinstance(name, str) or name not in known:
            raise ArgumentValueError(f"routes: expected some of {', '.join(known)}, got {name!r}.")
    chosen = {known[name].key for name in given}
    return [route for route in ROUTES if route.key in chosen]


def gradient(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """grad f."""
    return gradient_function(f)(leaves)


def _gradient(f: Scalar, own: Vector) -> Vector:
    """grad f with its graph."""
    return _vjp([f(*own)], own, [own[0].new_ones(())], create_graph=True)


def _vjp(outputs: Vector, own: Vector, v: Vector, *, create_graph: bool = False) -> Vector:
    """d <outputs, v> / d own; an output without a graph is a constant, as it is to autograd."""
    pairs = [(y, u.to(y)) for y, u in zip(outputs, v, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in own]
    given = [[*part] for part in zip(*pairs, strict=True)]
    found = torch.autograd.grad(
        given[0], own, given[1], create_graph=create_graph, materialize_grads=True
    )
    return list(found)


def reverse_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """d <grad f, v> / d leaves."""
    own = fresh_leaves(leaves, False)
    return _vjp(_gradient(f, own), own, v)


def third_order(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """d <H v, w> / d leaves, reverse three times."""
    own = fresh_leaves(leaves, False)
    product = _vjp(_gradient(f, own), own, v, create_graph=True)
    return _vjp(product, own, w)


def forward_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The jvp of grad f."""
    return list(jvp(_by_all(grad, f, leaves), tuple(leaves), tuple(v))[1])


def reverse_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The gradient of the jvp of f."""
    return list(_by_all(grad, _slope(f, v), leaves)(*leaves))


def forward_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The jvp along w of the jvp of f along v."""
    return [jvp(_slope(f, v), tuple(leaves), tuple(w))[1]]


def func_hessian(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A column of torch.func.hessian = jacfwd(jacrev(f)): vmap over directions."""
    jacobian = _by_all(jacrev, f, leaves)
    return _vmap_of_one(lambda *one: jvp(jacobian, tuple(leaves), one)[1], v)


def jacrev_of_jacrev(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A row of jacrev(jacrev(f)): vmap over the cotangents of a gradient."""
    pull = torch.func.vjp(_by_all(jacrev, f, leaves), *leaves)[1]
    return _vmap_of_one(lambda *one: pull(one), v)


def grad_of_vmap(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A meta-gradient by grad(vmap(task)), with inner gradients at the parameters of each task."""

    def total(*own: Tensor) -> Tensor:
        def task(e: Tensor) -> Tensor:
            adapted = [x + e * y for x, y in zip(own, w, strict=True)]
            return pytree.dot(list(_by_all(grad, f, leaves)(*adapted)), v)

        slopes: Tensor = vmap(task, randomness="same")(leaves[0].new_zeros(1))
        return slopes.mean()

    return list(_by_all(grad, total, leaves)(*leaves))


def _by_all(transform: Any, f: Scalar, leaves: Vector) -> Callable[..., tuple[Tensor, ...]]:
    """torch.func.grad or jacrev of f by all leaves."""
    result: Callable[..., tuple[Tensor, ...]] = transform(f, argnums=tuple(range(len(leaves))))
    return result


def _slope(f: Scalar, v: Vector) -> Scalar:
    def slope(*own: Tensor) -> Tensor:
        found: Tensor = jvp(f, own, tuple(v))[1]
        return found

    return slope


def _vmap_of_one(function: Callable[..., tuple[Tensor, ...]], v: Vector) -> Vector:
    found = vmap(function, randomness="same")(*(part[None] for part in v))
    return [part[0] for part in found]


FIRST = Route("first", "reverse", "first", gradient)
AUTO = Route("rr", "reverse-over-reverse", "hessian", reverse_over_reverse)  # hvp(mode="auto")
THIRD = Route("third order", "reverse-over-reverse-over-reverse", "third", third_order)
ROUTES = (
    AUTO,
    Route("fr", "forward-over-reverse", "hessian", forward_over_reverse),
    Route("rf", "reverse-over-forward", "hessian", reverse_over_forward),
    Route("ff", "forward-over-forward", "curvature", forward_over_forward),
    Route("torch.func.hessian", "torch.func.hessian", "hessian", func_hessian),
    Route("jacrev of jacrev", "jacrev of jacrev", "hessian", jacrev_of_jacrev),
    Route("grad of vmap", "grad of vmap", "hessian", grad_of_vmap),
    THIRD,
)
